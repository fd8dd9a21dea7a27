"""Where metrics go besides metrics.jsonl: TensorBoard and Weights & Biases, both optional."""

from typing import Any

from lmcore.config import TrainConfig, to_dict
from lmcore.errors import UserError
from lmcore.run import RunFolder


class TensorBoard:
    """Writes event files to tensorboard/ in the run folder."""

    def __init__(self, run: RunFolder, config: TrainConfig, step: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run.path / "tensorboard"), purge_step=step + 1)
        self.close = self.writer.close

    def log(self, line: dict[str, Any]) -> None:
        """Takes one metrics line; `line["step"]` is its step."""
        for key, value in line.items():
            if key != "step" and isinstance(value, int | float):
                self.writer.add_scalar(key, value, line["step"])


class WeightsAndBiases:
    """Logs to Weights & Biases under the run folder's name; a resumed run continues its own page."""

    def __init__(self, run: RunFolder, config: TrainConfig, step: int):
        import wandb

        page = {"project": "lmcore", "name": run.name, "id": run.name, "resume": "allow", "dir": str(run.path)}
        self.session = wandb.init(config=to_dict(config), **page)
        self.close = self.session.finish

    def log(self, line: dict[str, Any]) -> None:
        """Takes one metrics line."""
        self.session.log({k: v for k, v in line.items() if v is not None}, step=line["step"])


def tracker(name: str, run: RunFolder, config: TrainConfig, step: int) -> TensorBoard | WeightsAndBiases:
    """The tracker of this name in `TrainConfig.trackers`. Raises `UserError` where its package is not installed."""
    try:
        return {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}[name](run, config, step)
    except ImportError as error:
        raise UserError(f"The {name} tracker needs a package: pip install 'lmcore[{name}]'.") from error
