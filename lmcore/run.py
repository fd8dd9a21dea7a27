"""The run folder: everything one training run wrote, and who may write to it."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock, Timeout

from lmcore.config import TrainConfig, from_dict, require, to_dict
from lmcore.errors import UserError
from lmcore.files import atomic_write, read_json, write_json
from lmcore.provenance import utc_now

FREE_TO_CHANGE = {"data", "device", "trackers", "keep_checkpoints", "checkpoint_interval"}
"""Fields that a resumed run may change: they do not change its numbers (data is compared by its fingerprint)."""


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

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.name

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the folder for this process. Raises `RunBusy` if another does, `UserError` if it cannot be written."""
        try:
            self.checkpoint_folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path / ".lock")
            lock.acquire(timeout=0)
        except Timeout:
            raise RunBusy(
                f"Another process is using the run folder {self.path}; wait for it or choose another."
            ) from None
        except OSError as error:
            raise UserError(f"The run folder {self.path} cannot be written to ({error.strerror}).") from error
        try:
            yield
        finally:
            lock.release()

    def is_busy(self) -> bool:
        """Whether a process holds the folder at this moment."""
        if not (self.path / ".lock").exists():
            return False
        try:
            with self.lock():
                return False
        except RunBusy:
            return True

    def config(self) -> TrainConfig:
        """The run's resolved configuration."""
        return from_dict(TrainConfig, read_json(self.config_file))

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
        write_json(self.environment_file, [*starts, environment])

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
        starts = read_json(self.environment_file) if self.environment_file.exists() else []
        require(
            isinstance(starts, list) and all(isinstance(start, dict) for start in starts),
            f"{self.environment_file} is damaged: it must be a list of starts; put it right, or choose another folder.",
        )
        return starts

    def status(self) -> dict[str, Any]:
        """State (new, running, interrupted, diverged or complete), step, and what else the trainer noted."""
        status = read_json(self.status_file) if self.status_file.exists() else {"state": "new", "step": 0}
        require(
            isinstance(status, dict) and {"state", "step"} <= status.keys(),
            f"{self.status_file} is damaged: it must name state and step; remove it to go on from the last checkpoint.",
        )
        return status

    def write_status(self, state: str, step: int, **notes: Any) -> None:
        """Replaces the status."""
        write_json(self.status_file, {"state": state, "step": step, "time_utc": utc_now(), **notes})

    def metrics_lines(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; a last line that was cut off by a crash is left out."""
        if not self.metrics_file.is_file():
            return []
        lines = self.metrics_file.read_text(encoding="utf-8", errors="replace").splitlines()
        values = []
        for number, line in enumerate(lines, 1):
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if isinstance(value, dict) and "step" in value:
                values.append(value)
            else:
                require(
                    number == len(lines),
                    f"{self.metrics_file} line {number} is damaged: it is not a JSON object with a step; mend or "
                    "remove that line.",
                )
        return values

    def metrics(self) -> pd.DataFrame:
        """metrics.jsonl as a table, one row per line; `valid_loss` is NaN where nothing was evaluated."""
        columns = ["step", "tokens", "seconds", "train_loss", "valid_loss", "lr", "grad_norm", "tokens_per_second"]
        table = pd.DataFrame(self.metrics_lines())
        return table.reindex(columns=[*columns, *(c for c in table.columns if c not in columns)])

    def append_metrics(self, line: dict[str, Any]) -> None:
        """Adds one line. Raises `UserError` if it cannot be written, as on a full disk."""
        try:
            with open(self.metrics_file, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise UserError(
                f"Cannot write {self.metrics_file}: {error.strerror or error}; the same command goes on from the last "
                "checkpoint."
            ) from error

    def keep_metrics_until(self, step: int) -> None:
        """Drops the lines after `step`, which a resumed run will write again."""
        lines = [line for line in self.metrics_lines() if line["step"] <= step]
        with atomic_write(self.metrics_file, "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def checkpoint_file(self, step: int) -> Path:
        """Path of the full checkpoint after `step` steps."""
        return self.checkpoint_folder / f"step_{step:08d}.pt"

    def checkpoints(self) -> list[Path]:
        """Full checkpoints, the newest first."""
        return sorted(self.checkpoint_folder.glob("step_*.pt"), reverse=True)


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with dotted keys; tuples as lists, as JSON has them."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat
