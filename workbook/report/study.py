"""The optimization report's study, which notebook 10 measures: its model and its benchmark cases."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lmcore.config import ModelConfig, check_fields
from lmcore.profiling.cases import Precision, WorkloadConfig

OPTIMIZATIONS: dict[str, dict[str, Any]] = {
    "baseline": {},
    "checkpointing": {"checkpoint_every": 1},
    "fused attention": {"attention": "sdpa"},
    "both": {"checkpoint_every": 1, "attention": "sdpa"},
}
"""Switches of the model by the name of the optimization in the report."""


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
