"""Where metrics go besides metrics.jsonl: TensorBoard and Weights & Biases, both optional."""

from typing import Any, Protocol

from lmcore.config import TrainConfig, to_dict
from lmcore.errors import UserError
from lmcore.run import RunFolder


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
"""By the name in `TrainConfig.trackers`."""
