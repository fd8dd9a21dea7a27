"""Runs the tests of this folder in parts at the same time, each with a cluster of its own: they mostly wait.

    python tests/slurm/side_by_side.py [options of pytest]

Prints what each part has to say when it has ended, and ends with the exit code of one that failed, or 0.
"""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

NOTHING_CHOSEN = 5
"""Exit code of pytest where its options leave no test."""
FOLDER = Path(__file__).parent
PARTS = (("test_workbook_jobs.py",), ("test_cluster.py", "test_failures.py"))
"""Files that run beside each other, and beside all others, which are the last part."""


def main(options: list[str]) -> int:
    """Runs all parts; returns the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    apart = {name for names in PARTS for name in names}
    rest = tuple(sorted(path.name for path in FOLDER.glob("test_*.py") if path.name not in apart))
    with tempfile.TemporaryDirectory() as logs:
        parts: list[tuple[subprocess.Popen, Path]] = []
        try:
            for names in (*PARTS, rest):
                log = Path(logs, names[0])
                command = [sys.executable, "-m", "pytest", "-m", "slurm", *options, *(FOLDER / name for name in names)]
                with log.open("wb") as output:
                    parts.append((subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT), log))
            codes = [report(*part) for part in parts]
        finally:
            for process, _ in parts:
                if process.poll() is None:
                    process.terminate()  # its cluster is stopped then, see conftest.py
                    process.wait()
    return next((code for code in codes if code not in (0, NOTHING_CHOSEN)), min(codes))


def report(process: subprocess.Popen, log: Path) -> int:
    """Waits for a part and prints its output; returns its exit code."""
    code = process.wait()
    print(f"{log.name} …", log.read_text(errors="replace"), sep="\n", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
