"""A private Slurm cluster on one host: munged, slurmctld and three slurmd, started for the tests and surely stopped."""

import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

NODES = ("n1", "n2", "n3")
GPUS_PER_NODE = 2
CPUS_PER_NODE = 8
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "setpriv")
FINAL_STATES = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "DEADLINE")
START_SECONDS = 60
SEARCH_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
"""The Python that runs the tests first, so that jobs find its `lmcore`; Debian keeps the daemons in /usr/sbin."""

# Facts that took trying:
# - cgroups need a delegated hierarchy; with proctrack/cgroup and without one jobs never run, although srun returns 0.
# - A requeued job waits until the credentials of its first run have expired: two minutes, unless cred_expire is short.
# - Node names do not resolve, so all nodes are 127.0.0.1 with ports of their own.
# - config_overrides believes the CPUs and memory stated here, whatever the host has.
SLURM_CONF = """\
ClusterName=lmcore
SlurmctldHost={hostname}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdDebug=verbose
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MailProg=/bin/true
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
ReturnToService=2
SlurmdTimeout=10
KillWait=5
MinJobAge=86400
InactiveLimit=0
{gres_types}
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF State=UP
PartitionName=spot Nodes=ALL MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace} State=UP
"""
SPOT_GRACE_SECONDS = 20
"""How long a preempted job of the partition spot may save: it gets its `--signal` first and is requeued after this."""


def missing_programs() -> list[str]:
    """The programs of a Slurm cluster that are not installed here."""
    return [name for name in PROGRAMS if not shutil.which(name, path=SEARCH_PATH)]


