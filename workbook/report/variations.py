"""Variations of a training run: in fewer steps, with several seeds."""

from collections.abc import Mapping, Sequence

from lmcore.config import TrainConfig, replace
from lmcore.errors import require


def with_steps(config: TrainConfig, steps: int | None) -> TrainConfig:
    """The same run in `steps` steps: warm-up and the intervals between lines, evaluations and saves in proportion.

    None: the run as it is. Raises `UserError` unless `steps` is positive.
    """
    if steps is None:
        return config
    require(isinstance(steps, int) and steps > 0, f"steps must be a positive whole number, not {steps!r}.")

    def scaled(value: int) -> int:
        return max(1, round(value * steps / config.steps))

    return replace(
        config,
        steps=steps,
        log_interval=scaled(config.log_interval),
        eval_interval=scaled(config.eval_interval),
        checkpoint_interval=scaled(config.checkpoint_interval),
        optimizer__warmup_steps=scaled(config.optimizer.warmup_steps),
    )


def with_seeds(runs: Mapping[str, TrainConfig], seeds: Sequence[int]) -> dict[str, TrainConfig]:
    """Each run once for each seed, which decides its weights and batches; all but seed 0 have it in their names."""
    named = {f"{name}_seed_{seed}" if seed else name: (config, seed) for name, config in runs.items() for seed in seeds}
    return {name: replace(config, seed=seed) for name, (config, seed) in named.items()}
