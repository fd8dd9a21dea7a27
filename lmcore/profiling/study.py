"""The cells of an optimisation report: batch sizes, contexts, gradient checkpointing and fused attention.

The report (Foundations of ML for Systems Researchers, assignment 1) trains a Transformer encoder stack of 12 layers
and 12 heads with a causal mask and sinusoidal positions, and does not give its width or its feed-forward network. Taken
here are those of GPT-2's smallest model with SiLU and without a gate, pre-norm blocks, untied embeddings, no dropout.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lmcore.config import ModelConfig, replace, require_choices
from lmcore.errors import require, require_positive
from lmcore.functional import cross_entropy
from lmcore.model import TransformerLM
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
    """Of the cells by batch size; the first is what the others are compared with."""
    contexts: tuple[int, ...] = (128, 256, 512, 1024)
    context_batch: int = 8
    """Batch size at which the context varies."""
    optimization_batch: int = 16
    optimization_context: int = 1024
    mixed_precision: Precision = "fp16"
    """Of the cells by context, as in the report, and of the optimizations, for which it names none."""
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
        return ModelConfig(
            vocab_size=self.vocab_size,
            context_length=context_length,
            d_model=self.d_model,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            d_ff=self.d_ff,
            position="sinusoidal",
            ffn="silu",
            **switches,
        )

    def cell(self, context_length: int, batch_size: int, precision: str, **switches: Any) -> WorkloadConfig:
        """A full training step of the model; `switches` are its attention and checkpointing."""
        return WorkloadConfig(
            model=self.model(context_length, **switches),
            batch_size=batch_size,
            passes="train_step",
            precision=precision,
            warmup_steps=self.warmup_steps,
            steps=self.steps,
            device=self.device,
            size="study",
        )


OPTIMIZATIONS: dict[str, dict[str, Any]] = {
    "baseline": {},
    "checkpointing": {"checkpoint_every": 1},
    "fused attention": {"attention": "sdpa"},
    "both": {"checkpoint_every": 1, "attention": "sdpa"},
}
"""Switches of the model by the name of the optimization."""


def cell_name(config: WorkloadConfig) -> str:
    """A name that says all in which the cells of a study differ: study_b16_c1024_fp16_checkpoint1_sdpa."""
    model = config.model
    parts = ["study", f"b{config.batch_size}", f"c{model.context_length}", config.precision]
    parts += [] if model.checkpoint_every is None else [f"checkpoint{model.checkpoint_every}"]
    parts += [] if model.attention == "plain" else [model.attention]
    return "_".join(parts)


def _named(*configs: WorkloadConfig) -> dict[str, WorkloadConfig]:
    return {cell_name(config): config for config in configs}


def batch_cells(study: StudyConfig) -> dict[str, WorkloadConfig]:
    """Cells by batch size and precision at one context."""
    return _named(
        *(study.cell(study.batch_context, size, kind) for kind in study.precisions for size in study.batch_sizes)
    )


def context_cells(study: StudyConfig) -> dict[str, WorkloadConfig]:
    """Cells by context at one batch size, in mixed precision."""
    return _named(*(study.cell(context, study.context_batch, study.mixed_precision) for context in study.contexts))


def optimization_cells(study: StudyConfig) -> dict[str, WorkloadConfig]:
    """The baseline, checkpointing of every block, fused attention, and both, by cell name in the order of
    `OPTIMIZATIONS`."""
    place = study.optimization_context, study.optimization_batch, study.mixed_precision
    return _named(*(study.cell(*place, **switches) for switches in OPTIMIZATIONS.values()))


def study_cells(study: StudyConfig) -> dict[str, WorkloadConfig]:
    """All cells of a study, for `run_cells`; a cell that two questions share is there once."""
    return batch_cells(study) | context_cells(study) | optimization_cells(study)


@dataclass(frozen=True)
class CheckpointingCheck:
    """A training pass with checkpointing held against the same pass without."""

    every: int
    same_loss: bool
    same_gradients: int
    """Gradients that are bitwise equal, of so many:"""
    gradients: int
    forward_calls: int
    """Forward passes through blocks, of which there are `num_layers` without checkpointing."""
    num_layers: int

    @property
    def identical(self) -> bool:
        """Whether loss and all gradients are the same bits."""
        return self.same_loss and self.same_gradients == self.gradients > 0


def check_checkpointing(config: ModelConfig, every: int = 1, batch_size: int = 2, seed: int = 0) -> CheckpointingCheck:
    """Runs forward and backward pass of `config` on the CPU without checkpointing and with it, and compares bits."""
    (loss, gradients, _), (other_loss, other_gradients, calls) = (
        _training_pass(replace(config, checkpoint_every=setting), batch_size, seed) for setting in (None, every)
    )
    return CheckpointingCheck(
        every=every,
        same_loss=torch.equal(loss, other_loss),
        same_gradients=sum(torch.equal(gradients[name], other_gradients[name]) for name in gradients),
        gradients=len(gradients),
        forward_calls=calls,
        num_layers=config.num_layers,
    )


def _training_pass(config: ModelConfig, batch_size: int, seed: int) -> tuple[torch.Tensor, Mapping, int]:
    """Loss, gradients by parameter, and forward passes through blocks."""
    torch.manual_seed(seed)
    model, calls = TransformerLM(config), []
    tokens = torch.randint(config.vocab_size, (2, batch_size, config.context_length))
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, inputs: calls.append(module))
    loss = cross_entropy(model(tokens[0]), tokens[1])
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}, len(calls)
