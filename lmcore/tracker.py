"""Trackers: Weights & Biases, TensorBoard or trackio get every metrics line of a run, too."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from lmcore.config import TrainConfig, to_dict
from lmcore.run import RunFolder


def open_service(run: RunFolder, config: TrainConfig, step: int) -> Any:
    """The run in W&B (project WANDB_PROJECT, or lmcore) or in trackio (project lmcore), named by its first start."""
    identity = hashlib.sha256(json.dumps(run.starts()[:1]).encode()).hexdigest()[:16]
    if config.tracker == "wandb":
        options = {"project": os.environ.get("WANDB_PROJECT", "lmcore"), "id": identity, "name": run.name}
        options |= {"dir": run.path, "settings": {"console": "off"}}
    else:
        options = {"project": "lmcore", "name": f"{run.name}-{identity}", "embed": False}
        options |= {"auto_log_cpu": False, "auto_log_gpu": False}
    return import_module(config.tracker).init(config=to_dict(config), resume="allow", **options)


class TensorBoard:
    """Event files in the run folder's `tensorboard/`; what an earlier start wrote after `step` is hidden."""

    def __init__(self, run: RunFolder, config: TrainConfig, step: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(run.path / "tensorboard", purge_step=step + 1)
        self.finish = self.writer.close

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Writes a scalar for each metric."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()


TRACKERS = {"none": lambda *_: None, "wandb": open_service, "tensorboard": TensorBoard, "trackio": open_service}
"""What opens the tracker that `TrainConfig.tracker` names: with `log` and `finish`, or None."""


class Tracker:
    """The tracker of a run that begins, or resumes from `step`.

    After its first failure it gets nothing more: a warning says so, and training continues.
    """

    def __init__(self, run: RunFolder, config: TrainConfig, step: int):
        self.run, self.name, self.opened = run, config.tracker, None
        with self._harmless():
            self.opened = TRACKERS[self.name](run, config, step)

    def log(self, line: dict[str, Any]) -> None:
        """Sends what a metrics line holds."""
        if self.opened is not None:
            with self._harmless():
                metrics = {name: value for name, value in line.items() if name != "step" and value is not None}
                self.opened.log(metrics, step=line["step"])

    def close(self) -> None:
        """Sends what is still waiting."""
        if self.opened is not None:
            with self._harmless():
                self.opened.finish()

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of a package, a network, an account: whatever it is, the run goes first
            self.opened = None
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            install = f" To install it: pip install 'lmcore[{self.name}]'." if isinstance(error, ImportError) else ""
            kept = f"{self.run.metrics_file.name} has all metrics."
            print(f"{self.run.name}: {self.name} gets nothing more ({reason}); {kept}{install}", flush=True)
