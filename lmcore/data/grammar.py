"""Probabilistic context-free grammars with memory: sampling, exact probability of a text, exact entropy."""

import math
import random
import re
from bisect import bisect
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from lmcore.errors import require


class Call(NamedTuple):
    """`{symbol}` or `{name=symbol}`: expand `symbol`, and remember the text it became as `name`."""

    symbol: str
    name: str | None


class Recall(NamedTuple):
    """`{@name}` or `{@name.form}`: the remembered text, or a form of it such as its pronoun."""

    name: str
    form: str | None


class Production(NamedTuple):
    """One way to expand a symbol."""

    log_probability: float
    parts: tuple[str | Call | Recall, ...]


SLOT = re.compile(r"\{(?:@(?P<recall>\w+)(?:\.(?P<form>\w+))?|(?:(?P<name>\w+)=)?(?P<symbol>\w+))\}")


def parse_production(production: str) -> tuple[str | Call | Recall, ...]:
    """`"a {color} {toy=noun}"` as literal text and slots."""
    parts: list[str | Call | Recall] = []
    end = 0
    for match in SLOT.finditer(production):
        parts.append(production[end : match.start()])
        end = match.end()
        if match["recall"]:
            parts.append(Recall(match["recall"], match["form"]))
        else:
            parts.append(Call(match["symbol"], match["name"]))
    parts.append(production[end:])
    return tuple(part for part in parts if part != "")


class Grammar:
    """A probabilistic grammar whose expansions may be remembered and repeated later in the text.

    Which production is chosen never depends on what is remembered: memory only copies text. The entropy of a
    derivation is therefore that of the context-free grammar underneath, and equals the entropy of the *text* as long
    as no text has two derivations (`log_probabilities` yields one value for each derivation, so this can be tested).
    """

    def __init__(
        self,
        rules: Mapping[str, Mapping[str, float]],
        start: str,
        forms: Mapping[str, Mapping[str, str]] | None = None,
    ):
        """`rules[symbol]` maps productions to weights; `forms[text][form]` gives the forms that `{@name.form}` uses.

        Raises `UserError` if a symbol has no rule, a weight is not positive, or texts have no finite expected length.
        """
        require(start in rules, f"The grammar has no rule for its start symbol {start!r}.")
        self.start = start
        self.forms = {text: dict(forms_of_text) for text, forms_of_text in (forms or {}).items()}
        self.productions: dict[str, tuple[Production, ...]] = {}
        self._cumulative: dict[str, list[float]] = {}
        for symbol, weights in rules.items():
            require(
                bool(weights) and all(weight > 0 for weight in weights.values()),
                f"Every production of {symbol!r} needs a positive weight.",
            )
            total = sum(weights.values())
            self.productions[symbol] = tuple(
                Production(math.log(weight / total), parse_production(text)) for text, weight in weights.items()
            )
            self._cumulative[symbol] = [weight / total for weight in accumulate(weights.values())]
        self._calls = self._expected_calls()

    def _expected_calls(self) -> np.ndarray:
        """Matrix of the expected number of times that each symbol (row) calls each symbol (column)."""
        index = {symbol: i for i, symbol in enumerate(self.productions)}
        calls = np.zeros((len(index), len(index)))
        for symbol, productions in self.productions.items():
            for production in productions:
                for part in production.parts:
                    if isinstance(part, Call):
                        require(part.symbol in index, f"The grammar has no rule for {part.symbol!r}, in {symbol!r}.")
                        calls[index[symbol], index[part.symbol]] += math.exp(production.log_probability)
        require(
            max(abs(np.linalg.eigvals(calls))) < 1,
            "The grammar's recursion does not end: lower the weight of the productions that call themselves.",
        )
        return calls

    def entropy(self) -> float:
        """Entropy of one derivation from the start symbol, in nats; exact up to rounding.

        The entropy h(A) of a symbol is that of its choice plus that of all it calls, h = c + M h with M the expected
        calls, which is a linear system (Grenander, *Syntax-controlled probabilities*, 1967).
        """
        choices = [
            -sum(math.exp(production.log_probability) * production.log_probability for production in productions)
            for productions in self.productions.values()
        ]
        entropies = np.linalg.solve(np.eye(len(choices)) - self._calls, np.array(choices))
        return float(entropies[list(self.productions).index(self.start)])

    def sample(self, rng: random.Random) -> tuple[str, float]:
        """A random text and the natural logarithm of the probability of its derivation."""
        pieces: list[str] = []
        memory: dict[str, str] = {}

        def expand(symbol: str) -> float:
            production = self.productions[symbol][bisect(self._cumulative[symbol], rng.random())]
            log_probability = production.log_probability
            for part in production.parts:
                if isinstance(part, str):
                    pieces.append(part)
                elif isinstance(part, Recall):
                    pieces.append(self._recall(part, memory))
                else:
                    first = len(pieces)
                    log_probability += expand(part.symbol)
                    if part.name:
                        memory[part.name] = "".join(pieces[first:])
            return log_probability

        log_probability = expand(self.start)
        return "".join(pieces), log_probability

    def log_probabilities(self, text: str) -> Iterator[float]:
        """Log-probability, in nats, of each derivation of `text`; nothing if the grammar cannot produce it."""
        for end, _, log_probability in self._match(Call(self.start, None), text, 0, {}):
            if end == len(text):
                yield log_probability

    def log_probability(self, text: str) -> float:
        """Natural logarithm of the exact probability of `text`; minus infinity if the grammar cannot produce it."""
        derivations = list(self.log_probabilities(text))
        return float(np.logaddexp.reduce(derivations)) if derivations else -math.inf

    def _recall(self, part: Recall, memory: dict[str, str]) -> str:
        text = memory[part.name]
        return self.forms[text][part.form] if part.form else text

    def _match(
        self, call: Call, text: str, start: int, memory: dict[str, str]
    ) -> Iterator[tuple[int, dict[str, str], float]]:
        """All ways to read `call` in `text` from `start`: where it ends, what is then remembered, log-probability."""
        for production in self.productions[call.symbol]:
            for end, after, log_probability in self._match_parts(production.parts, 0, text, start, memory):
                if call.name:
                    after = after | {call.name: text[start:end]}
                yield end, after, production.log_probability + log_probability

    def _match_parts(
        self, parts: tuple[str | Call | Recall, ...], index: int, text: str, position: int, memory: dict[str, str]
    ) -> Iterator[tuple[int, dict[str, str], float]]:
        while index < len(parts) and not isinstance(part := parts[index], Call):
            literal = self._recall(part, memory) if isinstance(part, Recall) else part
            if not text.startswith(literal, position):
                return
            position += len(literal)
            index += 1
        if index == len(parts):
            yield position, memory, 0.0
            return
        for end, after, log_probability in self._match(parts[index], text, position, memory):
            for last, final, rest in self._match_parts(parts, index + 1, text, end, after):
                yield last, final, log_probability + rest
