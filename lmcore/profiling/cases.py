"""Benchmark cases: one of them, and the grids that commands and notebooks ask for.

Nothing here imports PyTorch: commands show these options in their help.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from lmcore.config import MODEL_SIZES, ModelConfig, OptimizerConfig, check_fields, from_dict, model_config, replace
from lmcore.errors import require, require_seed
from lmcore.files import read_json

Mode = Literal["forward", "forward_backward", "train_step"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]

MODES = {
    "forward": "A forward pass",
    "forward_backward": "A forward and backward pass",
    "train_step": "A training step",
}
"""What the modes of a benchmark case are called in a sentence."""


@dataclass(frozen=True)
class WorkloadConfig:
    """One benchmark case: what is run and how often. Raises `UserError` on values that make no measurement."""

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
    model: ModelConfig = field(default_factory=lambda: model_config("small"))
    mode: Mode = "forward"
    """forward: inference, nothing saved for a backward pass; forward_backward: with loss and gradients; train_step: and
    the optimizer's update."""
    precision: Precision = "fp32"
    """fp32, the same with TF32 matmuls, or mixed precision by autocast; fp16 with loss scaling."""
    size: str | None = None
    """Name of the model's size, for tables."""

    def __post_init__(self):
        require_seed(self.seed)
        check_fields(self, positive="batch_size steps", not_negative="warmup_steps")

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
        f"{size}-{context}-{precision}-{way}": workload_config(size, context, precision=precision, mode=way, **changes)
        for context, size, precision, way in itertools.product(contexts, sizes, precisions, mode)
    }


@dataclass(frozen=True)
class GridConfig:
    """Which cases are run: every combination of the options that take several values."""

    size: tuple[str, ...] = ()
    """Named sizes; none: the model whose numbers the --model options give."""
    context_length: tuple[int, ...] = ()
    """None: that of --model.context-length."""
    precision: tuple[Precision, ...] = ("fp32",)
    mode: tuple[Mode, ...] = ("forward", "forward_backward")
    """forward: inference; forward_backward: with loss and gradients; train_step: and the optimizer's update."""
    attention: tuple[Literal["plain", "sdpa", "flash"], ...] = ()
    """None: that of --model.attention."""
    batch_size: int = 4
    warmup_steps: int = 5
    """Steps that are run before those that count."""
    steps: int = 10
    """Measured steps, after the warm-up."""
    ops: Literal["plain", "fused"] = "plain"
    """fused: our kernels in an explicit step, with FlashAttention, not compiled, whatever else is asked for."""
    compile: bool = False
    device: str = "auto"
    """auto, cpu, mps, cuda or cuda:N."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Its learning rate is used as it is, without a schedule, and gradients are not clipped."""
    model: ModelConfig = field(default_factory=ModelConfig)
    run: str | None = None
    """Run folder whose model is measured, such as an imported one; instead of sizes and --model options."""

    def __post_init__(self):
        check_fields(self)
        require(bool(self.precision and self.mode), "Give at least one precision and at least one mode.")
        defaults = ModelConfig()
        alone = self.run is None or (not self.size and self.model == defaults)
        require(alone, "--run has a model of its own: give neither --size nor --model options beside it.")
        own = [name for name in MODEL_SIZES["small"] if getattr(self.model, name) != getattr(defaults, name)]
        options = ", ".join(f"--model.{name.replace('_', '-')}" for name in own)
        require(not (self.size and own), f"A named size has its own numbers: give either --size or {options}.")


def grid_cases(grid: GridConfig) -> dict[str, WorkloadConfig]:
    """The cases that the options ask for, by names that say how they differ. Raises `UserError` on bad values."""
    common = {f.name: getattr(grid, f.name) for f in fields(WorkloadConfig) if hasattr(grid, f.name)}
    fused, cases = grid.ops == "fused", {}
    common["compile"] = grid.compile and not fused
    own = from_dict(ModelConfig, read_json(Path(grid.run, "config.json")).get("model")) if grid.run else grid.model
    others = {name: value for name, value in vars(own).items() if name not in MODEL_SIZES["small"]}
    models = {size: model_config(size, **others) for size in grid.size} or {None: own}
    contexts = grid.context_length or (own.context_length,)
    attentions = ("flash",) if fused else grid.attention or (own.attention,)
    for (size, model), *ways in itertools.product(models.items(), contexts, attentions, grid.precision, grid.mode):
        context, attention, precision, mode = ways
        name = [size or f"own-{model.num_layers}x{model.d_model}", str(context), precision, mode]
        name += ["fused"] if fused else [attention] * (attention != "plain") + ["compiled"] * common["compile"]
        model = replace(model, context_length=context, attention=attention)
        one = {"model": model, "mode": mode, "precision": precision, "size": size}
        cases["-".join([*name, f"b{grid.batch_size}"])] = WorkloadConfig(**common | one)
    return cases
