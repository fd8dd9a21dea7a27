"""`workbook status`: the jobs of output folders by squeue and sacct, what they print, and the last line of metrics."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lmcore.errors import UserError
from lmcore.text import ANSI_ESCAPE
from workbook.jobs.slurm import ENDED, ask
from workbook.jobs.submit import submitted

TAIL_BYTES = 1 << 16
"""So much of the end of a log is read."""


def status(outs: Sequence[Path]) -> str:
    """The jobs of the output folders and the training runs that go on there, as text for the terminal."""
    jobs, lines = {out: submitted(out) for out in outs}, []
    try:
        states = ask([job["id"] for found in jobs.values() for job in found])
    except UserError as error:
        states, lines = None, [f"Slurm does not answer ({str(error).rstrip('.')}): the states are unknown."]
    for out, found in jobs.items():
        lines += ["", str(out)]
        for job in found:
            rows = rows_of(job, states)
            lines += [f"  {id:<12} {job['name']:<16} {state:<14} {words}".rstrip() for id, state, words in rows]
        lines += [f"  training {words}" for words in training(out)]
    return "\n".join(lines).strip()


def rows_of(job: Mapping[str, str], states: Mapping[str, tuple[str, str]] | None) -> Iterator[tuple[str, str, str]]:
    """Id, state, and why it waits or what it printed last: of a job, or of the tasks of an array.

    The state is Slurm's word; "ended" if Slurm does not know the job any more, "unknown" if `states` are (None).
    """
    own = {id: found for id, found in (states or {}).items() if id.partition("_")[0] == job["id"]}
    if not own:
        yield job["id"], "unknown" if states is None else "ended", last_line(job["log"])
    for id, (state, reason) in own.items():
        log = job["log"].replace("*", id.partition("_")[2])
        if state not in ("pending", "completed"):
            reason = last_line(log) + (f" (log: {log})" if state in ENDED else "")
        yield id, state, "" if state == "completed" else reason


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
