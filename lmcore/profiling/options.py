"""What `lmcore benchmark`, `nsys`, `memory` and sweeps can be asked to measure, and the cases that follow from it."""

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from lmcore.config import MODEL_SIZES, ModelConfig, OptimizerConfig, model_config, replace, require_choices
from lmcore.errors import require

if TYPE_CHECKING:  # PyTorch is imported when the cases are made
    from lmcore.profiling.workload import WorkloadConfig


@dataclass(frozen=True)
class BenchmarkConfig:
    """What is timed: every combination of the options that take several values."""

    size: tuple[str, ...] = ()
    """Named sizes; none: the model whose numbers the --model options give."""
    context_length: tuple[int, ...] = ()
    """None: that of --model.context-length."""
    precision: tuple[Literal["fp32", "tf32", "bf16", "fp16"], ...] = ("fp32",)
    passes: tuple[Literal["forward", "forward_backward", "train_step"], ...] = ("forward", "forward_backward")
    """forward: inference; forward_backward: with loss and gradients; train_step: and AdamW's update."""
    attention: tuple[Literal["plain", "sdpa", "flash"], ...] = ()
    """None: that of --model.attention."""
    batch_size: int = 4
    warmup_steps: int = 5
    steps: int = 10
    ops: Literal["plain", "fused"] = "plain"
    """fused: our kernels, FlashAttention among them, in an explicit step that is one graph on a GPU; nothing of it is
    compiled, and its parts are not timed apart."""
    compile: bool = False
    device: str = "auto"
    """auto, cpu, mps, cuda or cuda:N."""
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self):
        require_choices(self)
        require(bool(self.precision), "Give at least one precision: fp32, tf32, bf16 or fp16.")
        require(bool(self.passes), "Give at least one of the passes: forward, forward_backward or train_step.")
        defaults = ModelConfig()
        own = [name for name in MODEL_SIZES["small"] if getattr(self.model, name) != getattr(defaults, name)]
        options = ", ".join(f"--model.{name.replace('_', '-')}" for name in own)
        require(not (self.size and own), f"A named size has its own numbers: give either --size or {options}.")
        if self.ops == "fused":
            self.require_fused_settings()

    def require_fused_settings(self) -> None:
        """Raises `UserError` on switches that the fused step would not heed: a table would tell of another step."""
        require(not self.compile, "The fused step compiles nothing: leave --compile out, or take --ops plain.")
        asked = self.attention or ({self.model.attention} - {"plain"})  # plain is also what the model has unasked
        others = ", ".join(name for name in asked if name != "flash")
        require(not others, f"The fused step has FlashAttention, not {others}: ask for flash, or take --ops plain.")


def benchmark_cases(settings: BenchmarkConfig) -> "dict[str, WorkloadConfig]":
    """The cases that the options ask for, by names that say how they differ. Raises `UserError` on bad values."""
    from lmcore.profiling.workload import WorkloadConfig

    s, cases = settings, {}
    for size in s.size:
        model_config(size)  # refuses names that there are not
    models = {size: replace(s.model, **MODEL_SIZES[size]) for size in s.size} or {None: s.model}
    fused = s.ops == "fused"
    contexts = s.context_length or (s.model.context_length,)
    attentions = ("flash",) if fused else s.attention or (s.model.attention,)
    for (size, model), *ways in itertools.product(models.items(), contexts, attentions, s.precision, s.passes):
        context, attention, precision, passes = ways
        config = WorkloadConfig(
            model=replace(model, context_length=context, attention=attention),
            batch_size=s.batch_size, passes=passes, precision=precision, ops=s.ops, compile=s.compile,
            warmup_steps=s.warmup_steps, steps=s.steps, optimizer=s.optimizer, seed=s.seed, device=s.device, size=size,
        )  # fmt: skip
        name = [size or f"own-{model.num_layers}x{model.d_model}", str(context), precision, passes]
        name += ["fused"] if fused else [attention] * (attention != "plain") + ["compiled"] * s.compile
        name += [f"b{s.batch_size}"]
        cases["-".join(name)] = config
    return cases
