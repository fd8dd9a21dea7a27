"""The benchmark cases of an optimisation report: batch sizes, contexts, gradient checkpointing and fused attention.

The report (Foundations of ML for Systems Researchers, assignment 1) trains a Transformer encoder stack of 12 layers
and 12 heads with a causal mask and sinusoidal positions, and does not give its width or its feed-forward network. Taken
here are those of GPT-2's smallest model with SiLU and without a gate, pre-norm blocks, untied embeddings, no dropout.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from lmcore.config import ModelConfig, require_choices
from lmcore.errors import require, require_positive
from lmcore.profiling.workload import WorkloadConfig

Precision = Literal["fp32", "tf32", "bf16", "fp16"]


@dataclass(frozen=True)
class StudyConfig:
    """What of the report is measured. The defaults are its own setting; smaller ones fit a CPU."""

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
        require_choices(self)
        for name in ("batch_sizes", "contexts", "precisions"):
            values = getattr(self, name)
            require(len(values) > 0, f"{name} must name at least one.")
            require(len(set(values)) == len(values), f"{name} names a value twice: {values}.")
        for name in ("batch_sizes", "contexts"):
            for value in getattr(self, name):
                require_positive(name, value)

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
            name = f"study_b{batch}_c{context}_{precision}"
            name += f"_checkpoint{switches['checkpoint_every']}" if "checkpoint_every" in switches else ""
            name += f"_{switches['attention']}" if "attention" in switches else ""
            cases[name] = WorkloadConfig(
                model=self.model(context, **switches), batch_size=batch, passes="train_step", precision=precision,
                warmup_steps=self.warmup_steps, steps=self.steps, device=self.device, size="study",
            )  # fmt: skip
        return cases


OPTIMIZATIONS: dict[str, dict[str, Any]] = {
    "baseline": {},
    "checkpointing": {"checkpoint_every": 1},
    "fused attention": {"attention": "sdpa"},
    "both": {"checkpoint_every": 1, "attention": "sdpa"},
}
"""Switches of the model by the name of the optimization."""
