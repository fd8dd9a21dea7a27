"""The run folder: everything one training run wrote, who may write to it, and what it resumes from."""

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pandas as pd

from lmcore.checkpoint import read_checkpoint, read_weights
from lmcore.config import TrainConfig, from_dict, to_dict
from lmcore.errors import UserError, require
from lmcore.files import (
    CHECKSUM,
    Busy,
    atomic_write,
    checksummed,
    leftovers,
    locked,
    not_a_pipe,
    read_json,
    remove,
    verified,
    write_in_place,
    write_json,
)
from lmcore.provenance import utc_now

FREE_TO_CHANGE = {
    "data", "device", "trackers", "keep_checkpoints", "checkpoint_interval", "checkpoints", "parallel",
}  # fmt: skip
"""Fields that a resumed run may change: they change its numbers by no more than rounding (data is compared by its
fingerprint)."""


BUSY = "Another process is using the run folder"
"""Beginning of the sentence that refuses a second process."""

SECONDS_TO_WAIT = 1.0
"""How long a busy folder is tried: `is_busy` of another process holds it for an instant."""


RunBusy = Busy
"""Another process holds the run folder."""


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
        self.metrics_log = MetricsFile(self.metrics_file)

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.name

    @contextmanager
    def lock(self, seconds: float = SECONDS_TO_WAIT) -> Iterator[None]:
        """Holds the folder for this process. Raises `RunBusy` if another does, `UserError` if it cannot be held."""
        with locked(self.path / ".lock", f"{BUSY} {self.path}; wait for it or choose another.", seconds):
            yield

    def is_busy(self) -> bool:
        """Whether a process holds the folder at this moment."""
        if not (self.path / ".lock").exists():
            return False
        try:
            with self.lock(seconds=0):
                return False
        except RunBusy:
            return True

    def remove_leftovers(self) -> None:
        """Removes what a killed process had begun to write; only the process that holds the folder may."""
        own = (self.config_file, self.environment_file, self.metrics_file, self.status_file)
        in_checkpoints = self.checkpoint_folder.glob(".*.tmp")
        for path in (*(left for file in own for left in leftovers(file)), *in_checkpoints):
            remove(path)

    def config(self) -> TrainConfig:
        """The run's resolved configuration. Raises `UserError` if it is not the one that the run began with."""
        starts = self.starts()
        try:
            config = from_dict(TrainConfig, read_json(self.config_file))
        except UserError as error:
            where = f": put it back, {self.environment_file} notes it with the first start" if starts else ""
            raise UserError(f"{self.config_file} is damaged{where} ({str(error).rstrip('.')}).") from error
        noted = flatten(starts[0].get("config", {})) if starts else {}
        here = flatten(to_dict(config))
        changed = [
            f"{key} ({noted[key]} there, {value} here)" for key, value in here.items() if value != noted.get(key, value)
        ]
        require(
            not changed,
            f"{self.config_file} was changed after the run began: its fields differ from those noted in "
            f"{self.environment_file.name}: {', '.join(changed)}; put them back.",
        )
        return config

    def begin(self, config: TrainConfig, environment: dict[str, Any]) -> None:
        """Writes config and environment, or checks that a folder that has them was made with the same.

        Every start is kept in environment.json. Raises `UserError` naming the fields that differ.
        """
        environment = environment | {"config": to_dict(config)}
        starts = self.starts()
        if self.config_file.exists():
            self.require_same(config, environment.get("data_fingerprint"))
        else:
            write_json(self.config_file, to_dict(config))
        write_json(self.environment_file, [checksummed(start) for start in (*starts, environment)])

    def require_same(self, config: TrainConfig, data_fingerprint: str | None) -> None:
        """Raises `UserError` unless the folder was made with this configuration and this data."""
        differences = self.differences(config, data_fingerprint)
        if differences:
            raise UserError(
                f"The run folder {self.path} was made with other settings: {', '.join(differences)}; "
                "choose another folder, or remove this one."
            )

    def differences(self, config: TrainConfig, data_fingerprint: str | None) -> list[str]:
        """In words, each field in which `config` or the data differ from those that made this folder."""
        there, here = flatten(to_dict(self.config())), flatten(to_dict(config))
        differences = [
            f"{key} ({there.get(key)} there, {value} here)"
            for key, value in here.items()
            if key.split(".")[0] not in FREE_TO_CHANGE and there.get(key) != value
        ]
        fingerprint = self.data_fingerprint()
        if fingerprint is not None and fingerprint != data_fingerprint:
            differences.append(f"the data (fingerprint {fingerprint[:12]} there, {str(data_fingerprint)[:12]} here)")
        return differences

    def data_fingerprint(self) -> str | None:
        """Fingerprint of the data that the run was started with, or None before its first start."""
        starts = self.starts()
        return starts[0].get("data_fingerprint") if starts else None

    def environment(self) -> dict[str, Any]:
        """Provenance of the run's latest start."""
        starts = self.starts()
        require(bool(starts), f"There is no file {self.environment_file}.")
        return starts[-1]

    def starts(self) -> list[dict[str, Any]]:
        """Provenance of every start of the run, the first one first."""
        starts = _json_or_none(self.environment_file) if self.environment_file.exists() else []
        sound = isinstance(starts, list) and all(isinstance(start, dict) for start in starts)
        plain = [verified(start) for start in starts] if sound else [None]
        require(
            None not in plain,
            f"{self.environment_file} is damaged: it must be the list of starts that was written; put it right, or "
            "remove it to continue without knowing what the run began with.",
        )
        return plain

    def status(self) -> dict[str, Any]:
        """State (new, running, interrupted, failed, diverged, out of memory or complete), step, and further notes."""
        status = _json_or_none(self.status_file) if self.status_file.exists() else {"state": "new", "step": 0}
        plain = verified(status) if isinstance(status, dict) and {"state", "step"} <= status.keys() else None
        require(
            plain is not None,
            f"{self.status_file} is damaged: it must be the state and step that were written; lmcore train on "
            f"{self.path} writes it again.",
        )
        return plain

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
        """Replaces the status; on a full disk in place, which needs no room."""
        status = checksummed({"state": state, "step": step, "time_utc": utc_now(), **notes})
        try:
            write_json(self.status_file, status)
        except UserError:
            write_in_place(self.status_file, status)

    def metrics_lines(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; a last line that was cut off by a crash is left out."""
        return self.metrics_log.lines()

    def metrics(self) -> pd.DataFrame:
        """metrics.jsonl as a table, one row per line; `valid_loss` is NaN where nothing was evaluated."""
        columns = ["step", "tokens", "seconds", "train_loss", "valid_loss", "lr", "grad_norm", "tokens_per_second"]
        table = pd.DataFrame(self.metrics_lines())
        return table.reindex(columns=[*columns, *(c for c in table.columns if c not in columns)])

    def append_metrics(self, line: dict[str, Any]) -> None:
        """Adds one line. Raises `UserError` if it cannot be written, as on a full disk."""
        self.metrics_log.append(line)

    def checkpoint_file(self, step: int, sharded: bool = False) -> Path:
        """Path of the full checkpoint after `step` steps: a file or, of a sharded one, a folder."""
        return self.checkpoint_folder / f"step_{step:08d}.{'sharded' if sharded else 'pt'}"

    def checkpoints(self) -> list[Path]:
        """Full checkpoints, the newest first."""
        found = (path for kind in ("pt", "sharded") for path in self.checkpoint_folder.glob(f"step_*.{kind}"))
        return sorted(found, reverse=True)


class FollowedRun(RunFolder):
    """The run folder for the ranks that do not write it: paths and reading as there, writing does nothing."""

    @contextmanager
    def lock(self, seconds: float = SECONDS_TO_WAIT) -> Iterator[None]:
        yield

    def remove_leftovers(self) -> None:
        pass

    def begin(self, config: TrainConfig, environment: dict[str, Any]) -> None:
        pass

    def write_status(self, state: str, step: int, **notes: Any) -> None:
        pass

    def append_metrics(self, line: dict[str, Any]) -> None:
        pass


def _json_or_none(path: Path) -> Any:
    with suppress(UserError):
        return read_json(path)


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with dotted keys; tuples as lists, as JSON has them."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat


# metrics.jsonl: one JSON object a line, each with a checksum that covers the lines before it


class MetricsFile:
    """The metrics of one run: read by anyone, written by the process that holds the run folder."""

    def __init__(self, path: Path):
        self.path = path
        self._written: list[str] | None = None  # the lines' texts, known from the first append on

    def lines(self) -> list[dict[str, Any]]:
        """The lines without their checksums; a last line that was cut off by a crash is left out.

        Raises `UserError` naming the first line that is not what was written.
        """
        return [value for value, _ in self._read()]

    def _read(self) -> list[tuple[dict[str, Any], str]]:
        if not self.path.is_file():
            return []
        texts = self.path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        values, previous = [], ""
        for number, text in enumerate(texts, 1):
            whole = text.endswith("\n")
            value = _parsed(text)
            plain = verified(value, previous) if isinstance(value, dict) and "step" in value else None
            if plain is None:
                require(
                    not whole and number == len(texts),
                    f"{self.path} line {number} is damaged: it is not the JSON object with a step that was written "
                    f"there; lmcore train on {self.path.parent} takes the lines from its last checkpoint, else repair "
                    "or remove that line.",
                )
                break
            values.append((plain, text if whole else text + "\n"))
            previous = value.get(CHECKSUM, "")
        return values

    def append(self, line: dict[str, Any]) -> None:
        """Adds one line. Raises `UserError` if it cannot be written, as on a full disk."""
        written = self._open()
        previous = json.loads(written[-1]).get(CHECKSUM, "") if written else ""
        text = json.dumps(checksummed(line, previous)) + "\n"
        self._write(lambda: _append(self.path, text))
        written.append(text)

    def text(self) -> str:
        """All lines as they were written by this process and those before it; a checkpoint keeps them."""
        return "".join(self._open())

    def keep_until(self, step: int) -> None:
        """Drops the lines after `step`, which a resumed run will write again."""
        self._replace("".join(text for line, text in self._read() if line["step"] <= step))

    def restore(self, text: str) -> bool:
        """Makes `text`, what `text()` once gave, the whole content; returns whether it was still there, undamaged."""
        content = text.encode()
        sound = self.path.read_bytes().startswith(content) if self.path.is_file() else not content
        self._replace(text)
        return sound

    def flush(self) -> None:
        """Brings the lines to the disk. Raises `UserError` if that fails."""
        if self.path.is_file():
            self._write(lambda: _append(self.path, "", sync=True))

    def _open(self) -> list[str]:
        if self._written is None:
            self._written = [text for _, text in self._read()]
        return self._written

    def _replace(self, text: str) -> None:
        with atomic_write(self.path, "w") as file:
            file.write(text)
        self._written = None

    def _write(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            raise UserError(
                f"Cannot write {self.path}: {error.strerror or error}; the same command resumes from the last "
                "checkpoint."
            ) from error


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _append(path: Path, text: str, sync: bool = False) -> None:
    with open(not_a_pipe(path), "a", encoding="utf-8") as file:
        file.write(text)
        if sync:
            file.flush()
            os.fsync(file.fileno())


# What a run resumes from: the newest checkpoint that is whole and leads to everything an undisturbed run has


def damage(run: RunFolder) -> str | None:
    """What is wrong with the results of a complete run, in a sentence; None if everything is as it was written."""
    try:
        step = run.status()["step"]
        for path in (run.last_weights, run.best_weights) if run.config().keep_weights else ():
            read_weights(path)
        lines = run.metrics_lines()
    except UserError as error:
        return str(error)
    if not lines or lines[-1]["step"] != step:
        return f"{run.metrics_file} is damaged: it does not reach step {step}, where the run ended."
    return None


def is_complete(run: RunFolder) -> bool:
    """Whether the run is complete and its results are undamaged; says what is damaged."""
    try:
        if run.status()["state"] != "complete":
            return False
    except UserError as error:
        print(f"{error}", flush=True)
        return False
    if (reason := damage(run)) is None:
        return True
    require(bool(run.checkpoints()), f"{reason} No checkpoint is left to repair it from; train in another folder.")
    print(f"{reason} It is repaired from the last checkpoint.", flush=True)
    return False


def require_same_data(run: RunFolder, fingerprint: str) -> None:
    """Compares the data with those that the checkpoints note, where environment.json is gone.

    Says so where nothing tells. Raises `UserError` if the data are others.
    """
    if run.starts() or not run.checkpoints():
        return  # the start compares them, or there is nothing to resume
    noted = None
    for path in run.checkpoints():
        with suppress(UserError):  # damaged: whoever resumes from it will say so
            noted = read_checkpoint(path, tensors=False)["extra"].get("data_fingerprint")
            break
    if noted is None:
        print(f"{run.environment_file} is gone: whether the data is the same was not checked.", flush=True)
        return
    require(
        noted == fingerprint,
        f"The checkpoints of {run.path} were made with other data (fingerprint {noted[:12]} there, {fingerprint[:12]} "
        "here); choose another folder, or remove this one.",
    )


def newest_state(run: RunFolder, keep_weights: bool = True) -> tuple[dict[str, Any] | None, Path | None, list[Path]]:
    """Content and path of the checkpoint to resume from, None for a run without any, and what is damaged.

    Of a sharded one only what `read_checkpoint` gives without tensors.

    Says in a sentence what is damaged and which checkpoint is used instead. Raises `UserError` where resuming would
    lose something: no checkpoint among those that are there can be read, or the best weights cannot be made again.
    """
    damaged, refused, place = [], None, None
    best = _best_of(run)
    for path in run.checkpoints():
        try:
            content = read_checkpoint(path, tensors=not path.is_dir())
        except UserError as error:
            print(f"{error} The checkpoint before it is tried.", flush=True)
            damaged.append(path)
            continue
        require(
            "rng" in content["extra"],
            f"{path} was not written by a training run, so none can resume from it; remove it.",
        )
        if not keep_weights or _leads_to_best(content, best):
            return content, path, damaged
        print(f"{run.best_weights} is missing or damaged, so {path.name} is not enough to resume from.", flush=True)
        refused, place = (refused, place) if refused else (content, path)
    # beginning again would throw away what the folder still holds
    require(
        not damaged or refused is not None,
        f"No checkpoint in {run.checkpoint_folder} can be read; put a whole one back, or choose another run folder.",
    )
    require(
        refused is None or not run.best_weights.exists(),
        f"{run.best_weights} is damaged, and no checkpoint from before it was written is left; put a whole one back, "
        "or remove it to continue without.",
    )
    require(
        refused is not None or not run.last_weights.exists(),
        f"{run.path} holds the weights of a run that ended, but no checkpoint; choose another run folder.",
    )
    if refused is not None:
        print("The run continues without them: the next evaluation that is better writes them.", flush=True)
    return refused, place, damaged


def _best_of(run: RunFolder) -> dict[str, Any] | None:
    try:
        return read_weights(run.best_weights)[1]
    except UserError:
        return None


def _leads_to_best(content: dict[str, Any], best: dict[str, Any] | None) -> bool:
    """Whether a run that resumes from this checkpoint has the best weights of an undisturbed one at its end.

    They are in their file, or are those of the checkpoint itself, or will be found after it.
    """
    extra, step = content["extra"], content["iteration"]
    if not math.isfinite(extra["best_valid_loss"]) or extra.get("best_step") == step:
        return True
    return best is not None and (best.get("valid_loss") == extra["best_valid_loss"] or best.get("step", 0) > step)


# Where metrics go besides metrics.jsonl, both optional


class Tracker(Protocol):
    """Receives every metrics line of a run."""

    def log(self, line: dict[str, Any]) -> None:
        """Takes one line; `line["step"]` is its step."""
        ...

    def close(self) -> None:
        """Ends the tracking."""
        ...


class TensorBoardTracker:
    """Writes event files to tensorboard/ in the run folder."""

    def __init__(self, run: RunFolder, config: TrainConfig, step: int):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError("The tensorboard tracker needs a package: pip install 'lmcore[tensorboard]'.") from error
        self.writer = SummaryWriter(str(run.path / "tensorboard"), purge_step=step + 1)

    def log(self, line: dict[str, Any]) -> None:
        for key, value in line.items():
            if key != "step" and isinstance(value, int | float):
                self.writer.add_scalar(key, value, line["step"])

    def close(self) -> None:
        self.writer.close()


class WandbTracker:
    """Logs to Weights & Biases under the run folder's name; a resumed run continues its own page."""

    def __init__(self, run: RunFolder, config: TrainConfig, step: int):
        try:
            import wandb
        except ImportError as error:
            raise UserError("The wandb tracker needs a package: pip install 'lmcore[wandb]'.") from error
        self.session = wandb.init(
            project="lmcore", name=run.name, id=run.name, resume="allow", config=to_dict(config), dir=str(run.path)
        )

    def log(self, line: dict[str, Any]) -> None:
        self.session.log({k: v for k, v in line.items() if v is not None}, step=line["step"])

    def close(self) -> None:
        self.session.finish()


TRACKERS = {"tensorboard": TensorBoardTracker, "wandb": WandbTracker}


def open_trackers(run: RunFolder, config: TrainConfig, step: int) -> list[Tracker]:
    """The configured trackers, continuing after `step`. Raises `UserError` where a package is missing."""
    return [TRACKERS[name](run, config, step) for name in config.trackers]
