"""The embedded corpus: an unlimited stream of small children's stories whose true entropy is known.

Each story follows a grammar of our own. Names, pronouns, pets, lost toys and places are chosen once and recur until the
last sentence, so that a model has to look back; searches and outings have any number of steps. No story has two
derivations, so the entropy of a document in nats is exactly that of the grammar, and no language model, whatever its
tokenizer, can have a lower expected loss per token on whole documents than

    entropy per document / expected tokens per document (with <|endoftext|>).

Training and evaluation windows that start in the middle of a story hide its first words from the model, so the loss it
can attain on them lies above this floor: clearly so when the context is shorter than a story (about 70 words), and less
the more stories a window holds.

`Grammar` is any such grammar, with sampling, exact probabilities and exact entropy; `RULES` is that of the stories.
"""

import math
import random
import re
from bisect import bisect
from collections.abc import Iterator, Mapping
from itertools import accumulate, islice
from typing import NamedTuple

import numpy as np

from lmcore.text import END_OF_TEXT


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

        Weights are positive, and the recursion has to end: texts need a finite expected length.
        """
        self.start = start
        self.forms = forms or {}
        self.productions: dict[str, tuple[Production, ...]] = {}
        self._cumulative: dict[str, list[float]] = {}
        for symbol, weights in rules.items():
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
                        calls[index[symbol], index[part.symbol]] += math.exp(production.log_probability)
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


def words(text: str) -> dict[str, float]:
    """Rule of single words from `"word weight word weight …"`; an underscore stands for a space."""
    tokens = text.split()
    return {word.replace("_", " "): float(weight) for word, weight in zip(tokens[::2], tokens[1::2], strict=True)}


RULES: dict[str, dict[str, float]] = {
    "story": {"{opening} {friend} {plot} {ending}": 1},
    # who it is about
    "opening": {
        "Once upon a time there was a {trait} {child}.": 5,
        "There once was a {trait} {child} who lived {home}.": 2,
        "In a {size} house {home} lived a {trait} {child}.": 2,
    },
    "child": {"girl named {hero=girl}": 1, "boy named {hero=boy}": 1},
    "girl": words("Lily 6 Mia 4 Anna 3 Rosa 3 Nora 2 Ella 2 Ivy 1 Wanda 1"),
    "boy": words("Tom 6 Ben 5 Max 3 Sam 3 Leo 2 Oscar 1 Jack 2 Hugo 1"),
    "trait": words("little 8 kind 4 brave 3 clever 2 quiet 2 funny 1 curious 1"),
    "size": words("small 4 tiny 2 big 2 yellow 1"),
    "home": words("by_the_sea 3 near_the_forest 3 on_a_farm 2 on_a_hill 1"),
    "friend": {
        "{@hero.They} had a {coat} {pet=animal} called {pal=pet_name}.": 4,
        "{@hero.Their} best friend was a {coat} {pet=animal} called {pal=pet_name}.": 3,
        "Every day {@hero.they} played with a {coat} {pet=animal} called {pal=pet_name}.": 2,
    },
    "coat": words("brown 4 white 3 fluffy 2 black 2 gray 1"),
    "animal": words("dog 6 cat 5 rabbit 3 duck 2 pony 1 goat 1"),
    "pet_name": words("Spot 5 Coco 4 Momo 2 Pip 2 Biscuit 2 Pepper 1 Button 1"),
    "plot": {"{lost}": 4, "{outing}": 3, "{helping}": 3},
    "day": words("One_day 6 One_sunny_morning 3 After_lunch 2 On_a_windy_day 1"),
    # a toy is lost, looked for in any number of spots, and found
    "lost": {"{day}, {@hero} could not find {@hero.their} {color} {toy=toy}. {search} {discovery}": 1},
    "search": {"{look}": 5, "{look} {search}": 4},
    "look": {
        "{seeker} looked {spot}, but the {@toy} was not there.": 4,
        "{seeker} looked {spot} and found only a {junk}.": 2,
    },
    "seeker": {"{@hero}": 3, "{@pal}": 2},
    "spot": words("under_the_bed 5 behind_the_door 4 in_the_garden 3 inside_a_box 2 up_in_the_tree 1 by_the_pond 1"),
    "junk": words("sock 3 leaf 2 spoon 2 button 1"),
    "discovery": {
        "At last {@pal} ran to the {place} and came back with the {@toy}.": 3,
        'Then {parent} smiled and said, "{@hero}, here is your {@toy}!"': 3,
        "In the end the {@toy} was in {@hero.their} own bag all the time.": 1,
    },
    "color": words("red 6 blue 5 green 3 yellow 2 purple 1"),
    "toy": words("ball 6 car 3 kite 3 doll 2 boat 2 hat 2 drum 1"),
    "place": words("park 5 river 3 beach 3 market 2 barn 1 castle 1"),
    "parent": {"{@hero.their} mom": 5, "{@hero.their} dad": 4, "{@hero.their} grandma": 2},
    # an outing with any number of events
    "outing": {
        "{day}, {@hero} and {@pal} went to the {goal=place}. {events} "
        "When the sun went down, they waved goodbye to the {@goal}.": 1
    },
    "events": {"{event}": 5, "{event} {events}": 4},
    "event": {
        "They saw a {wonder} {sight} and {reaction}.": 4,
        "{@pal} wanted to {deed=deed}, so {@hero} began to {@deed} too.": 3,
        "{@hero} picked up a {wonder} {treasure=treasure} and {@pal} carried the {@treasure}.": 2,
    },
    "wonder": words("big 5 shiny 4 strange 2 golden 1"),
    "sight": words("bird 5 fish 4 frog 3 boat 2 rainbow 2 snake 1"),
    "reaction": {"laughed": 4, "stopped to look at it": 3, "said hello to it": 2, "sang a song for it": 1},
    "deed": words("jump 5 run 4 dance 3 swim 2 dig 2 climb 1"),
    "treasure": words("stone 5 shell 4 flower 3 feather 2 coin 1"),
    # somebody needs help
    "helping": {
        '{day}, {@hero} met a {mood} {other=other} at the {place}. "{trouble}," said the {@other}. {help} '
        "The {@other} {thanks}.": 1
    },
    "mood": words("sad 5 hungry 3 tired 2 scared 2"),
    "other": words("bear 5 fox 4 mouse 4 bird 3 turtle 2 squirrel 1"),
    "trouble": {
        "I have lost my way home": 4,
        "I have nothing to eat": 3,
        "I have no one to play with": 3,
        "My foot hurts so much": 1,
    },
    "help": {
        "{@hero} and {@pal} gave the {@other} some {food}.": 4,
        "{@pal} sat down beside the {@other}, and {@hero} shared {@hero.their} {food}.": 2,
        '"Do not worry," said {@hero}, and {@hero.they} took the {@other} home to {parent}.': 3,
    },
    "food": words("bread 4 cake 4 soup 2 cheese 2 honey 1"),
    "thanks": {"said thank you": 5, "smiled at {@hero.them}": 3, "gave {@hero.them} a {wonder} {treasure}": 2},
    # how it ends
    "ending": {
        "{@hero} hugged {@pal} and felt very {feeling}.": 4,
        '"You are the best {@pet} in the world," said {@hero} to {@pal}.': 3,
        "That night {@hero} told {parent} all about it. {sleep}": 3,
        "{@hero} learned that it is good to {lesson}.": 2,
    },
    "feeling": words("happy 6 proud 3 glad 2 warm 1"),
    "sleep": {
        "Then {@hero.they} fell asleep with {@pal} by {@hero.their} side.": 3,
        '"Good night, {@hero}. Good night, {@pal}."': 2,
    },
    "lesson": {"share": 4, "help others": 3, "be kind": 3, "never give up": 2, "listen to {parent}": 1},
}
"""Productions and weights. `{x}` expands x, `{hero=girl}` also remembers it, `{@hero.they}` is its pronoun."""

SHE = {"They": "She", "they": "she", "them": "her", "their": "her", "Their": "Her"}
HE = {"They": "He", "they": "he", "them": "him", "their": "his", "Their": "His"}
PRONOUNS = dict.fromkeys(RULES["girl"], SHE) | dict.fromkeys(RULES["boy"], HE)

STORIES = Grammar(RULES, start="story", forms=PRONOUNS)
"""The grammar of the embedded corpus."""


def sample_stories(seed: int, split: str = "train") -> Iterator[tuple[str, float]]:
    """Endless stories with their log-probabilities in nats; each (seed, split) is an independent stream."""
    # a string seed is hashed by SHA-512, the same on every platform and version
    rng = random.Random(f"lmcore stories {seed} {split}")
    while True:
        yield STORIES.sample(rng)


def stories(seed: int, split: str = "train") -> Iterator[str]:
    """Endless stories, without `<|endoftext|>`; the same (seed, split) gives the same ones."""
    return (story for story, _ in sample_stories(seed, split))


def story_text(num_documents: int, seed: int, split: str = "train") -> str:
    """The first `num_documents` stories as one text, each followed by a line `<|endoftext|>`."""
    return "".join(f"{story}\n{END_OF_TEXT}\n" for story in islice(stories(seed, split), num_documents))


def entropy_per_document() -> float:
    """Exact entropy of one story in nats."""
    return STORIES.entropy()


def log_probability(story: str) -> float:
    """Natural logarithm of the exact probability of `story`; minus infinity if the grammar cannot produce it."""
    return STORIES.log_probability(story)


def floor_nats_per_token(tokens_per_document: float) -> float:
    """Lowest expected loss of any model: entropy of a story over its expected tokens, `<|endoftext|>` included.

    Stories are independent, so this ratio is the entropy rate of the endless token stream (renewal theorem).
    """
    return entropy_per_document() / tokens_per_document