def free_ports(count: int) -> list[int]:
    """Different TCP ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class Cluster:
    """Slurm with the nodes n1, n2 and n3 and the partitions main and spot (preempted by main), all in `folder`.

    A context manager: on entry all nodes are idle, on exit every daemon and every process of a job has ended.
    Where the process is root, each node has two pretended GPUs (`has_gpus`).

    Args:
        folder: an existing folder of the user alone (munge refuses others), with a short path: sockets lie in it.
    """

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        if len(str(self.folder)) > 70:
            raise ValueError(f"{self.folder} is too long for the paths of sockets: choose one below 70 characters")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "SRUN"))}
        self.environment = inherited | {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "LMCORE_TEST_CLUSTER": str(self.folder),
            "PATH": SEARCH_PATH,
        }
        self.has_gpus = os.geteuid() == 0
        self._daemons: dict[str, subprocess.Popen] = {}
        self._scripts = 0
        self._last_states: dict[str, str] = {}

    def __enter__(self) -> "Cluster":
        try:
            self._configure()
            self._start_munged()
            self._start("slurmctld", "slurmctld", "-D", "-c")
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
        _kill(self._processes())

    # Commands and jobs

    def run(
        self, *command: object, check: bool = True, cwd: Path | None = None, timeout: float = 120, **variables: object
    ) -> subprocess.CompletedProcess:
        """Runs a command in the cluster's environment; with `check`, failing is an AssertionError with its output."""
        environment = self.environment | {key: str(value) for key, value in variables.items()}
        words = [str(word) for word in command]
        done = subprocess.run(
            words, env=environment, cwd=cwd, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done

    def sbatch(
        self,
        script: Path | str,
        *arguments: object,
        options: tuple[str, ...] | list[str] = (),
        cwd: Path | None = None,
        **variables: object,
    ) -> str:
        """Submits a script (its path, or its text if that begins with #!) and returns the job's id.

        The log lands in `cwd` as the script or sbatch says, for a text without `cwd` in the cluster's folder.
        """
        if str(script).startswith("#!"):
            self._scripts += 1
            path = self.folder / f"script-{self._scripts}.sh"
            path.write_text(str(script))
            script, cwd = path, cwd or self.folder
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
        if not records:
            raise AssertionError(f"Slurm knows no job {job}:\n{self.describe()}")
        return records[0]

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED, FAILED …; of an array a task's that has not ended, or else that has failed."""
        states = [record["JobState"] for record in self.records(job)]
        if not states:  # slurmctld has forgotten it
            return self._last_states.get(job, "UNKNOWN")
        unfinished = [state for state in states if state not in FINAL_STATES]
        failed = [state for state in states if state != "COMPLETED"]
        self._last_states[job] = (unfinished or failed or states)[0]
        return self._last_states[job]

    def wait(self, job: str, *states: str, timeout: float = 120) -> str:
        """Waits for one of `states`, or without them until the job has ended, and returns the state.

        A job that has ended in another state, or is late, is an AssertionError with the queue and all logs.
        """
        end = time.monotonic() + timeout
        while (state := self.state(job)) not in (states or FINAL_STATES):
            if state in FINAL_STATES or time.monotonic() > end:
                wanted = " or ".join(states) or "ended"
                raise AssertionError(f"job {job} is {state}, not {wanted}, {timeout} s at most\n{self.describe(job)}")
            time.sleep(0.1)
        return state

    def wait_until(self, condition, what: str, timeout: float = 120, job: str | None = None) -> None:
        """Waits until `condition()` is true; late, it is an AssertionError that says `what` did not happen."""
        end = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"in {timeout} s it did not happen that {what}\n{self.describe(job)}")
            time.sleep(0.1)

    def log(self, job: str) -> str:
        """The text of the job's output file so far ('' where there is none yet)."""
        path = Path(self.info(job).get("StdOut", ""))
        return path.read_text(errors="replace") if path.is_file() else ""

    def describe(self, job: str | None = None) -> str:
        """The queue, the nodes, the ends of the daemons' logs and a job's record and log, for messages of failure."""
        parts = [self.run("squeue", "--all", check=False).stdout, self.run("sinfo", "-N", check=False).stdout]
        if job is not None:
            parts.append(self.run("scontrol", "show", "job", job, check=False).stdout)
            parts += [f"log of {r['JobId']}:\n{_tail(Path(r.get('StdOut', '')))}" for r in self.records(job)]
        return "\n".join([*parts, self._daemon_logs()])

    # Nodes

    def kill_node(self, name: str) -> None:
        """What a power failure does: SIGKILL to the node's slurmd, slurmstepds and job processes."""
        self._kill_daemon(name)
        _kill(self._processes(name))

    def start_node(self, name: str, wait: bool = True) -> None:
        """Starts a node's slurmd, and waits until the node takes jobs."""
        self._start(name, "slurmd", "-D", "-N", name)
        if wait:
            self._wait_until_idle(name)

    def node_state(self, name: str) -> str:
        """IDLE, MIXED, ALLOCATED, DOWN … with Slurm's suffixes, as `scontrol show node` says it."""
        return re.search(r"State=(\S+)", self.run("scontrol", "show", "node", name).stdout)[1]

    # The inside

    def _configure(self) -> None:
        """Writes slurm.conf, gres.conf and the munge key, and makes the devices that stand for GPUs."""
        self.folder.chmod(0o700)
        (self.folder / "state").mkdir()
        controller_port, *ports = free_ports(1 + len(NODES))
        hostname = socket.gethostname().split(".")[0]
        if self.has_gpus:
            self._make_gpus()
        gres = f"Gres=gpu:{GPUS_PER_NODE} " if self.has_gpus else ""
        nodes = [
            f"NodeName={name} NodeHostname={hostname} NodeAddr=127.0.0.1 Port={port} Sockets=1 "
            f"CoresPerSocket={CPUS_PER_NODE} ThreadsPerCore=1 RealMemory=64000 {gres}State=UNKNOWN"
            for name, port in zip(NODES, ports, strict=True)
        ]
        text = SLURM_CONF.format(
            folder=self.folder,
            user=getpass.getuser(),
            hostname=hostname,
            controller_port=controller_port,
            gres_types="GresTypes=gpu" if self.has_gpus else "",
            nodes="\n".join(nodes),
            grace=SPOT_GRACE_SECONDS,
        )
        (self.folder / "slurm.conf").write_text(text)

    def _make_gpus(self) -> None:
        """Slurm sets CUDA_VISIBLE_DEVICES only for character devices: these are like /dev/null under other names."""
        lines = []
        for name in NODES:
            (self.folder / name).mkdir()
            for index in range(GPUS_PER_NODE):
                with contextlib.suppress(FileExistsError):
                    os.mknod(self.folder / name / f"gpu{index}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
            lines.append(f"NodeName={name} Name=gpu File={self.folder}/{name}/gpu[0-{GPUS_PER_NODE - 1}]")
        (self.folder / "gres.conf").write_text("\n".join(lines) + "\n")

    def _start_munged(self) -> None:
        """Starts munged with a key of its own, and waits for its socket."""
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        paths = {"key-file": "key", "socket": "socket", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{suffix}" for option, suffix in paths.items()]
        # forced: munged wants a socket that other users can reach, and there are none here
        self._start("munged", "munged", "--foreground", "--force", "--num-threads=2", *options)
        self._wait_for(lambda: (self.folder / "munge.socket").exists(), "munged did not open its socket")

    def _start(self, name: str, *command: str) -> None:
        """Starts a daemon in the foreground, in a session of its own, its output in NAME.out."""
        with (self.folder / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],  # it ends with the tests, also when they are killed
                env=self.environment | {"SLURMD_NODENAME": name},  # by which _processes knows the node
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

        self._wait_for(idle, f"{', '.join(names)} did not become idle")

    def _wait_for(self, condition, complaint: str) -> None:
        """Waits while the daemons start; a daemon that ends or is late is a RuntimeError with the daemons' logs."""
        end = time.monotonic() + START_SECONDS
        while not condition():
            ended = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if ended or time.monotonic() > end:
                reason = f"{', '.join(ended)} ended" if ended else f"{complaint} in {START_SECONDS} s"
                raise RuntimeError(f"the private Slurm cluster did not start: {reason}\n{self._daemon_logs()}")
            time.sleep(0.1)

    def _daemon_logs(self) -> str:
        paths = sorted([*self.folder.glob("*.out"), *self.folder.glob("*.log")])
        return "\n".join(f"{path.name}:\n{_tail(path)}" for path in paths if path.stat().st_size)

    def _processes(self, node: str | None = None) -> Iterator[psutil.Process]:
        """Processes of this cluster, or of one of its nodes, known by their environment and by their open log.

        (A slurmstepd writes its title over its environment, but holds the log of its node open.)
        """
        logs = {str(self.folder / f"{name}.log") for name in ([node] if node else NODES)}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.name().startswith("slurmstepd"):
                    found = any(each.path in logs for each in process.open_files())
                else:
                    variables = process.environ()
                    found = variables.get("LMCORE_TEST_CLUSTER") == str(self.folder)
                    found = found and (node is None or variables.get("SLURMD_NODENAME") == node)
                if found:
                    yield process


def _kill(processes: Iterator[psutil.Process]) -> None:
    """SIGKILL to the processes, and waits until they have ended (a zombie has, whoever its parent is)."""
    found = {process for process in processes if process.pid != os.getpid()}
    for process in list(found):  # a job may have emptied its environment: it is known as a slurmstepd's child
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update(process.children(recursive=True))
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    end = time.monotonic() + 10
    while any(_alive(process) for process in found) and time.monotonic() < end:
        time.sleep(0.02)


def _alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _tail(path: Path, lines: int = 30) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.is_file() else "(no file)"
