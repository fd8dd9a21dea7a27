"""What notebook 03 measures on sampled text, by decoder settings and by how far the model is trained."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from lmcore.checkpoint import load_model, read_checkpoint, read_weights
from lmcore.config import GenerateConfig, replace
from lmcore.data import PreparedData, log_probability
from lmcore.errors import require
from lmcore.functional import cross_entropy
from lmcore.generate import Generation, generate_text
from lmcore.model import TransformerLM, evaluating
from lmcore.run import RunFolder
from lmcore.tokenizer import Tokenizer

WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
"""A word: letters, with apostrophes inside."""


def words(text: str) -> list[str]:
    """The words of a text in lower case."""
    return [word.lower() for word in WORD.findall(text)]


class KnownText:
    """The words of a text, and every three that follow each other in it."""

    def __init__(self, text: str):
        self.numbers: dict[str, int] = {}
        sequence = np.array([self.numbers.setdefault(word, len(self.numbers)) for word in words(text)], dtype=np.int64)
        self.trigrams = np.unique(self._pack(sequence))

    @staticmethod
    def _pack(numbers: np.ndarray) -> np.ndarray:
        """Three words as one integer: 21 bits for each."""
        return (numbers[:-2] << 42) | (numbers[1:-1] << 21) | numbers[2:]

    def knows_words(self, sequence: Sequence[str]) -> list[bool]:
        """Whether each word occurs in the text."""
        return [word in self.numbers for word in sequence]

    def knows_trigrams(self, sequence: Sequence[str]) -> list[bool]:
        """Whether each three consecutive words do."""
        numbers = np.array([self.numbers.get(word, -1) for word in sequence], dtype=np.int64)
        packed = self._pack(numbers)  # negative for an unknown word
        if not len(self.trigrams):
            return [False] * len(packed)
        # they are sorted: a search for each, where np.isin would sort millions of them again for every document
        places = np.searchsorted(self.trigrams, packed).clip(max=len(self.trigrams) - 1)
        return (self.trigrams[places] == packed).tolist()


def documents_of(tokenizer: Tokenizer, ids: Sequence[int], count: int, max_tokens: int) -> list[Generation]:
    """The first documents of a corpus in the form of samples: real text, cut where a sample would be."""
    ids = np.asarray(ids)
    ends = np.flatnonzero(ids == tokenizer.eot_id)[:count]
    starts = [0, *(ends[:-1] + 1)]
    documents = [ids[start : min(end, start + max_tokens)].tolist() for start, end in zip(starts, ends, strict=False)]
    return [
        Generation("", tokenizer.decode(row), row, "max_new_tokens" if len(row) == max_tokens else "end_of_text")
        for row in documents
    ]


def repetition(text: str, n: int = 4) -> float:
    """Share of the n-grams of words that have occurred before in the text; NaN if it has fewer than n words."""
    sequence = words(text)
    grams = [tuple(sequence[i : i + n]) for i in range(len(sequence) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else math.nan


def log_likelihood(model: TransformerLM, rows: Iterable[Sequence[int]], start: int) -> float:
    """Mean log-probability in nats per token that `model` itself (temperature 1) gives to documents.

    Each document is read from its beginning, after the token `start` (<|endoftext|>), as far as the context reaches.
    """
    device, total, count = next(model.parameters()).device, 0.0, 0
    with evaluating(model), torch.no_grad():
        for row in rows:
            ids = torch.tensor([start, *row][: model.config.context_length + 1], device=device)
            if len(ids) > 1:
                loss = cross_entropy(model(ids[None, :-1]), ids[None, 1:])
                total, count = total - loss.item() * (len(ids) - 1), count + len(ids) - 1
    return total / count if count else math.nan


@dataclass(frozen=True)
class Judge:
    """What documents are measured against: the text of the corpus, and a test of whole documents if there is one."""

    tokenizer: Tokenizer
    known: KnownText
    accepts: Callable[[str], bool] | None = None

    def measure(self, model: TransformerLM, samples: Sequence[Generation]) -> dict[str, float]:
        """Measures of documents (samples from an empty prompt), each a mean over all of them.

        - `log_likelihood`: of the tokens under `model` itself, in nats per token;
        - `repetition`: share of repeated 4-grams of words within a document;
        - `known_words`: share of the words that occur in the corpus (a word cut off at the end does not count);
        - `known_trigrams`: share of the words' trigrams that occur in the corpus;
        - `finished`: share of the documents that ended by themselves;
        - `accepted`: share of the finished documents that `accepts` accepts; NaN without it or without any.
        """
        require(len(samples) > 0, "There are no samples to measure.")
        whole = [sample.stop == "end_of_text" for sample in samples]
        found = [words(s.text) if done else words(s.text)[:-1] for s, done in zip(samples, whole, strict=True)]
        repeated = [repetition(sample.text) for sample in samples]
        endings = [s.text for s, done in zip(samples, whole, strict=True) if done and self.accepts is not None]
        return {
            "log_likelihood": log_likelihood(model, [sample.ids for sample in samples], self.tokenizer.eot_id),
            "repetition": mean(value for value in repeated if math.isfinite(value)),
            "known_words": mean(known for sequence in found for known in self.known.knows_words(sequence)),
            "known_trigrams": mean(known for sequence in found for known in self.known.knows_trigrams(sequence)),
            "finished": mean(whole),
            "accepted": mean(self.accepts(text) for text in endings),
        }

    def sample(self, model: TransformerLM, num_samples: int, config: GenerateConfig) -> dict[str, float]:
        """Measures of `num_samples` documents sampled from `model`."""
        # the likeliest document is one and the same, however often it is sampled
        prompts = [""] * (1 if config.temperature == 0 else num_samples)
        return self.measure(model, generate_text(model, self.tokenizer, prompts, config))


def judge_of(data: PreparedData, max_tokens: int = 10_000_000) -> Judge:
    """The judge for a prepared corpus, by the first `max_tokens` of its training part.

    Of the embedded corpus the grammar decides whether it could have told a story.
    """
    known = KnownText(data.tokenizer.decode(data.train[:max_tokens].tolist()))
    return Judge(data.tokenizer, known, is_story if data.floor_nats_per_token is not None else None)


def is_story(text: str) -> bool:
    """Whether the grammar of the embedded corpus can produce `text`."""
    return math.isfinite(log_probability(text))


def measure_settings(
    judge: Judge,
    model: TransformerLM,
    temperatures: Sequence[float],
    top_ps: Sequence[float],
    num_samples: int,
    config: GenerateConfig,
) -> pd.DataFrame:
    """Measures of documents sampled at each temperature and top-p; the rest of the settings are those of `config`."""
    rows = []
    for temperature in temperatures:
        for top_p in top_ps:
            setting = replace(config, temperature=float(temperature), top_p=float(top_p))
            found = judge.sample(model, num_samples, setting)
            rows.append({"temperature": temperature, "top_p": top_p, **found})
    return pd.DataFrame(rows)


def measure_training(
    judge: Judge, run: RunFolder, num_samples: int, config: GenerateConfig, device: torch.device
) -> pd.DataFrame:
    """Measures of documents sampled from every state of a run that is kept: step 0, its checkpoints, the best."""
    rows = []
    for step, model in sorted(models_of(run, device).items()):
        rows.append({"step": step, **judge.sample(model, num_samples, config)})
    return pd.DataFrame(rows)


def models_of(run: RunFolder, device: torch.device) -> dict[int, TransformerLM]:
    """The models of a run by training step: as it was initialized, each checkpoint that is kept, and the best."""
    config, models = run.config(), {}
    with torch.random.fork_rng(devices=[]):  # building a model draws random numbers
        torch.manual_seed(config.seed)
        models[0] = TransformerLM(config.model).to(device)
        for path in run.checkpoints():
            content = read_checkpoint(path)
            models[content["iteration"]] = TransformerLM(config.model).to(device)
            models[content["iteration"]].load_state_dict(content["model"])
        _, notes = read_weights(run.best_weights)
        models[notes["step"]] = load_model(run.best_weights, device)
    return models


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table for a JSON file, with null for what could not be measured."""
    return table.astype(object).where(table.notna(), None).to_dict(orient="records")


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean; NaN of nothing."""
    values = list(values)
    return math.fsum(values) / len(values) if values else math.nan
