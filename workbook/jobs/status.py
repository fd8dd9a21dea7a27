"""`workbook status`: the jobs of output folders by squeue and sacct, what they print, and the last line of metrics."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lmcore.errors import UserError
from lmcore.text import ANSI_ESCAPE
from workbook.jobs.slurm import ENDED, ask
from workbook.jobs.submit import submitted

TAIL_BYTES = 1 << 16
"""So much of the end of a log is read."""

Row = tuple[str, str, str, str]
"""Id, name, state, and what the job waits for, counts, or printed last."""


def status(outs: Sequence[Path]) -> str:
    """The jobs of the output folders and the training runs that go on there, as text for the terminal."""
    jobs, lines = {out: submitted(out) for out in outs}, []
    try:
        states = ask([job["id"] for found in jobs.values() for job in found])
    except UserError as error:
        states, lines = None, [f"Slurm does not answer ({str(error).rstrip('.')}): the states are unknown."]
    for out, found in jobs.items():
        lines += ["", str(out)]
        for id, name, state, words in (row for job in found for row in rows_of(job, states)):
            lines.append(f"  {id:<12} {name:<16} {state:<14} {words}".rstrip())
        lines += [f"  training {words}" for words in training(out)]
    return "\n".join(lines).strip()


def rows_of(job: Mapping[str, str], states: Mapping[str, tuple[str, str]] | None) -> list[Row]:
    """A row for a job; of an array one for all of it, then one for each task that runs or did not end well.

    The state is Slurm's word; "ended" if Slurm does not know the job any more, "unknown" if `states` are (None).
    """
    id, name = job["id"], job["name"]
    if states is None or not any(task.partition("_")[0] == id for task in states):
        return [(id, name, "unknown" if states is None else "ended", last_line(job["log"]))]
    if id in states:
        return [row(id, name, *states[id], job["log"])]
    tasks = {task: state for task, state in states.items() if task.partition("_")[0] == id}
    counts = Counter(state for state, _ in tasks.values())
    waits = {reason for state, reason in tasks.values() if state == "pending"}
    words = ", ".join([*(f"{count} {state}" for state, count in counts.most_common()), *sorted(waits)])
    single = {task: found for task, found in tasks.items() if found[0] not in ("pending", "completed")}
    whole = "ended" if ENDED.issuperset(counts) else "running" if "running" in counts else "pending"
    logs = {task: job["log"].replace("*", task.partition("_")[2]) for task in single}
    return [(id, name, whole, words), *(row(task, name, *found, logs[task]) for task, found in single.items())]


def row(id: str, name: str, state: str, reason: str, log: str) -> Row:
    """The row of a job, or a task, that Slurm knows."""
    if state not in ("pending", "completed"):
        reason = last_line(log) + (f" (log: {log})" if state in ENDED else "")
    return id, name, state, "" if state == "completed" else reason


def last_line(log: str) -> str:
    """The last line of a log that is not empty, of a progress bar its last state; '' where there is none."""
    with suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
        text = ANSI_ESCAPE.sub("", file.read().decode(errors="replace")).replace("\r", "\n")
        return next((line.strip() for line in reversed(text.split("\n")) if line.strip()), "")
    return ""


def training(out: Path) -> list[str]:
    """Name, step and loss of each training run below the folder that goes on."""
    found = []
    for file in sorted(out.rglob("metrics.jsonl")):
        with suppress(OSError, ValueError, LookupError, TypeError):  # a process writes them at this moment
            values = {name: json.loads((file.parent / f"{name}.json").read_text()) for name in ("status", "config")}
            line = json.loads(file.read_text().rpartition("\n")[0].splitlines()[-1])
            if values["status"]["state"] == "running":
                step, steps = line["step"], values["config"]["steps"]
                found.append(f"{file.parent.name}: step {step:,}/{steps:,}, loss {line['train_loss']:.3f}")
    return found
