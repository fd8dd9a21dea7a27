"""Benchmark cases: one of them, and the grids that commands, notebooks and the optimization report ask for.

Nothing here imports PyTorch: commands show these options in their help.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from lmcore.config import MODEL_SIZES, ModelConfig, OptimizerConfig, check_fields, from_dict, model_config, replace
from lmcore.errors import require, require_positive, require_seed

Mode = Literal["forward", "forward_backward", "train_step"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]

MODES = {
    "forward": "A forward pass",
    "forward_backward": "A forward and backward pass",
    "train_step": "A training step",
}
"""What the modes of a benchmark case are called in a sentence."""


@dataclass(frozen=True)
class MeasurementConfig:
    """How a benchmark case is measured, and how often. Raises `UserError` on values that make no measurement."""

    batch_size: int = 4
    warmup_steps: int = 5
    steps: int = 10
    """Measured steps, after the warm-up."""
    ops: Literal["plain", "fused"] = "plain"
    """fused: our kernels, FlashAttention among them, in an explicit step that is one graph on a GPU; nothing of it is
    compiled, and its parts are not timed apart."""
    compile: bool = False
    device: str = "auto"
    """auto, cpu, mps, cuda or cuda:N."""
    seed: int = 0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Its learning rate is used as it is, without a schedule, and gradients are not clipped."""

    def __post_init__(self):
        require_positive("batch_size", self.batch_size)
        require_positive("steps", self.steps)
        warmups = self.warmup_steps
        whole = isinstance(warmups, int) and not isinstance(warmups, bool) and warmups >= 0
        require(whole, f"warmup_steps must be a whole number, 0 or more, not {warmups!r}.")
        require_seed(self.seed)
        check_fields(self)


@dataclass(frozen=True)
class WorkloadConfig(MeasurementConfig):
    """One benchmark case: what is run, in which precision, and how often."""

    model: ModelConfig = field(default_factory=lambda: model_config("small"))
    mode: Mode = "forward"
    """forward: inference, nothing saved for a backward pass; forward_backward: with loss and gradients; train_step: and
    the optimizer's update."""
    precision: Precision = "fp32"
    """fp32, the same with TF32 matmuls, or mixed precision by autocast; fp16 with loss scaling."""
    size: str | None = None
    """Name of the model's size, for tables."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step goes through."""
        return self.batch_size * self.model.context_length


def workload_config(
    size: str = "small", context_length: int = 256, vocab_size: int = 10_000, **changes: Any
) -> WorkloadConfig:
    """The case of a named size (CS336 A2 Table 1: vocabulary 10,000, batch 4); `changes` go to the model or the case.

    Raises `UserError` on unknown sizes and fields.
    """
    switches = {f.name: changes.pop(f.name) for f in fields(ModelConfig) if f.name in changes}
    model = model_config(size, context_length=context_length, vocab_size=vocab_size, **switches)
    return from_dict(WorkloadConfig, {"model": model, "size": size} | changes)


def case_grid(
    sizes: Sequence[str],
    contexts: Sequence[int],
    precisions: Sequence[str] = ("fp32",),
    mode: Sequence[str] = tuple(MODES),
    **changes: Any,
) -> dict[str, WorkloadConfig]:
    """Every combination, by names such as small-256-fp32-train_step; `changes` go to the model or the case.

    Grids of one kind can be joined (`|`): a case that is in both has one name. Raises `UserError` as
    `workload_config` does.
    """
    return {
        f"{size}-{context}-{precision}-{how_far}": workload_config(
            size, context, precision=precision, mode=how_far, **changes
        )
        for context, size, precision, how_far in itertools.product(contexts, sizes, precisions, mode)
    }


@dataclass(frozen=True)
class BenchmarkConfig(MeasurementConfig):
    """What is timed: every combination of the options that take several values."""

    size: tuple[str, ...] = ()
    """Named sizes; none: the model whose numbers the --model options give."""
    context_length: tuple[int, ...] = ()
    """None: that of --model.context-length."""
    precision: tuple[Precision, ...] = ("fp32",)
    mode: tuple[Mode, ...] = ("forward", "forward_backward")
    """forward: inference; forward_backward: with loss and gradients; train_step: and AdamW's update."""
    attention: tuple[Literal["plain", "sdpa", "flash"], ...] = ()
    """None: that of --model.attention."""
    model: ModelConfig = field(default_factory=ModelConfig)

    def __post_init__(self):
        super().__post_init__()
        require(bool(self.precision), "Give at least one precision: fp32, tf32, bf16 or fp16.")
        require(bool(self.mode), "Give at least one mode: forward, forward_backward or train_step.")
        defaults = ModelConfig()
        own = [name for name in MODEL_SIZES["small"] if getattr(self.model, name) != getattr(defaults, name)]
        options = ", ".join(f"--model.{name.replace('_', '-')}" for name in own)
        require(not (self.size and own), f"A named size has its own numbers: give either --size or {options}.")
        if self.ops == "fused":  # a table would tell of another step than was run
            require(not self.compile, "The fused step compiles nothing: leave --compile out, or take --ops plain.")
            asked = self.attention or ({self.model.attention} - {"plain"})  # plain is also what the model has unasked
            others = ", ".join(name for name in asked if name != "flash")
            require(not others, f"The fused step has FlashAttention, not {others}: ask for flash, or take --ops plain.")


