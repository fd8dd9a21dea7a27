"""The run folder: everything one training run wrote, and who may write to it."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock, Timeout

from lmcore.config import TrainConfig, from_dict, to_dict
from lmcore.errors import UserError, require
from lmcore.files import leftovers, read_json, sealed, unsealed, write_in_place, write_json
from lmcore.metrics import MetricsFile
from lmcore.provenance import utc_now

FREE_TO_CHANGE = {"data", "device", "trackers", "keep_checkpoints", "checkpoint_interval"}
"""Fields that a resumed run may change: they do not change its numbers (data is compared by its fingerprint)."""


NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
"""What a file system answers that is mounted without locks, as Lustre and NFS can be."""

BUSY = "Another process is using the run folder"
"""Beginning of the sentence that refuses a second process."""

SECONDS_TO_WAIT = 1.0
"""How long a busy folder is tried: `is_busy` of another process holds it for an instant."""


class RunBusy(UserError):
    """Another process holds the run folder."""


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
        try:
            self.checkpoint_folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path / ".lock")
            lock.acquire(timeout=seconds)
        except Timeout:
            raise RunBusy(f"{BUSY} {self.path}; wait for it or choose another.") from None
        except (OSError, NotImplementedError) as error:
            number = getattr(error, "errno", errno.ENOSYS)
            require(
                number not in NO_LOCKS,
                f"The file system of the run folder {self.path} cannot lock files, so two processes could spoil the "
                "run; mount it with flock, or choose a folder on another file system.",
            )
            raise UserError(f"The run folder {self.path} cannot be written to ({os.strerror(number)}).") from error
        try:
            yield
        finally:
            lock.release()

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
            path.unlink(missing_ok=True)

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
        write_json(self.environment_file, [sealed(start) for start in (*starts, environment)])

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
        plain = [unsealed(start) for start in starts] if sound else [None]
        require(
            None not in plain,
            f"{self.environment_file} is damaged: it must be the list of starts that was written; put it right, or "
            "remove it to go on without knowing what the run began with.",
        )
        return plain

    def status(self) -> dict[str, Any]:
        """State (new, running, interrupted, failed, diverged, out of memory or complete), step, and further notes."""
        status = _json_or_none(self.status_file) if self.status_file.exists() else {"state": "new", "step": 0}
        plain = unsealed(status) if isinstance(status, dict) and {"state", "step"} <= status.keys() else None
        require(
            plain is not None,
            f"{self.status_file} is damaged: it must be the state and step that were written; lmcore train on "
            f"{self.path} writes it again.",
        )
        return plain

    def write_status(self, state: str, step: int, **notes: Any) -> None:
        """Replaces the status; on a full disk in place, which needs no room."""
        status = sealed({"state": state, "step": step, "time_utc": utc_now(), **notes})
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

    def checkpoint_file(self, step: int) -> Path:
        """Path of the full checkpoint after `step` steps."""
        return self.checkpoint_folder / f"step_{step:08d}.pt"

    def checkpoints(self) -> list[Path]:
        """Full checkpoints, the newest first."""
        return sorted(self.checkpoint_folder.glob("step_*.pt"), reverse=True)


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
