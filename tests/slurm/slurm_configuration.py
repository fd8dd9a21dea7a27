"""The files of the private Slurm cluster: slurm.conf, gres.conf, the munge key and the devices that stand for GPUs."""

import contextlib
import getpass
import os
import random
import socket
from pathlib import Path

NODES = ("n1", "n2", "n3")
GPUS_PER_NODE = 2
CPUS_PER_NODE = 8

# Facts that took trying:
# - cgroups need a delegated hierarchy; with proctrack/cgroup and without one jobs never run, although srun returns 0.
# - A requeued job waits until the credentials of its first run have expired: two minutes, unless cred_expire is short.
# - Node names do not resolve, so all nodes are 127.0.0.1 with ports of their own.
# - GraceTime: so long may a preempted job save itself; it gets its `--signal` first and is requeued after this.
# - config_overrides believes the CPUs and memory stated here, whatever the host has.
SLURM_CONF = """\
ClusterName=lmcore
FirstJobId={first_job}
SlurmctldHost={hostname}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdDebug=verbose
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MailProg=/bin/true
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
ReturnToService=2
SlurmdTimeout=10
KillWait=5
MinJobAge=86400
InactiveLimit=0
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF State=UP
PartitionName=spot Nodes=ALL MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=20 State=UP
"""


def write_configuration(folder: Path) -> None:
    """Writes the files into the cluster's folder, with ports that are free now."""
    folder.chmod(0o700)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    controller_port, *ports = free_ports(1 + len(NODES))
    hostname = socket.gethostname().split(".")[0]
    nodes = [
        f"NodeName={name} NodeHostname={hostname} NodeAddr=127.0.0.1 Port={port} Sockets=1 "
        f"CoresPerSocket={CPUS_PER_NODE} ThreadsPerCore=1 RealMemory=64000 Gres=gpu:{GPUS_PER_NODE} State=UNKNOWN"
        for name, port in zip(NODES, ports, strict=True)
    ]
    facts = {"folder": folder, "user": getpass.getuser(), "hostname": hostname, "controller_port": controller_port}
    text = SLURM_CONF.format(first_job=1 + 1000 * worker_number(), nodes="\n".join(nodes), **facts)
    (folder / "slurm.conf").write_text(text)
    lines = []  # Slurm knows numbered character devices alone as GPUs: these are /dev/null under other names
    for name in NODES:
        (folder / name).mkdir()
        for index in range(GPUS_PER_NODE):
            (folder / name / f"gpu{index}").symlink_to(os.devnull)
        lines.append(f"NodeName={name} Name=gpu File={folder}/{name}/gpu[0-{GPUS_PER_NODE - 1}]\n")
    (folder / "gres.conf").write_text("".join(lines))


def worker_number() -> int:
    """Which of pytest-xdist's workers this is. Jobs of two clusters must not have the same id, which is also a port."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


def free_ports(count: int) -> list[int]:
    """Different TCP ports that nobody listens on now, drawn from those that no outgoing connection is given.

    Each worker of pytest-xdist draws from its own: two that look at the same time would both find one free.
    """
    first = 15_000 + 1000 * (worker_number() % 15)
    with contextlib.ExitStack() as stack:
        found = []
        for port in random.sample(range(first, first + 1000), 200):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                return found
    raise RuntimeError(f"{count} free TCP ports were not found")
