"""Training recipes by name (CSE599-O A1 section 7.2)."""

from lmcore.config import OptimizerConfig, TrainConfig, model_config, replace
from lmcore.errors import require


def fast(config: TrainConfig) -> TrainConfig:
    """The same run by our kernels: fused operations where they cover the model, FlashAttention elsewhere."""
    return replace(config, ops="fused", model__attention="flash")


HANDOUT = fast(  # in the budget of CSE599-O A1 part 2: 32 sequences of 256 tokens, 5,000 times
    TrainConfig(
        model=model_config("tinystories", vocab_size=50257, context_length=256),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=200, weight_decay=0.1, decay_norms=True),
        batch_size=32,
        steps=5000,
        log_interval=20,
        eval_interval=625,
        checkpoint_interval=5000,
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

TEN_MINUTES = replace(  # 46 passes over 7.8 million tokens
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

# At GPT-2's vocabulary twelve layers with tied embeddings have the handout's number of parameters. They memorize such
# a corpus soon, so they learn from a teacher, too: `--teacher` and the run folder of the second recipe. Both together
# take seven to eight minutes of an H200 (results/h200/README.md).
DEEP = replace(
    TEN_MINUTES, model__num_layers=12, steps=15_000, eval_interval=1500, checkpoint_interval=7500, keep_checkpoints=1
)
TEACHER = replace(DEEP, model__num_layers=8, steps=5500, eval_interval=1375, checkpoint_interval=5500)

LEADERBOARD = replace(  # CSE599-O A1 section 7.5: OpenWebText, for 1.5 hours on one H100
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
        eval_tokens=131_072,  # of a text of any length
        checkpoint_interval=30,
        keep_checkpoints=4,
    ),
    "laptop": TrainConfig(
        model=model_config("laptop", vocab_size=4096, context_length=128, attention="sdpa"),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=50),
        batch_size=32,
        steps=400,
        eval_interval=100,
        eval_batch_size=16,
        eval_tokens=131_072,
        checkpoint_interval=100,
        keep_checkpoints=4,
    ),
    "handout": HANDOUT,
    "regularized": REGULARIZED,
    "tied": TIED,
    "best-at-budget": BEST_AT_BUDGET,
    "deep-at-budget": replace(BEST_AT_BUDGET, model__num_layers=12),
    "ten-minutes": TEN_MINUTES,
    "deep": DEEP,
    "teacher": TEACHER,
    # 327,680,000 tokens of the whole TinyStories corpus, which is read less than once: nothing to regularize
    "full-corpus": replace(
        BEST_AT_BUDGET, optimizer__weight_decay=0.1, batch_size=64, steps=20_000, eval_interval=1000
    ),
    "leaderboard": LEADERBOARD,
}
"""`lmcore train --preset NAME`; the first two, smoke and laptop, run on a CPU, the others are meant for a GPU."""


def recipe(name: str, data: str, vocab_size: int) -> TrainConfig:
    """The named recipe on a prepared corpus with this vocabulary. Raises `UserError` on an unknown name."""
    require(name in RECIPES, f"There is no recipe {name!r}; choose one of {', '.join(RECIPES)}.")
    return replace(RECIPES[name], data=data, model__vocab_size=vocab_size)
