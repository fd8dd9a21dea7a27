"""A private Slurm cluster on one host: munged, slurmctld and three slurmd, started for the tests and surely stopped."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
from slurm_configuration import NODES, write_configuration

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "setpriv")
FINAL_STATES = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "DEADLINE")
SEARCH_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
"""The Python that runs the tests first, so that jobs find its `lmcore`; Debian keeps the daemons in /usr/sbin."""


def missing_programs() -> list[str]:
    """The programs of a Slurm cluster that are not installed here."""
    return [name for name in PROGRAMS if not shutil.which(name, path=SEARCH_PATH)]


class Cluster:
    """Slurm with the nodes n1, n2 and n3 and the partitions main and spot (preempted by main), all in `folder`.

    A context manager: on entry all nodes are idle, on exit every daemon and every process of a job has ended.
    Each node has two pretended GPUs.

    Args:
        folder: an existing folder of the user alone (munge refuses others), with a short path: sockets lie in it.
    """

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "SRUN"))}
        self.environment = inherited | {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "LMCORE_TEST_CLUSTER": str(self.folder),
            "PATH": SEARCH_PATH,
        }
        self._daemons: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> "Cluster":
        try:
            write_configuration(self.folder)
            self._start_munged()
            self._start("slurmctld", "slurmctld", "-D")
            self.wait_until(lambda: self.run("scontrol", "ping", check=False).returncode == 0, "slurmctld answered")
            for name in NODES:
                self.start_node(name, wait=False)
            self._wait_until_idle(*NODES)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error) -> None:
        self.stop()

    def stop(self) -> None:
        """Kills the jobs' processes and the daemons, nodes first, and waits until they have ended."""
        for name in NODES:
            self.kill_node(name)
        for name in ("slurmctld", "munged"):
            self._kill_daemon(name)
        kill(cluster_processes(self.folder))

    def run(
        self, *command: object, check: bool = True, cwd: Path | None = None, timeout: float = 300, **variables: object
    ) -> subprocess.CompletedProcess:
        """Runs a command in the cluster's environment; with `check`, failing is an AssertionError with its output."""
        environment = self.environment | {key: str(value) for key, value in variables.items()}
        words = [str(word) for word in command]
        done = subprocess.run(
            words, env=environment, cwd=cwd, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0 or not check, f"{' '.join(words)} ended with {done.returncode}:\n{done}"
        return done

    def sbatch(
        self, script: Path | str, *arguments: object, options: tuple | list = (), cwd: Path, **variables: object
    ) -> str:
        """Submits a script from `cwd` and returns the job's id. The log lands where the script or sbatch says."""
        done = self.run("sbatch", "--parsable", *options, script, *arguments, cwd=cwd, **variables)
        return done.stdout.strip().split(";")[0]

    def records(self, job: str) -> list[dict[str, str]]:
        """What `scontrol show job` says: one dictionary, or one for each task of an array; none for an unknown job."""
        done = self.run("scontrol", "--oneliner", "show", "job", job, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("JobId=")]
        return [dict(re.findall(r"(?:^|\s)([\w:/]+)=(\S*)", line)) for line in lines]

    def info(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says (JobState, NodeList, Restarts, Reason …); of an array its first record."""
        records = self.records(job)
        assert records, f"Slurm knows no job {job}:\n{self.describe()}"
        return records[0]

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED, FAILED …; of an array a task's that has not ended, or else that has failed."""
        states = [record["JobState"] for record in self.records(job)]
        unfinished = [state for state in states if state not in FINAL_STATES]
        failed = [state for state in states if state != "COMPLETED"]
        return [*unfinished, *failed, *states, "UNKNOWN"][0]

    def wait(self, job: str, *states: str, timeout: float = 300) -> str:
        """Waits for one of `states`, or without them until the job has ended, and returns the state.

        A job that has ended in another state, or is late, is an AssertionError with the queue and all logs.
        """
        wanted = states or FINAL_STATES
        seen = [""]

        def there() -> bool:
            seen.append(self.state(job))
            return seen[-1] in {*wanted, *FINAL_STATES}

        self.wait_until(there, f"job {job} was {' or '.join(wanted)}", timeout, job)
        assert seen[-1] in wanted, f"job {job} is {seen[-1]}\n{self.describe(job)}"
        return seen[-1]

    def wait_until(self, condition, what: str, timeout: float = 300, job: str | None = None) -> None:
        """Waits until `condition()` is true; late, it is an AssertionError that says `what` did not happen."""
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, f"in {timeout} s it did not happen that {what}\n{self.describe(job)}"
            time.sleep(0.3)

    def log(self, job: str) -> str:
        """The text of the job's output file so far ('' where there is none yet)."""
        path = Path(self.info(job).get("StdOut", ""))
        return path.read_text(errors="replace") if path.is_file() else ""

    def describe(self, job: str | None = None) -> str:
        """The queue, the nodes, the ends of the daemons' logs and a job's record and log, for messages of failure."""
        looks = [("squeue", "--all"), ("sinfo", "-N"), *([("scontrol", "show", "job", job)] if job else [])]
        words = [self.run(*look, check=False).stdout for look in looks]
        logs = [Path(record.get("StdOut", "")) for record in (self.records(job) if job else [])]
        for path in (path for path in [*self.folder.glob("*.out"), *logs] if path.is_file()):
            words += [f"{path}:", *path.read_text(errors="replace").splitlines()[-30:]]
        return "\n".join(words)

    def kill_node(self, name: str) -> None:
        """What a power failure does: SIGKILL to the node's slurmd, slurmstepds and job processes."""
        self._kill_daemon(name)
        kill(cluster_processes(self.folder, name))

    def start_node(self, name: str, wait: bool = True) -> None:
        """Starts a node's slurmd, and waits until the node takes jobs."""
        self._start(name, "slurmd", "-D", "-N", name)
        if wait:
            self._wait_until_idle(name)

    def _start_munged(self) -> None:
        """Starts munged with a key of its own, and waits for its socket."""
        paths = {"key-file": "key", "socket": "socket", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{suffix}" for option, suffix in paths.items()]
        # forced: munged wants a socket that other users can reach, and there are none here
        self._start("munged", "munged", "--foreground", "--force", "--num-threads=2", *options)
        self.wait_until((self.folder / "munge.socket").exists, "munged opened its socket")

    def _start(self, name: str, *command: str) -> None:
        """Starts a daemon in the foreground, in a session of its own, its output in NAME.out."""
        with (self.folder / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],  # it ends with the tests, also when they are killed
                env=self.environment | {"SLURMD_NODENAME": name},  # by which cluster_processes knows the node
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _kill_daemon(self, name: str) -> None:
        daemon = self._daemons.pop(name, None)
        if daemon is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()

    def _wait_until_idle(self, *names: str) -> None:
        def idle() -> bool:
            shown = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%N %t", check=False).stdout
            return {f"{name} idle" for name in names} <= set(shown.splitlines())

        self.wait_until(idle, f"{', '.join(names)} became idle")


def cluster_processes(folder: Path, node: str = "*") -> Iterator[psutil.Process]:
    """Processes of the cluster in `folder`, or of one of its nodes, known by their environment or by their open log.

    Two variables name the cluster and the node: LMCORE_TEST_CLUSTER and SLURMD_NODENAME. A slurmstepd writes its
    title over its environment, but holds the log of its node open.
    """
    logs = {str(path) for path in folder.glob(f"{node}.log")}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.name().startswith("slurmstepd"):
                found = any(each.path in logs for each in process.open_files())
            else:
                variables = process.environ()
                found = variables.get("LMCORE_TEST_CLUSTER") == str(folder)
                found = found and node in ("*", variables.get("SLURMD_NODENAME"))
            if found:
                yield process


def kill(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL to the processes, and waits until they have ended (a zombie has, whoever its parent is)."""
    found = {process for process in processes if process.pid != os.getpid()}
    for process in list(found):  # a job may have emptied its environment: it is known as a slurmstepd's child
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update(process.children(recursive=True))
    # Suspended first: a slurmstepd that outlives its job, if only for a moment, reports that the job has failed.
    for step in (psutil.Process.suspend, psutil.Process.kill):
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                step(process)
    end = time.monotonic() + 10
    while any(_alive(process) for process in found) and time.monotonic() < end:
        time.sleep(0.02)


def _alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
