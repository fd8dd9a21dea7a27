"""Nsight Systems: finds it, runs a program under it, exports the report to SQLite (CS336 A2 section 1.1.4)."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

from lmcore.errors import UserError, require
from lmcore.profiling.nsys.export import read_export
from lmcore.profiling.nsys.torch_trace import read_torch_trace
from lmcore.profiling.nsys.trace import Trace

PROGRAM_TIMEOUT = 1800.0
"""Seconds that a profiled program may take, with what nsys does after it."""

EXPORT_TIMEOUT = 900.0

FLAGS = (
    "--trace=cuda,nvtx",  # not osrt: calls of the operating system's library, which once made a file of 2 GB
    "--sample=none",
    "--cpuctxsw=none",
    "--capture-range=cudaProfilerApi",  # nothing before torch.cuda.profiler.start(): no warm-up, no set-up
    "--capture-range-end=stop",  # and not stop-shutdown, the default, which ends the program as well
    "--force-overwrite=true",
)

INSTALL = (
    "install Nsight Systems (https://developer.nvidia.com/nsight-systems, with conda as nsight-systems, or with "
    "NVIDIA's apt repository as nsight-systems-cli), or name the program in the variable NSYS"
)

IN_NSIGHT_COMPUTE = "host/target-linux-*/nsys"

PLACES = {
    "CUDA's folder": "/usr/local/cuda*/bin/nsys /opt/cuda*/bin/nsys",
    "Nsight Systems' folder": "/opt/nvidia/nsight-systems*/*/bin/nsys /opt/nvidia/nsight-systems*/*/target-linux-*/nsys"
    " /opt/nvidia/nsight-systems*/bin/nsys /usr/local/cuda*/nsight-systems-*/bin/nsys"
    " /usr/lib/nsight-systems/bin/nsys /opt/nvidia/hpc_sdk/*/*/profilers/Nsight_Systems/bin/nsys",
    "Nsight Compute's folder": f"/opt/nvidia/nsight-compute/*/{IN_NSIGHT_COMPUTE}"
    f" /usr/local/cuda*/nsight-compute-*/{IN_NSIGHT_COMPUTE}",
}
"""Where installers put nsys; of several in one place the newest is taken. Nsight Compute brings a copy of its own."""


@dataclass(frozen=True)
class Nsys:
    """A program nsys that runs here: where it is, its version ("2025.3.1") and where it was found, in words."""

    path: Path
    version: str
    place: str


def find_nsys() -> Nsys:
    """The nsys to use: the one that the variable NSYS names, else on the PATH, else in the folders of installers.

    NSYS=off finds none. Raises `UserError` that says what was looked at and what to install.
    """
    wanted = os.environ.get("NSYS")
    require(wanted != "off", "Nsight Systems is switched off by NSYS=off.")
    if wanted:
        found = shutil.which(wanted)
        version = nsys_version(found) if found else None
        require(version is not None, f"The variable NSYS names {wanted}, which is no nsys that runs here; {INSTALL}.")
        return Nsys(Path(found), version, "the variable NSYS")
    lame = []
    for path, place in candidates():
        if (version := nsys_version(str(path))) is not None:
            return Nsys(path, version, place)
        lame.append(str(path))
    tried = f"{', '.join(lame)} did not run" if lame else "it is not on the PATH, in CUDA's or in Nsight's folders"
    raise UserError(f"There is no Nsight Systems (nsys) here: {tried}; {INSTALL}.")


def candidates() -> Iterator[tuple[Path, str]]:
    """Files that may be nsys, each with its place in words, the best first."""
    if (found := shutil.which("nsys")) is not None:
        yield Path(found), "the PATH"
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if (folder := os.environ.get(variable)) and (path := Path(folder) / "bin" / "nsys").is_file():
            yield path, f"the folder of {variable}"
    if (ncu := shutil.which("ncu")) is not None:
        for path in Path(ncu).resolve().parent.glob(IN_NSIGHT_COMPUTE):
            yield path, "Nsight Compute's folder"
    for place, patterns in PLACES.items():
        paths = {path for pattern in patterns.split() for path in Path("/").glob(pattern.lstrip("/")) if path.is_file()}
        numbers = {path: [int(number) for number in re.findall(r"\d+", str(path))] for path in sorted(paths)}
        for path in sorted(numbers, key=numbers.__getitem__, reverse=True):  # 2025.10 comes before 2025.9
            yield path, place


@cache
def nsys_version(path: str) -> str | None:
    """The version that the program at `path` says, such as "2025.3.1", or None if it is no nsys that runs."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = re.search(r"Nsight Systems version (\d+\.\d+\.\d+)", done.stdout)
    return said[1] if said and done.returncode == 0 else None


def profile_command(nsys: Nsys, program: Sequence[str], report: Path, graphs: bool = False) -> list[str]:
    """The command that runs `program` under nsys into `report`. `graphs`: CUDA graphs are traced node by node."""
    nodes = ["--cuda-graph-trace=node"] if graphs else []
    return [str(nsys.path), "profile", *FLAGS, *nodes, f"--output={report}", *program]


