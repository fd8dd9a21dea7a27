"""The embedded corpus: one derivation for each story, exact probabilities, exact entropy."""

import math
import re
from itertools import islice, product

from hypothesis import given, settings
from hypothesis import strategies as st

from lmcore.data.grammar import PRONOUNS, RULES, STORIES, Call, Grammar, stories


def log_probabilities(grammar, text):
    """Log-probability, in nats, of each derivation of `text`; nothing if the grammar cannot produce it."""

    def match(parts, start, memory):
        """All ways to read `parts` from `start`: where it ends, what is then remembered, log-probability."""
        if not parts:
            yield start, memory, 0.0
            return
        part, others = parts[0], parts[1:]
        if not isinstance(part, Call):
            literal = grammar.literal(part, memory)
            if text.startswith(literal, start):
                yield from match(others, start + len(literal), memory)
            return
        for probability, called in grammar.productions[part.symbol]:
            for end, after, inner in match(called, start, memory):
                for last, final, rest in match(others, end, after | {part.name: text[start:end]}):
                    yield last, final, math.log(probability) + inner + rest

    return [p for end, _, p in match((Call(grammar.start, ""),), 0, {}) if end == len(text)]


def expansions(rules, symbol="story"):
    """All (text with recalls unresolved, probability) of `symbol`, by a direct expansion that shares no code."""
    total = sum(rules[symbol].values())
    for production, weight in rules[symbol].items():
        parts = re.split(r"(\{[^@}]*\})", production)
        choices = []
        for part in parts:
            if not part.startswith("{") or part.startswith("{@"):
                choices.append([(part, 1.0)])
                continue
            name, _, called = part[1:-1].rpartition("=")
            choices.append([(f"<{name}:{text}>" if name else text, p) for text, p in expansions(rules, called)])
        for chosen in product(*choices):
            yield "".join(text for text, _ in chosen), weight / total * math.prod(p for _, p in chosen)


def resolve(text):
    """Puts remembered texts in their places, from left to right."""
    memory, out = {}, ""
    for part in re.split(r"(<\w+:\w[\w ]*>|\{@\w+(?:\.\w+)?\})", text):
        if part.startswith("<"):
            name, _, part = part[1:-1].partition(":")
            memory[name] = part
        elif part.startswith("{@"):
            name, _, form = part[2:-1].partition(".")
            part = PRONOUNS[memory[name]][form] if form else memory[name]
        out += part
    return out


def reduced(draw_choice, max_texts=3000):
    """The story rules without recursion, with alternatives removed until few enough texts are left to list."""
    rules = {
        symbol: {text: weight for text, weight in weights.items() if f"{{{symbol}}}" not in text}
        for symbol, weights in RULES.items()
    }
    while count(rules, "story") > max_texts:
        symbol = draw_choice(sorted(symbol for symbol in rules if len(rules[symbol]) > 1))
        del rules[symbol][draw_choice(sorted(rules[symbol]))]
    return rules


def count(rules, symbol):
    """Number of derivations of `symbol`."""
    return sum(
        math.prod(count(rules, called) for called in re.findall(r"\{(?:\w+=)?(\w+)\}", production))
        for production in rules[symbol]
    )


@settings(max_examples=10, deadline=None)
@given(st.randoms(use_true_random=False))
def test_sub_grammars_are_unambiguous_and_exact(chooser):
    """Listed in full: no text twice, probabilities sum to 1, entropy and log-probabilities as computed."""
    rules = reduced(chooser.choice)
    grammar = Grammar(rules, "story", PRONOUNS)
    listed = [(resolve(text), p) for text, p in expansions(rules)]
    assert len({text for text, _ in listed}) == len(listed) == count(rules, "story")
    assert math.isclose(sum(p for _, p in listed), 1)
    assert math.isclose(-sum(p * math.log(p) for _, p in listed), grammar.entropy(), rel_tol=1e-9)
    for text, p in chooser.sample(listed, min(50, len(listed))):
        assert math.isclose(*log_probabilities(grammar, text), math.log(p), rel_tol=1e-9)


def test_each_sampled_story_has_one_derivation():
    for story in islice(stories(seed=3), 200):
        assert len(log_probabilities(STORIES, story)) == 1
        assert len(set(re.findall(r"\w+", story)) & PRONOUNS.keys()) == 1  # one hero
        for other in (story + " And then?", story[:-1], story.replace("e", "x")):
            assert not log_probabilities(STORIES, other)


def test_an_ambiguous_grammar_is_noticed():
    """The check above can fail: two derivations give two values."""
    grammar = Grammar({"s": {"{a}{a}": 1}, "a": {"x": 1, "xx": 1}}, "s", {})
    assert len(log_probabilities(grammar, "xxx")) == 2


def test_entropy_of_recursion_in_closed_form():
    """A geometric number of coins: H(stop)/p for the length plus E[length] coins."""
    grammar = Grammar({"s": {"{coin}": 1, "{coin}{s}": 3}, "coin": {"h": 1, "t": 1}}, "s", {})
    choice = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert math.isclose(grammar.entropy(), 4 * (choice + math.log(2)))


def test_stories_are_seeded_streams():
    first, again, other, valid = (
        list(islice(stories(seed, split), 500))
        for seed, split in ((7, "train"), (7, "train"), (8, "train"), (7, "valid"))
    )
    assert first == again
    assert len({*first, *other, *valid}) == 3 * 500
