"""What `lmcore benchmark`, `nsys`, `memory` and sweeps can be asked to measure, and the cells that follow from it."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from lmcore.config import MODEL_SIZES, ModelConfig, OptimizerConfig, model_config, replace, require_choices
from lmcore.errors import require

if TYPE_CHECKING:  # PyTorch is imported when the cells are made
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


def benchmark_cells(settings: BenchmarkConfig) -> "dict[str, WorkloadConfig]":
    """The cells that the options ask for, by names that say how they differ. Raises `UserError` on bad values."""
    from lmcore.profiling.workload import WorkloadConfig

    s, cells = settings, {}
    models = {size: replace(s.model, **MODEL_SIZES[model_size(size)]) for size in s.size} or {None: s.model}
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
        cells["-".join(name)] = config
    return cells


def model_size(name: str) -> str:
    """`name` if there is a size of that name. Raises `UserError` otherwise."""
    model_config(name)
    return name


def check_device(device: str, precisions: Sequence[str]) -> None:
    """Raises `UserError` where no cell could run: the device is not there, or does not compute in a precision."""
    from lmcore.device import require_precision, select_device

    chosen, _ = select_device(device)
    for precision in precisions:
        require_precision(chosen, precision)


def require_covered(cells: "Mapping[str, WorkloadConfig]") -> None:
    """Raises `UserError` where the fused step covers none of the cells, and so all would fail. Where it covers some,
    each of the others fails with its own reason."""
    from lmcore.fused.coverage import why_not

    reasons = dict.fromkeys(why_not(cell.model, cell.precision) for cell in cells.values())
    missing = "; ".join(filter(None, reasons))
    require(None in reasons, f"The fused step does not cover {missing}: take --ops plain.")
