"""Training recipes by name, and the studies that vary one setting of a recipe (CSE599-O A1 section 7.2)."""

from collections.abc import Mapping, Sequence

from lmcore.config import OptimizerConfig, TrainConfig, model_config, replace
from lmcore.errors import require


def fast(config: TrainConfig) -> TrainConfig:
    """The same run by our kernels: fused operations where they cover the model, FlashAttention elsewhere."""
    return replace(config, ops="fused", model__attention="flash")


HANDOUT_STEPS = 5000
"""The budget of CSE599-O A1 part 2: 32 sequences of 256 tokens, 5,000 times."""

HANDOUT = fast(
    TrainConfig(
        model=model_config("tinystories", vocab_size=50257, context_length=256),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=200, weight_decay=0.1, decay_norms=True),
        batch_size=32,
        steps=HANDOUT_STEPS,
        log_interval=20,
        eval_interval=625,
        checkpoint_interval=HANDOUT_STEPS,
        precision="bf16",
        compile=True,
    )
)

# From here on, what a corpus of 7.8 million tokens asks for: it is read several times, so regularization pays. A weight
# decay this large costs more than it gains where norm weights decay, too (results/h200/norm_decay.json).
REGULARIZED = replace(
    HANDOUT,
    sampling="epoch",
    optimizer__learning_rate=2e-3,
    optimizer__weight_decay=1.0,
    optimizer__decay_norms=False,
)
TIED = replace(REGULARIZED, model__tie_embeddings=True)
BEST_AT_BUDGET = replace(TIED, optimizer__name="muon", optimizer__learning_rate=5e-3, optimizer__weight_decay=0.5)

TEN_MINUTES = replace(  # what one H200 does in that time: some 46 passes over 7.8 million tokens
    BEST_AT_BUDGET,
    model__dropout=0.2,
    optimizer__learning_rate=4e-3,
    optimizer__weight_decay=1.0,
    optimizer__warmup_steps=300,
    batch_size=64,
    steps=22_000,
    log_interval=50,
    eval_interval=1375,
    checkpoint_interval=5500,
    keep_checkpoints=4,
)

LEADERBOARD = replace(  # CSE599-O A1 section 7.5: OpenWebText, read once, for 1.5 hours on one H100
    HANDOUT,
    model=model_config(
        "small", d_ff=2048, vocab_size=32_000, context_length=1024, tie_embeddings=True, attention="flash"
    ),
    optimizer=OptimizerConfig(name="muon", learning_rate=3e-3, warmup_steps=500, weight_decay=0.1),
    sampling="epoch",
    batch_size=128,
    steps=23_000,  # 3.0 billion tokens: by 770 million FLOPs a token, 5,100 seconds at a little over 45 % of the peak
    log_interval=50,
    eval_interval=5750,  # the validation text of the course is so long that each evaluation takes half a minute
    eval_batch_size=32,
    checkpoint_interval=2300,
)
"""110 million parameters suit some 2 to 4 billion tokens (Hoffmann et al. 2022); the explicit step covers them."""

RECIPES: dict[str, TrainConfig] = {
    "smoke": TrainConfig(
        model=model_config("smoke", vocab_size=512, context_length=128, attention="sdpa"),
        optimizer=OptimizerConfig(learning_rate=2e-2, warmup_steps=16),
        batch_size=8,
        steps=120,
        log_interval=10,
        eval_interval=40,
        eval_batch_size=16,  # what fits into the caches of a CPU
        checkpoint_interval=30,
        keep_checkpoints=4,
    ),
    "laptop": TrainConfig(
        model=model_config("laptop", vocab_size=4096, context_length=128),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=100),
        batch_size=32,
        steps=2000,
        eval_interval=200,
        checkpoint_interval=500,
        keep_checkpoints=4,
    ),
    "handout": HANDOUT,
    "regularized": REGULARIZED,
    "tied": TIED,
    "best-at-budget": BEST_AT_BUDGET,
    "ten-minutes": TEN_MINUTES,
    # 327,680,000 tokens of the whole TinyStories corpus, which is read less than once: nothing to regularize
    "full-corpus": replace(
        BEST_AT_BUDGET, optimizer__weight_decay=0.1, batch_size=64, steps=20_000, eval_interval=1000
    ),
    "leaderboard": LEADERBOARD,
}
"""`lmcore train --preset NAME`; smoke and laptop run on a CPU, the others are meant for a GPU."""


def recipe(name: str, data: str, vocab_size: int, steps: int | None = None) -> TrainConfig:
    """The named recipe on a prepared corpus with this vocabulary, if given with other `steps`.

    Intervals and warm-up shrink with the steps. Raises `UserError` on an unknown name.
    """
    require(name in RECIPES, f"There is no recipe {name!r}; choose one of {', '.join(RECIPES)}.")
    config = replace(RECIPES[name], data=data, model__vocab_size=vocab_size)
    return config if steps is None else with_steps(config, steps)


def with_steps(config: TrainConfig, steps: int) -> TrainConfig:
    """The same run in `steps` steps: warm-up and the intervals between lines, evaluations and saves in proportion."""
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


def learning_rate_runs(base: TrainConfig, learning_rates: Sequence[float]) -> dict[str, TrainConfig]:
    """`base` once for each learning rate, all else equal (problem *learning_rate*)."""
    return {f"lr_{rate:g}": replace(base, optimizer__learning_rate=rate) for rate in learning_rates}


def with_seeds(runs: Mapping[str, TrainConfig], seeds: Sequence[int]) -> dict[str, TrainConfig]:
    """Each run once for each seed, which decides its weights and batches; all but seed 0 have it in their names."""
    named = {f"{name}_seed_{seed}" if seed else name: (config, seed) for name, config in runs.items() for seed in seeds}
    return {name: replace(config, seed=seed) for name, (config, seed) in named.items()}
