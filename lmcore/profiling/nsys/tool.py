"""Nsight Systems: finds it, runs a program under it, exports the report to SQLite (CS336 A2 section 1.1.4)."""

import glob
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.errors import UserError, require
from lmcore.files import not_a_pipe
from lmcore.profiling.processes import end_with_children

if TYPE_CHECKING:  # pandas, which `lmcore doctor` does without, is imported when a trace is loaded
    from lmcore.profiling.nsys.trace import Trace

TIMEOUT = 1800.0
"""Seconds that a profiled program may take, with what nsys does after it; or an export."""

FLAGS = (
    "--trace=cuda,nvtx",  # not osrt: calls of the operating system's library, which once made a file of 2 GB
    "--sample=none",
    "--cpuctxsw=none",
    "--capture-range=cudaProfilerApi",  # nothing before torch.cuda.profiler.start(): no warm-up, no set-up
    "--capture-range-end=stop",  # and not stop-shutdown, the default, which ends the program as well
    "--cuda-graph-trace=node",  # the kernels of a CUDA graph one by one
    "--force-overwrite=true",
)

INSTALL = (
    "install Nsight Systems (https://developer.nvidia.com/nsight-systems, with conda as nsight-systems, or with "
    "NVIDIA's apt repository as nsight-systems-cli), or name the program in the variable NSYS"
)

PLACES = (
    "/usr/local/cuda*/bin/nsys",
    "/opt/nvidia/nsight-systems*/*/bin/nsys",
    "/opt/nvidia/nsight-systems*/bin/nsys",
    "/usr/local/cuda*/nsight-systems-*/bin/nsys",
    "/opt/nvidia/nsight-compute/*/host/target-linux-*/nsys",
    "/usr/local/cuda*/nsight-compute-*/host/target-linux-*/nsys",
)
"""Where installers put nsys, the best place first. Nsight Compute brings a copy of its own."""


def find_nsys() -> str:
    """Path of the nsys to use: the one that the variable NSYS names, else on the PATH, else in folders of installers.

    NSYS=off finds none. Raises `UserError` that says what was looked at and what to install.
    """
    wanted = os.environ.get("NSYS")
    require(wanted != "off", "Nsight Systems is switched off by NSYS=off.")
    for path in [shutil.which(wanted) or wanted] if wanted else candidates():
        if nsys_version(path) is not None:
            return path
    require(not wanted, f"The variable NSYS names {wanted}, which does not run as nsys here; {INSTALL}.")
    raise UserError(f"No Nsight Systems (nsys) runs here, from the PATH, CUDA's or Nsight's folders: {INSTALL}.")


def candidates() -> Iterator[str]:
    """Files that may be nsys, the best first; of one place those of the newest version."""
    yield from filter(None, [shutil.which("nsys")])
    for pattern in PLACES:  # 2025.10 comes before 2025.9
        yield from sorted(glob.glob(pattern), key=lambda path: [*map(int, re.findall(r"\d+", path))], reverse=True)


@cache
def nsys_version(path: str) -> str | None:
    """The version that the program at `path` says, such as "2025.3.1", or None if it does not run as nsys."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = re.search(r"Nsight Systems version (\d+\.\d+\.\d+)", done.stdout)
    return said[1] if said and done.returncode == 0 else None


def profile_command(nsys: str, program: Sequence[str], report: Path) -> list[str]:
    """The command that runs `program` under nsys into `report`."""
    return [nsys, "profile", *FLAGS, f"--output={report}", *program]


def run_under_nsys(nsys: str, program: Sequence[str], folder: Path, timeout: float = TIMEOUT) -> Path:
    """Runs `program` under nsys; folder/profile.nsys-rep and profile.sqlite are kept, nsys.log is what was said.

    Only what runs between torch.cuda.profiler.start() and stop() is recorded. Returns the SQLite file. Raises
    `UserError` when the time is up, when the range never fired, and when nsys cannot make a report.
    """
    folder.mkdir(parents=True, exist_ok=True)
    report, log = folder / "profile.nsys-rep", folder / "nsys.log"
    for old in (report, report.with_suffix(".sqlite")):
        old.unlink(missing_ok=True)
    code = run_logged(profile_command(nsys, program, report), log, timeout)
    why = "the capture range never fired, as the program did not call torch.cuda.profiler.start()"
    why = why if code == 0 else f"it ended with code {code} ({last_words(log)})"
    require(report.exists(), f"nsys {nsys_version(nsys)} made no report: {why}; see {log}.")
    return export_report(nsys, report)


def run_logged(command: Sequence[str], log: Path, timeout: float = TIMEOUT) -> int:
    """Runs a command with its output in `log` and returns its exit code; at a timeout all of its processes end.

    Raises `UserError` at a timeout.
    """
    with open(log, "ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        raise UserError(f"nsys was ended after {timeout:.0f} s without a report; see {log}.") from None
    finally:
        if process.returncode is None:
            end_with_children(process.pid)
            process.wait()


def export_report(nsys: str, report: Path) -> Path:
    """Exports a .nsys-rep to SQLite beside it. Raises `UserError` when nsys is too old for the file or fails."""
    require(not_a_pipe(report).is_file(), f"There is no file {report}.")
    log = report.with_name("nsys-export.log")
    new = report.with_suffix(".sqlite")
    try:
        new.unlink(missing_ok=True)
        log.write_text("")
    except OSError as error:
        raise UserError(f"Cannot export beside {report} ({error.strerror}); copy it to a folder of yours.") from error
    command = [nsys, "export", "--type=sqlite", "--force-overwrite=true", f"--output={new}", str(report)]
    if run_logged(command, log) == 0 and new.exists():
        return new
    version = nsys_version(nsys)
    raise UserError(
        f"nsys {version} cannot read {report}: it is of a newer version, or damaged. nsys said: {last_words(log)}"
    )


def last_words(log: Path) -> str:
    """The last line of a log that says something."""
    lines = re.findall(r"^.*\w{3}.*$", log.read_text(errors="replace"), re.MULTILINE)
    return lines[-1].strip() if lines else "nothing"


def load_trace(path: str | os.PathLike) -> "Trace":
    """The trace in a .sqlite export, a .nsys-rep, which is exported first, or a .json (.gz) of torch.profiler.

    Raises `UserError` as those steps do.
    """
    from lmcore.profiling.nsys.export import read_export
    from lmcore.profiling.nsys.torch_trace import read_torch_trace

    path = Path(path)
    if path.name.endswith((".json", ".json.gz")):
        return read_torch_trace(path)
    require(
        path.suffix in (".sqlite", ".db", ".nsys-rep"),
        f"{path} is neither a .nsys-rep of Nsight Systems nor its SQLite export.",
    )
    return read_export(export_report(find_nsys(), path) if path.suffix == ".nsys-rep" else path)
