"""The embedded corpus: an endless stream of small children's stories whose true entropy is known.

Each story follows the grammar in stories.toml. Names, pronouns, pets, lost toys and places are chosen once and recur
until the last sentence, so that a model has to look back. No story has two derivations, so the entropy of a document is
exactly that of the grammar, and no language model, whatever its tokenizer, can have a lower expected loss per token on
whole documents, nor on the stream of them, than

    entropy per document / expected tokens per document (with `<|endoftext|>`).

Windows that start in the middle of a story hide its first words, so the loss that a model can attain on them is higher:
clearly so when the context is shorter than a story (about 70 words).
"""

import math
import random
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Call(NamedTuple):
    """`{symbol}` or `{name=symbol}`: expand `symbol`, and remember the text it became as `name`."""

    symbol: str
    name: str


class Recall(NamedTuple):
    """`{@name}` or `{@name.form}`: the remembered text, or a form of it such as its pronoun."""

    name: str
    form: str


Parts = tuple[str | Call | Recall, ...]


def parse_production(text: str) -> Parts:
    """`"a {color} {toy=noun}"` as literal text and slots."""
    parts: list[str | Call | Recall] = []
    for part in re.split(r"(\{[^}]+\})", text):
        if part.startswith("{@"):
            name, _, form = part[2:-1].partition(".")
            parts.append(Recall(name, form))
        elif part.startswith("{"):
            name, _, symbol = part[1:-1].rpartition("=")
            parts.append(Call(symbol, name))
        elif part:
            parts.append(part)
    return tuple(parts)


class Grammar:
    """A probabilistic grammar whose expansions may be remembered and repeated later in the text.

    Which production is chosen never depends on what is remembered: memory only copies text. The entropy of a
    derivation is therefore that of the context-free grammar underneath, and equals the entropy of the *text* as long
    as no text has two derivations.
    """

    def __init__(self, rules: Mapping[str, Mapping[str, float]], start: str, forms: Mapping[str, Mapping[str, str]]):
        """`rules[symbol]` maps productions to weights; `forms[text][form]` gives the forms that `{@name.form}` uses.

        Weights are positive, and the recursion has to end: texts need a finite expected length.
        """
        self.start, self.forms = start, forms
        self.productions = {
            symbol: [(weight / sum(weights.values()), parse_production(text)) for text, weight in weights.items()]
            for symbol, weights in rules.items()
        }

    def entropy(self) -> float:
        """Entropy of one derivation from the start symbol, in nats; exact up to rounding.

        The entropy h(A) of a symbol is that of its choice plus that of all it calls, h = c + M h with M the expected
        calls, which is a linear system (Grenander, *Syntax-controlled probabilities*, 1967).
        """
        index = {symbol: number for number, symbol in enumerate(self.productions)}
        choices, calls = np.zeros(len(index)), np.zeros((len(index), len(index)))
        for symbol, productions in self.productions.items():
            for probability, parts in productions:
                choices[index[symbol]] -= probability * math.log(probability)
                for part in parts:
                    if isinstance(part, Call):
                        calls[index[symbol], index[part.symbol]] += probability
        return float(np.linalg.solve(np.eye(len(index)) - calls, choices)[index[self.start]])

    def sample(self, rng: random.Random) -> str:
        """A random text."""
        memory: dict[str, str] = {}

        def expand(symbol: str) -> str:
            productions = self.productions[symbol]
            ((_, parts),) = rng.choices(productions, [probability for probability, _ in productions])
            text = ""
            for part in parts:
                if isinstance(part, Call):
                    memory[part.name] = piece = expand(part.symbol)
                else:
                    piece = self.literal(part, memory)
                text += piece
            return text

        return expand(self.start)

    def literal(self, part: str | Recall, memory: dict[str, str]) -> str:
        """The text that a part stands for."""
        if isinstance(part, str):
            return part
        text = memory[part.name]
        return self.forms[text][part.form] if part.form else text


RULES: dict[str, dict[str, float]] = tomllib.loads(Path(__file__).with_name("stories.toml").read_text(encoding="utf-8"))
"""Productions and weights of the stories."""

SHE = {"They": "She", "they": "she", "them": "her", "their": "her", "Their": "Her"}
HE = {"They": "He", "they": "he", "them": "him", "their": "his", "Their": "His"}
PRONOUNS = dict.fromkeys(RULES["girl"], SHE) | dict.fromkeys(RULES["boy"], HE)

STORIES = Grammar(RULES, start="story", forms=PRONOUNS)
"""The grammar of the embedded corpus."""

entropy_per_document = STORIES.entropy


def stories(seed: int, split: str = "train") -> Iterator[str]:
    """Endless stories, without `<|endoftext|>`; each (seed, split) is an independent stream, always the same."""
    # a string seed is hashed by SHA-512, the same on every platform and version
    rng = random.Random(f"lmcore stories {seed} {split}")
    while True:
        yield STORIES.sample(rng)
