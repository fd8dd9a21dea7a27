"""How well a model predicts a text: loss, perplexity, accuracy; per token, byte and word (CSE599-O A1 section 4.1)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmcore.alone import ALONE, OneRank
from lmcore.config import TrainConfig
from lmcore.data import PreparedData
from lmcore.data.batches import num_validation_windows, require_context, validation_batches
from lmcore.device import autocast
from lmcore.errors import require
from lmcore.functional import at_least_float32, perplexity
from lmcore.model import TransformerLM, evaluating


@dataclass(frozen=True)
class Score:
    """How well a model predicts the targets of all non-overlapping windows of a text."""

    tokens: int
    """Number of targets."""
    loss: float
    """Mean cross-entropy in nats per token."""
    accuracy: float
    """Share of the targets that the model finds most probable."""


@torch.no_grad()
def over_windows(
    measure: Callable[[Tensor, Tensor], Tensor], model: TransformerLM, tokens: np.ndarray, batch_size: int,
    device: torch.device, ranks: OneRank = ALONE,
) -> Tensor:  # fmt: skip
    """Sum of what `measure(inputs, targets)` gives, float64 on the CPU, over the windows of a text, in evaluation mode.

    Windows of the model's context tile the text, `batch_size` at a time. Of several ranks each measures its part of
    them, and all get the sum. Raises `UserError` if the text is shorter than a window.
    """
    context, total = model.config.context_length, torch.zeros((), dtype=torch.float64)
    with evaluating(model):
        for inputs, targets in validation_batches(tokens, context, batch_size, device, ranks.rank, ranks.size):
            if len(inputs):
                total = total + measure(inputs, targets)
            else:  # the others may wait for this one in their forward pass
                total = total + 0 * measure(*torch.zeros(2, 1, context, dtype=torch.int64, device=device))
        return ranks.sum(total)


def score(
    model: TransformerLM, tokens: np.ndarray, batch_size: int, device: torch.device, precision: str = "fp32",
    module: Callable[[Tensor], Tensor] | None = None, ranks: OneRank = ALONE,
) -> Score:  # fmt: skip
    """Losses and hits over `tokens` by `over_windows`; `module` is what a forward pass calls, if not the model."""

    def measure(inputs: Tensor, targets: Tensor) -> Tensor:
        with autocast(device, precision):
            logits = at_least_float32((module or model)(inputs))
        of_targets = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        losses = (logits.logsumexp(-1) - of_targets).cpu().double().sum()
        correct = (logits.argmax(-1) == targets).cpu().double().sum()
        return torch.stack((losses, correct))

    losses, correct = over_windows(measure, model, tokens, batch_size, device, ranks).tolist()
    context = model.config.context_length
    targets = context * num_validation_windows(len(tokens), context)
    return Score(targets, losses / targets, correct / targets)


def validation(
    step: Any, tokens: np.ndarray, config: TrainConfig, device: torch.device, ranks: OneRank = ALONE
) -> dict[str, Any]:
    """What a metrics line says of the validation text, or of its first `config.eval_tokens`: the mean loss over all
    windows, in nats per token.

    With `config.eval_details` also the accuracy. `step` is a `PlainStep`, or what is called like one.
    """
    model, batch_size = step.current()[0], config.eval_batch_size
    tokens = tokens[: None if config.eval_tokens is None else config.eval_tokens + 1]

    def measure(inputs: Tensor, targets: Tensor) -> Tensor:
        loss, count = step.evaluation_loss(inputs, targets).cpu().double(), targets.numel()
        return torch.stack((loss * count, torch.tensor(count, dtype=torch.float64)))

    total, count = over_windows(measure, model, tokens, batch_size, device, ranks).tolist()
    found: dict[str, Any] = {"valid_loss": total / count}
    if config.eval_details:
        details = score(model, tokens, batch_size, device, config.precision, step.strategy.module, ranks)
        found["valid_accuracy"] = details.accuracy
    return found


@dataclass(frozen=True)
class Evaluation(Score):
    """What `evaluate` finds on a part of a corpus. Bytes and words are those of the tokens that were predicted."""

    split: str
    bytes: int
    words: int
    """Separated by white space."""

    @property
    def perplexity(self) -> float:
        """Per token."""
        return perplexity(self.loss)

    @property
    def loss_per_byte(self) -> float:
        """Nats per byte of UTF-8: comparable between tokenizers."""
        return self.loss * self.tokens / self.bytes

    @property
    def word_perplexity(self) -> float:
        """exp of the nats per word."""
        return perplexity(self.loss * self.tokens / self.words)


def evaluate(
    model: TransformerLM, data: PreparedData, split: str = "valid", batch_size: int = 32,
    device: str | torch.device = "cpu", precision: str = "fp32",
) -> Evaluation:  # fmt: skip
    """Scores `model` on a split of the corpus: valid, or dev, the last training documents.

    Windows of the model's context tile the text, so that a token sees between none and all of its window before it.
    `<|endoftext|>` is a token to predict, but neither a byte nor a word. Raises `UserError` for another split, a
    vocabulary larger than the model's, or a text shorter than a window.
    """
    require(split in ("valid", "dev"), f"A model is evaluated on valid or dev, not on {split!r}.")
    require(
        data.vocab_size <= model.config.vocab_size,
        f"The data has a vocabulary of {data.vocab_size}, the model one of {model.config.vocab_size}.",
    )
    tokens = data.evaluated_on(split).valid
    require_context(tokens, model.config.context_length, f"{data.folder} ({split} part)")
    found = score(model, tokens, batch_size, torch.device(device), precision)
    predicted = tokens[1 : found.tokens + 1]
    documents = np.split(predicted, np.flatnonzero(predicted == data.tokenizer.eot_id))
    texts = [data.tokenizer.decode_bytes(part[part != data.tokenizer.eot_id].tolist()) for part in documents]
    size, words = sum(map(len, texts)), sum(len(text.split()) for text in texts)
    require(size > 0 and words > 0, f"{data.folder} ({split} part) has no words.")
    return Evaluation(**vars(found), split=split, bytes=size, words=words)
