"""Runs the code of a hand-in in a process of its own, with limits of memory and time."""

import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TOOK_LONGER = 124
"""Exit code of a process that took longer than it may, as `timeout` has it."""


@dataclass(frozen=True)
class Limits:
    """What the code of a hand-in may take."""

    seconds: float = 120.0
    """Of processor time, for one cell of exercises; a notebook has five times as many by the clock."""
    memory: int = 6_000_000_000
    """Bytes of address space of one process, of which PyTorch takes some two thousand million for itself."""

    def run(self, arguments: Sequence[str], folder: Path, **variables: str) -> tuple[int, str]:
        """Runs Python with these arguments in `folder`; returns its exit code and the last line of its errors.

        It has the seconds of a notebook. Of its process group nothing is left.
        """
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [sys.executable, *arguments], cwd=folder, env=os.environ | variables, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
            )  # fmt: skip
            try:
                if hasattr(resource, "prlimit"):  # on Linux
                    resource.prlimit(process.pid, resource.RLIMIT_AS, (self.memory, self.memory))
                code = process.wait(self.seconds * 5)
            except subprocess.TimeoutExpired:
                code = TOOK_LONGER
                process.terminate()  # `workbook run` ends its kernel, which is not of its group
                with suppress(subprocess.TimeoutExpired):
                    process.wait(20.0)
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            errors.seek(max(errors.seek(0, os.SEEK_END) - 1000, 0))
            return code, errors.read().decode(errors="replace").strip().rpartition("\n")[2]
