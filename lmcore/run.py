"""The run folder: everything one training run wrote, who may write to it, and what it resumes from."""

import json
import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from lmcore.config import TrainConfig, differing, from_dict, to_dict
from lmcore.errors import UserError, require
from lmcore.files import is_locked, locked, not_a_pipe, read_json, remove, write_json
from lmcore.provenance import utc_now

if TYPE_CHECKING:  # commands that list runs do without PyTorch
    from lmcore.data import PreparedData
    from lmcore.model import TransformerLM
    from lmcore.tokenizer import Tokenizer

FREE = {"data", "teacher", "device", "keep_checkpoints", "checkpoint_interval", "checkpoints", "strategy", "tracker"}
"""Fields that a resumed run may change: they move numbers by no more than rounding (data and teacher have digests)."""

SECONDS_TO_WAIT = 1.0
"""How long a busy folder is tried: `is_busy` of another process holds it for an instant."""


@dataclass(frozen=True)
class RunResult:
    """How a run ended: complete, interrupted, diverged or out of memory, after `step` steps; nats per token."""

    state: str
    step: int
    valid_loss: float | None
    best_valid_loss: float | None


class RunFolder:
    """Paths and files of one run: config.json, environment.json, metrics.jsonl, status.json and checkpoints/."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.config_file = self.path / "config.json"
        self.environment_file = self.path / "environment.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.status_file = self.path / "status.json"
        self.log_file = self.path / "log.txt"
        self.checkpoint_folder = self.path / "checkpoints"
        self.best_weights = self.checkpoint_folder / "best.safetensors"
        self.last_weights = self.checkpoint_folder / "last.safetensors"
        self.tokenizer_folder = self.path / "tokenizer"  # of an imported model

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.name

    def lock(self, seconds: float = SECONDS_TO_WAIT) -> AbstractContextManager[None]:
        """Holds the folder for this process. Raises `Busy` if another does, `UserError` if it cannot be held."""
        busy = f"Another process is using the run folder {self.path}; wait for it or choose another."
        return locked(self.path / ".lock", busy, seconds)

    def is_busy(self) -> bool:
        """Whether a process holds the folder at this moment."""
        return is_locked(self.path / ".lock")

    def config(self) -> TrainConfig:
        """The run's resolved configuration. Raises `UserError` if it is not the one that the run began with."""
        saved = read_json(self.config_file)
        config = from_dict(TrainConfig, saved)
        began = self.first_start().get("config", saved)
        require(
            saved == began == json.loads(json.dumps(to_dict(config))),
            f"{self.config_file} is not the configuration that the run began with, or of another version of lmcore: "
            f"put back what {self.environment_file.name} notes, or choose another folder.",
        )
        return config

    def tokenizer(self) -> "Tokenizer":
        """The tokenizer of an imported model, else that of the run's data."""
        from lmcore.data import open_data
        from lmcore.tokenizer import Tokenizer

        imported = self.tokenizer_folder.is_dir()
        return Tokenizer.load(self.tokenizer_folder) if imported else open_data(self.config().data).tokenizer

    def tokenizer_fingerprint(self) -> str | None:
        """Fingerprint of the tokenizer that the weights go with; None of an imported model that has none."""
        noted = self.first_start().get("data", {}).get("tokenizer_fingerprint")
        return self.tokenizer().fingerprint if self.tokenizer_folder.is_dir() else noted

    def begin(self, config: TrainConfig, environment: dict[str, Any]) -> RunResult | None:
        """Writes config and environment, or checks that a folder that has them was made with the same.

        Adds this start to environment.json and removes half-written checkpoints: only the process that holds the folder
        may begin. Of a complete run it returns how that ended, and adds nothing. Raises `UserError` naming the fields
        that differ.
        """
        for left in self.checkpoint_folder.glob(".*.tmp"):  # other files are written again, which removes theirs
            remove(left)
        starts = self.starts()
        if self.config_file.exists():
            differences = self.differences(config, environment.get("data_fingerprint"))
            other = f"The run folder {self.path} was made with other settings: {differences}"
            require(not differences, f"{other}; choose another folder, or remove this one.")
        else:
            write_json(self.config_file, to_dict(config))
        if starts and is_complete(self):
            return self.result()
        notes = {"config": to_dict(config), "teacher": self.teacher_digest(config)}
        write_json(self.environment_file, [*starts, environment | notes])
        return None

    def differences(self, config: TrainConfig, data_fingerprint: str | None) -> str:
        """In words, the fields in which `config`, data or teacher differ from those that made this folder."""
        there, here = flatten(to_dict(self.config())), flatten(to_dict(config))
        fixed = [key for key in here if key.split(".")[0] not in FREE]
        there, here = ({key: values.get(key) for key in fixed} for values in (there, here))
        noted, now = self.first_start(), {"data_fingerprint": data_fingerprint, "teacher": self.teacher_digest(config)}
        for name in (name for name in now if name in noted):
            there[name.replace("_", " ")], here[name.replace("_", " ")] = str(noted[name])[:12], str(now[name])[:12]
        return differing(there, here)

    def teacher_digest(self, config: TrainConfig) -> str | None:
        """SHA-256 of the weights of the teacher, or what is noted of it, where they are gone; None without one."""
        from lmcore.checkpoint import digest, read_weights

        if config.teacher is None:
            return None
        weights = RunFolder(config.teacher).best_weights
        return digest(read_weights(weights)[0]) if weights.is_file() else self.first_start().get("teacher") or "unknown"

    def first_start(self) -> dict[str, Any]:
        """Provenance of the run's first start; empty before it."""
        return next(iter(self.starts()), {})

    def environment(self) -> dict[str, Any]:
        """Provenance of the run's latest start."""
        starts = self.starts()
        require(bool(starts), f"There is no file {self.environment_file}.")
        return starts[-1]

    def starts(self) -> list[dict[str, Any]]:
        """Provenance of every start of the run, the first one first."""
        starts = read_json(self.environment_file) if self.environment_file.exists() else []
        sound = isinstance(starts, list) and all(isinstance(start, dict) for start in starts)
        require(sound, f"{self.environment_file} is damaged: it must be a list of starts; remove it to continue.")
        return starts

    def status(self) -> dict[str, Any]:
        """State (new, running, interrupted, failed, diverged, out of memory or complete), step, and further notes."""
        status = read_json(self.status_file) if self.status_file.exists() else {"state": "new", "step": 0}
        sound = isinstance(status, dict) and {"state", "step"} <= status.keys()
        require(sound, f"{self.status_file} is damaged: it must have state and step; training again writes it.")
        return status

    def last_known(self) -> tuple[str, int]:
        """State and step of the last save; ("new", 0) where no status can be read."""
        with suppress(UserError):
            status = self.status()
            return status["state"], status["step"]
        return "new", 0

    def result(self) -> RunResult:
        """How the run ended, as its status notes it."""
        status = self.status()
        return RunResult(status["state"], status["step"], status.get("valid_loss"), status.get("best_valid_loss"))

    def write_status(self, state: str, step: int, **notes: Any) -> None:
        """Replaces the status."""
        write_json(self.status_file, {"state": state, "step": step, "time_utc": utc_now(), **notes})

    def metrics_lines(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; a last line that was cut off by a crash is left out.

        Raises `UserError` naming the first line that is no JSON object with a step.
        """
        lines: list[dict[str, Any]] = []
        text = self.metrics_file.read_text(encoding="utf-8", errors="replace") if self.metrics_file.is_file() else ""
        for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
            with suppress(ValueError):
                lines.append(json.loads(line))
            sound = len(lines) == number and isinstance(lines[-1], dict) and "step" in lines[-1]
            require(sound, f"{self.metrics_file} line {number} is damaged: put the file back, or remove that line.")
        return lines

    def metrics(self) -> pd.DataFrame:
        """metrics.jsonl as a table, one row per line; `valid_loss` is NaN where nothing was evaluated."""
        columns = ["step", "tokens", "seconds", "train_loss", "valid_loss", "lr", "grad_norm", "tokens_per_second"]
        table = pd.DataFrame(self.metrics_lines())
        return table.reindex(columns=[*columns, *(c for c in table.columns if c not in columns)])

    def append_metrics(self, line: dict[str, Any]) -> None:
        """Adds one line. Raises `UserError` if it cannot be written, as on a full disk."""
        with self._metrics("ab") as file:
            file.write((json.dumps(line) + "\n").encode())

    def metrics_bytes(self) -> int:
        """Length of metrics.jsonl, whose lines are then on the disk; a checkpoint notes it."""
        with self._metrics("ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def cut_metrics(self, length: int) -> None:
        """Drops what was written after the first `length` bytes: a resumed run writes it again.

        Says so if there are fewer, which are kept up to the last whole line.
        """
        with self._metrics("ab+") as file:
            file.seek(0)
            there = file.read(length)
            if len(there) < length:
                print(f"{self.metrics_file} has lost lines: the run continues without them.", flush=True)
            file.truncate(there.rfind(b"\n") + 1)

    @contextmanager
    def _metrics(self, mode: str) -> Iterator[Any]:
        try:
            with open(not_a_pipe(self.metrics_file), mode) as file:
                yield file
        except OSError as error:
            why = f"{error.strerror or error}; the same command resumes from the last checkpoint."
            raise UserError(f"Cannot write {self.metrics_file}: {why}") from error

    def checkpoint_file(self, step: int, sharded: bool = False) -> Path:
        """Path of the full checkpoint after `step` steps: a file or, of a sharded one, a folder."""
        return self.checkpoint_folder / f"step_{step:08d}.{'sharded' if sharded else 'pt'}"

    def checkpoints(self) -> list[Path]:
        """Full checkpoints, the newest first."""
        found = (path for kind in ("pt", "sharded") for path in self.checkpoint_folder.glob(f"step_*.{kind}"))
        return sorted(found, reverse=True)


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with dotted keys; tuples as lists, as JSON has them."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat


def require_other_runs(config: TrainConfig, run: RunFolder, data: "PreparedData") -> None:
    """Raises `UserError` unless the runs that `config` names are others than this one, with weights that fit.

    They have the tokenizer of `data`, and have not read `dev` where that is evaluated. Those to begin with
    (`init_from`) are of this model; a teacher is complete, with at least the context. A complete run needs neither.
    """
    from lmcore.checkpoint import require_same

    if run.last_known()[0] == "complete":
        return
    here = to_dict(config.model)
    for setting, named in (("init_from", config.init_from), ("teacher", config.teacher)):
        if named is None:
            continue
        source = RunFolder(named)
        require(source.best_weights.is_file(), f"There are no weights {source.best_weights}, which {setting} names.")
        other = source.path.resolve() != run.path.resolve()
        require(other, f"{run.path} holds the weights that {setting} names; train in another run folder.")
        trained, first = source.config(), source.first_start()
        read = "dev" == config.evaluate_on != trained.evaluate_on and first.get("data_fingerprint") == data.fingerprint
        require(not read, f"The run {named} has read dev, on which this one is evaluated; train it on dev, too.")
        known, ours = source.tokenizer_fingerprint(), data.tokenizer.fingerprint
        if setting == "init_from":
            require(known in (None, ours), f"The run {named} has another tokenizer than the data in {config.data}.")
            free = ("context_length", "dropout", "embedding_init_std", "attention", "checkpoint_every")
            require_same(to_dict(trained.model) | {name: here[name] for name in free}, here, str(source.path))
            continue
        state, theirs, least = source.status()["state"], trained.model, config.model.context_length
        require(state in ("complete", "new"), f"The teacher {named} is not complete: {state}.")
        require(theirs.context_length >= least, f"The teacher {named} has a context of less than {least} tokens.")
        same = known == ours and theirs.vocab_size == config.model.vocab_size
        require(
            same, f"The teacher {named} has another tokenizer or vocab_size than this run, which reads {config.data}."
        )


def initial_model(config: TrainConfig, run: RunFolder) -> "TransformerLM":
    """The model before the first step; if there are checkpoints, they have its weights."""
    from lmcore.checkpoint import load_model
    from lmcore.model import TransformerLM

    model = TransformerLM(config.model)
    if config.init_from is not None and not run.checkpoints():
        model.load_state_dict(load_model(RunFolder(config.init_from).best_weights).state_dict())
    return model


# What a run resumes from: the newest checkpoint that is whole and leads to the best weights, too


def damage(run: RunFolder) -> str | None:
    """What is wrong with the weights of a complete run, in a sentence; None if they are as they were written."""
    from lmcore.checkpoint import read_weights  # in functions, as commands that list runs do without PyTorch

    try:
        for path in (run.last_weights, run.best_weights) if run.config().keep_weights else ():
            read_weights(path)
    except UserError as error:
        return str(error)
    return None


def is_complete(run: RunFolder) -> bool:
    """Whether the run is complete and its results are undamaged; weights that are not, are said to be repaired.

    Raises `UserError` if lines of the metrics are damaged or lost, of which there is no other copy.
    """
    state, step = run.last_known()
    if state != "complete":
        return False
    if (reason := damage(run)) is not None:
        require(bool(run.checkpoints()), f"{reason} No checkpoint is left to repair it from; train in another folder.")
        print(f"{reason} It is repaired from the last checkpoint.", flush=True)
        return False
    reaches = [line["step"] for line in run.metrics_lines()][-1:] == [step]
    require(reaches, f"{run.metrics_file} does not reach step {step}: put it back, or train in another folder.")
    return True


def newest_checkpoint(run: RunFolder, keep_weights: bool = True) -> Path | None:
    """Path of the newest checkpoint to resume from; None for a run without any.

    One that is damaged, or saved after best weights that are lost, is said to be skipped, and renamed to `*.damaged`.
    Raises `UserError` if none of those that are there is left.
    """
    from lmcore.checkpoint import read_checkpoint

    skipped = []
    for path in run.checkpoints():
        try:
            content = read_checkpoint(path)
            require("best_step" in content["extra"], f"{path} is not of a training run, or of another version of it.")
            require(
                not keep_weights or _leads_to_best(content, run),
                f"{run.best_weights} is missing or damaged, and {path.name} was saved after it.",
            )
        except UserError as error:
            print(f"{error} The checkpoint before it is tried.", flush=True)
            skipped.append(path)
            continue
        for damaged in skipped:
            remove(damaged.with_suffix(".damaged"))
            damaged.rename(damaged.with_suffix(".damaged"))  # out of the way of the run, which will save again
        return path
    require(  # beginning again would throw away what the folder still holds
        not skipped and not run.last_weights.exists(),
        f"No checkpoint in {run.checkpoint_folder} can be resumed from; put a whole one back, or choose another run "
        "folder.",
    )
    return None


def _leads_to_best(content: dict[str, Any], run: RunFolder) -> bool:
    """Whether the best weights so far are in their file, or in the checkpoint itself, or will be found after it."""
    from lmcore.checkpoint import read_weights

    extra, step, best = content["extra"], content["iteration"], {}
    with suppress(UserError):
        best = read_weights(run.best_weights)[1]
    known = best.get("valid_loss") == extra["best_valid_loss"] or best.get("step", 0) > step
    return known or extra["best_step"] == step or not math.isfinite(extra["best_valid_loss"])
