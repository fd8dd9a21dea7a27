"""Runs the tests of this folder, those that mostly wait in two parts at the same time, each with a cluster of its own.

    python tests/slurm/side_by_side.py [options of pytest]

Prints what each part has to say when it has ended, and ends with the exit code of one that failed, or 0.
"""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
ONE_PART = ("test_cluster.py", "test_failures.py")
"""Run beside all others but `BUSY`: about half of their time."""
BUSY = ("test_workbook_jobs.py",)
"""They keep two cores busy for minutes, and the others' waits have ends: so they run alone."""
NOTHING_CHOSEN = 5
"""Exit code of pytest where its options leave no test."""


def main(options: Sequence[str]) -> int:
    """Runs all tests; returns the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    other_part = sorted({path.name for path in FOLDER.glob("test_*.py")} - {*ONE_PART, *BUSY})
    codes = at_the_same_time([ONE_PART, other_part], options) + at_the_same_time([BUSY], options)
    return next((code for code in codes if code not in (0, NOTHING_CHOSEN)), min(codes))


def at_the_same_time(parts: Sequence[Sequence[str]], options: Sequence[str]) -> list[int]:
    """Runs the files of each part in a pytest of its own and prints its output; returns the exit codes."""
    with tempfile.TemporaryDirectory() as logs:
        running: list[tuple[subprocess.Popen, Path]] = []
        try:
            for names in parts:
                log = Path(logs, names[0])
                command = [sys.executable, "-m", "pytest", "-m", "slurm", *options, *(FOLDER / name for name in names)]
                with log.open("wb") as output:
                    running.append((subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT), log))
            return [report(*part) for part in running]
        finally:
            for process, _ in running:
                if process.poll() is None:
                    process.terminate()  # its cluster is stopped then, see conftest.py
                    process.wait()


def report(process: subprocess.Popen, log: Path) -> int:
    """Waits for a part and prints its output; returns its exit code."""
    code = process.wait()
    print(f"{log.name} …", log.read_text(errors="replace"), sep="\n", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