def run_under_nsys(
    nsys: Nsys, program: Sequence[str], folder: Path, graphs: bool = False, timeout: float = PROGRAM_TIMEOUT
) -> Path:
    """Runs `program` under nsys; folder/profile.nsys-rep and profile.sqlite are kept, nsys.log is what was said.

    Only what runs between torch.cuda.profiler.start() and stop() is recorded. Returns the SQLite file. Raises
    `UserError` when the time is up, when the range never fired, and when nsys cannot make a report.
    """
    folder.mkdir(parents=True, exist_ok=True)
    report, log = folder / "profile.nsys-rep", folder / "nsys.log"
    stream = report.with_suffix(".qdstrm")
    for old in (report, stream, report.with_suffix(".sqlite")):
        old.unlink(missing_ok=True)
    code = run_logged(profile_command(nsys, program, report, graphs), log, timeout)
    if not report.exists() and stream.exists():
        import_stream(nsys, stream, report, log)
    why = "the capture range never fired, as the program did not call torch.cuda.profiler.start()"
    why = why if code == 0 else f"it ended with code {code} ({last_words(log)})"
    require(report.exists(), f"nsys {nsys.version} made no report: {why}; see {log}.")
    return export_report(nsys, report)


def run_logged(command: Sequence[str], log: Path, timeout: float) -> int:
    """Runs a command with its output in `log` and returns its exit code; at a timeout all of its processes end.

    So they do at Ctrl-C and SIGTERM, of which they hear nothing in their own session. Raises `UserError` at a timeout.
    """

    def end(number: int, _: object) -> None:
        end_with_children(process)
        signal.signal(number, former[number])
        os.kill(os.getpid(), number)

    in_main = threading.current_thread() is threading.main_thread()  # only that one may set handlers
    with open(log, "ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    former = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM) if in_main}
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        raise UserError(f"nsys was ended after {timeout:.0f} s without a report; see {log}.") from None
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        if process.returncode is None:
            end_with_children(process)


def end_with_children(process: subprocess.Popen) -> None:
    """Ends a process and all that it started, whichever group they are in: first asked, then forced."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for how in (psutil.Process.terminate, psutil.Process.kill):
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                how(member)
        _, family = psutil.wait_procs(family, timeout=5)
    process.wait()


def import_stream(nsys: Nsys, stream: Path, report: Path, log: Path) -> None:
    """Makes the report of a .qdstrm file, which is all that an nsys writes that does not find its importer.

    The copy in Nsight Compute may have none. Raises `UserError` then.
    """
    home = nsys.path.resolve().parent
    importers = [path for folder in (home, *home.parents[:2]) for path in sorted(folder.glob("*/QdstrmImporter"))]
    require(
        bool(importers),
        f"nsys {nsys.version} ({nsys.path}) recorded {stream.name} but cannot make a report of it, as its "
        f"QdstrmImporter is missing; {INSTALL}.",
    )
    run_logged([str(importers[0]), f"--input-file={stream}", f"--output-file={report}"], log, EXPORT_TIMEOUT)


def export_report(nsys: Nsys, report: Path) -> Path:
    """Exports a .nsys-rep to SQLite beside it. Raises `UserError` when nsys is too old for the file or fails."""
    require(report.is_file(), f"There is no file {report}.")
    target = report.with_suffix(".sqlite")
    log = report.with_name("nsys-export.log")
    try:
        log.unlink(missing_ok=True)
        log.touch()
    except OSError as error:
        raise UserError(f"Cannot export beside {report} ({error.strerror}); copy it to a folder of yours.") from error
    new = report.with_suffix(".new.sqlite")  # an older export stands until this one is whole
    new.unlink(missing_ok=True)
    command = [str(nsys.path), "export", "--type=sqlite", "--force-overwrite=true", f"--output={new}", str(report)]
    code = run_logged(command, log, EXPORT_TIMEOUT)
    if code != 0 or not new.exists():
        words = log.read_text(errors="replace")
        old = re.search(r"newer|unsupported|version", words, re.IGNORECASE)
        why = "which seems to be of a newer version; install that one" if old else "and it may be damaged"
        raise UserError(f"nsys {nsys.version} cannot read {report}, {why}; nsys said: {last_words(log)}")
    return new.rename(target)


def last_words(log: Path) -> str:
    """The last line of a log that says something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if re.search(r"\w{3}", line)), "nothing")


def load_trace(path: str | os.PathLike) -> Trace:
    """The trace in a .sqlite export, a .nsys-rep, which is exported first, or a .json (.gz) of torch.profiler.

    Raises `UserError` as those steps do.
    """
    path = Path(path)
    if path.name.endswith((".json", ".json.gz")):
        return read_torch_trace(path)
    require(
        path.suffix in (".sqlite", ".db", ".nsys-rep"),
        f"{path} is neither a .nsys-rep of Nsight Systems nor its SQLite export.",
    )
    return read_export(export_report(find_nsys(), path) if path.suffix == ".nsys-rep" else path)
