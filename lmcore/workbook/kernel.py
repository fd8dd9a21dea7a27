"""The Jupyter kernel in which notebooks are executed: this very interpreter, and nothing that is configured here."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

KERNEL = "lmcore-workbook"
LAUNCHER = "ipykernel_launcher"


@contextmanager
def private_kernel(variables: Mapping[str, str] | None = None) -> Iterator[str]:
    """Name of a Jupyter kernel that is this very interpreter, whatever kernels and profiles are installed.

    `variables` are added to its environment.
    """
    with tempfile.TemporaryDirectory(prefix="lmcore-kernel-") as folder:
        spec = Path(folder) / "kernels" / KERNEL
        spec.mkdir(parents=True)
        environment = {
            "IPYTHONDIR": str(Path(folder) / "ipython"),
            # a cluster's MPLBACKEND=Agg would make every figure vanish from the notebook
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
            **(variables or {}),
        }
        argv = [sys.executable, "-m", LAUNCHER, "-f", "{connection_file}", "--log-level=ERROR"]
        kernel = {"argv": argv, "display_name": KERNEL, "language": "python", "env": environment}
        (spec / "kernel.json").write_text(json.dumps(kernel), encoding="utf-8")
        changes = {
            "JUPYTER_PATH": os.pathsep.join(filter(None, [folder, os.environ.get("JUPYTER_PATH")])),
            "JUPYTER_RUNTIME_DIR": str(Path(folder) / "runtime"),
        }
        before = {key: os.environ.get(key) for key in changes}
        os.environ.update(changes)
        try:
            yield KERNEL
        finally:
            for key, value in before.items():
                os.environ.pop(key) if value is None else os.environ.update({key: value})