def benchmark_cases(settings: BenchmarkConfig) -> dict[str, WorkloadConfig]:
    """The cases that the options ask for, by names that say how they differ. Raises `UserError` on bad values."""
    s, fused, cases = settings, settings.ops == "fused", {}
    others = {name: value for name, value in vars(s.model).items() if name not in MODEL_SIZES["small"]}
    models = {size: model_config(size, **others) for size in s.size} or {None: s.model}
    contexts = s.context_length or (s.model.context_length,)
    attentions = ("flash",) if fused else s.attention or (s.model.attention,)
    measured = {f.name: getattr(s, f.name) for f in fields(MeasurementConfig)}
    for (size, model), *ways in itertools.product(models.items(), contexts, attentions, s.precision, s.mode):
        context, attention, precision, mode = ways
        name = [size or f"own-{model.num_layers}x{model.d_model}", str(context), precision, mode]
        name += ["fused"] if fused else [attention] * (attention != "plain") + ["compiled"] * s.compile
        model = replace(model, context_length=context, attention=attention)
        config = WorkloadConfig(**measured, model=model, mode=mode, precision=precision, size=size)
        cases["-".join([*name, f"b{s.batch_size}"])] = config
    return cases


OPTIMIZATIONS: dict[str, dict[str, Any]] = {
    "baseline": {},
    "checkpointing": {"checkpoint_every": 1},
    "fused attention": {"attention": "sdpa"},
    "both": {"checkpoint_every": 1, "attention": "sdpa"},
}
"""Switches of the model by the name of the optimization in the report of `StudyConfig`."""


@dataclass(frozen=True)
class StudyConfig:
    """What is measured of an optimization report. The defaults are its own setting; smaller ones fit a CPU.

    The report (Foundations of ML for Systems Researchers, assignment 1) trains a Transformer encoder stack of 12 layers
    and 12 heads with a causal mask and sinusoidal positions, and does not give its width or its feed-forward network.
    Taken here are those of GPT-2's smallest model with SiLU and without a gate, pre-norm blocks, untied embeddings, no
    dropout. Raises `UserError` on values that make no study.
    """

    d_model: int = 768
    d_ff: int = 3072
    num_layers: int = 12
    num_heads: int = 12
    vocab_size: int = 50_257
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    batch_context: int = 512
    """Context at which the batch size varies."""
    precisions: tuple[Precision, ...] = ("fp32", "fp16", "bf16")
    """Of the cases by batch size; the first is what the others are compared with."""
    contexts: tuple[int, ...] = (128, 256, 512, 1024)
    context_batch: int = 8
    """Batch size at which the context varies."""
    optimization_batch: int = 16
    optimization_context: int = 1024
    mixed_precision: Precision = "fp16"
    """Of the cases by context, as in the report, and of the optimizations, for which it names none."""
    warmup_steps: int = 3
    steps: int = 10
    device: str = "auto"

    def __post_init__(self):
        check_fields(self)
        for name in ("batch_sizes", "contexts", "precisions"):
            values = getattr(self, name)
            require(len(values) > 0, f"{name} must name at least one.")
            require(len(set(values)) == len(values), f"{name} names a value twice: {values}.")
            for number in () if name == "precisions" else values:
                require_positive(name, number)

    def model(self, context_length: int, **switches: Any) -> ModelConfig:
        """The report's model at a context length. Raises `UserError` on sizes that make no model."""
        sizes = {name: getattr(self, name) for name in ("vocab_size", "d_model", "num_layers", "num_heads", "d_ff")}
        return ModelConfig(**sizes, context_length=context_length, position="sinusoidal", ffn="silu", **switches)

    def grid(self, ways: Iterable[tuple[int, int, str, dict[str, Any]]]) -> dict[str, WorkloadConfig]:
        """A full training step for each (context length, batch size, precision, switches of the model).

        By names that say all in which the cases of a study differ: study_b16_c1024_fp16_checkpoint1_sdpa.
        """
        cases = {}
        for context, batch, precision, switches in ways:
            marks = [f"checkpoint{on}" if name == "checkpoint_every" else on for name, on in switches.items()]
            cases["_".join(["study", f"b{batch}", f"c{context}", precision, *marks])] = WorkloadConfig(
                model=self.model(context, **switches), batch_size=batch, mode="train_step", precision=precision,
                warmup_steps=self.warmup_steps, steps=self.steps, device=self.device, size="study",
            )  # fmt: skip
        return cases
