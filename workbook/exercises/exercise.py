"""An exercise: what is asked, the right answer, the inputs on which both are compared, and usual mistakes."""

import copy
import inspect
import linecache
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

EXERCISES: dict[str, "Exercise"] = {}
"""All exercises by name, in the order of the notebooks."""


_generator = torch.Generator()


@dataclass(frozen=True)
class Exercise:
    """A function or a class that a reader writes, or a number that a reader works out; catalogue.yaml says how."""

    name: str
    notebook: str
    """"01_build"."""
    names: dict[str, Any]
    """What the Python in the catalogue knows: the chapter's functions, and more."""
    wrong: Mapping[str, Any]
    """The catalogue's mistakes."""
    answer: Any
    """The library's function or the notebook's: a function, a class, or a tuple; of a question, the number."""
    source: str
    """The notebook's solution, where that is the answer; else nothing."""
    expression: str
    """What is checked in the notebook: Python that is the answer where `source` was executed."""
    use: Callable[..., Any]
    cases: str = "()"
    avoid: tuple[str, ...] = ()
    tolerance: float = 1e-5
    seconds: float = 20.0
    dtypes: tuple[torch.dtype, ...] = ()

    @classmethod
    def of_entry(
        cls, name: str, notebook: str, names: dict[str, Any], entry: Mapping[str, Any], solution: Sequence[str]
    ) -> "Exercise":
        """The exercise that the catalogue's entry describes; without an answer there, the notebook's `solution` is it.

        `solution` has source and expression; the source is executed in `names`, where later solutions find it.
        """
        values = {key: value for key, value in entry.items() if key != "mistakes"}
        values["source"], expression = ("", entry["answer"]) if "answer" in entry else solution
        values["answer"] = executed(values["source"], names, str(expression))
        values["expression"] = str(expression)
        values["use"] = eval(entry.get("use", "lambda solution, *arguments: solution(*arguments)"), names)
        values |= {key: float(entry[key]) for key in ("tolerance", "seconds") if key in entry}
        values["avoid"] = tuple(entry.get("avoid", "").split())
        values["dtypes"] = tuple(getattr(torch, dtype) for dtype in entry.get("dtypes", "").split())
        return cls(name, notebook, names, entry["mistakes"], **values)

    @cached_property
    def mistakes(self) -> dict[str, Any]:
        """The function, or the number, that makes each usual mistake, by the sentence that tells it."""
        return {sentence: self._of_mistake(wrong) for sentence, wrong in self.wrong.items()}

    def _of_mistake(self, wrong: Any) -> Any:
        slips = wrong if isinstance(wrong, list) else [str(wrong)]
        if "=>" not in slips[0]:
            return eval(slips[0], self.names)
        if self.source:
            return executed(slipped(self.source, slips), dict(self.names), self.expression)
        source = re.search(r"^(def|class) .*", inspect.getsource(self.answer), re.DOTALL | re.MULTILINE)[0]
        names = self.names | vars(sys.modules[self.answer.__module__])
        return executed(slipped(source, slips), names, self.answer.__name__)

    @cached_property
    def expected(self) -> list[Any]:
        """What the answer makes of each case."""
        return self.of_inputs(self.answer, self.inputs())

    @property
    def is_question(self) -> bool:
        """Whether a number is asked for, not a function."""
        return isinstance(self.answer, int | float)

    def inputs(self) -> list[tuple]:
        """The arguments of each case, always the same."""
        _generator.manual_seed(0)
        cases = copy.deepcopy(eval(f"[{self.cases}]", self.names))
        return cases + [tuple(converted(value, dtype) for value in cases[0]) for dtype in self.dtypes]

    def of_inputs(self, solution: Callable, inputs: Sequence[tuple]) -> list[Any]:
        """What a solution makes of these arguments; PyTorch's random state stays as it was."""
        if self.is_question:
            return [solution]
        with torch.random.fork_rng(devices=[]):
            return [self.use(solution, *arguments) for arguments in inputs]

    def differences(self, found: Sequence[Any], expected: Sequence[Any]) -> list[str | None]:
        """How each outcome differs from what was expected, in a sentence; None where they agree."""
        dtypes = [None] * (len(expected) - len(self.dtypes)) + [*self.dtypes]
        tolerances = [0.05 if dtype == torch.bfloat16 else self.tolerance for dtype in dtypes]
        return [difference(*pair) for pair in zip(found, expected, tolerances, strict=True)]


def slipped(source: str, slips: Sequence[str]) -> str:
    """The source with other texts in it: each slip is "old => new".

    Raises `ValueError` where a text does not stand there exactly once.
    """
    for slip in slips:
        old, new = (text.removesuffix(" ").removeprefix(" ") for text in slip.split("=>"))
        if source.count(old) != 1:
            raise ValueError(f"{old!r} stands {source.count(old)} times in this source, not once:\n{source}")
        source = source.replace(old, new)
    return source


def executed(source: str, names: dict[str, Any], expression: str) -> Any:
    """What `expression` is where the source was executed, with and in `names`; `inspect` finds the source."""
    file = f"<{expression} {hash(source)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), names)
    return eval(expression, names)


def places(answer: Any) -> set[tuple[str, int]]:
    """File and first line of a function, of all methods of a class, of what a partial calls, or of several of them.

    Where code is tells whose it is: a reader may write, word for word, what the answer is.
    """
    if isinstance(answer, tuple):
        return set().union(*map(places, answer))
    if isinstance(answer, partial):
        return places(answer.func)
    if isinstance(answer, type):
        return set().union(*(places(method) for base in answer.__mro__ for method in vars(base).values()))
    function = getattr(answer, "__func__", answer)
    code = function.__code__ if isinstance(function, FunctionType) else None
    return {(code.co_filename, code.co_firstlineno)} if code else set()


def difference(found: Any, expected: Any, tolerance: float) -> str | None:
    """How what was found differs from what was expected, in a sentence; None where they agree."""
    found = found.item() if isinstance(found, np.bool_) else found
    found = found.detach().cpu() if isinstance(found, Tensor) else found
    if isinstance(expected, Tensor):
        if not isinstance(found, Tensor):
            return f"The result is a {type(found).__name__}, not a tensor."
        if found.dtype != expected.dtype and found.shape == expected.shape:
            return f"The result is {found.dtype}, not {expected.dtype}.".replace("torch.", "")
        return _of_numbers(found.double().numpy(), expected.detach().double().numpy(), tolerance)
    if isinstance(expected, int | float | np.ndarray) and not isinstance(expected, bool):
        if not isinstance(found, int | float | np.ndarray | np.generic | Tensor):
            return f"The result is a {type(found).__name__}, not a number."
        number = found.tolist() if isinstance(found, Tensor) else found  # numpy has no bfloat16
        return _of_numbers(np.asarray(number, float), np.asarray(expected, float), tolerance)
    if isinstance(expected, Mapping):
        if not isinstance(found, Mapping) or found.keys() != expected.keys():
            return f"The result is {_shown(found)}, where the keys are {', '.join(map(str, expected))}."
        parts = ((name, difference(found[name], expected[name], tolerance)) for name in expected)
        return next((f"{name}: {words}" for name, words in parts if words), None)
    if isinstance(expected, Sequence) and not isinstance(expected, str | bytes):
        if not isinstance(found, Sequence):
            return f"The result is a {type(found).__name__}, not a {type(expected).__name__}."
        parts = ((i, difference(*pair, tolerance)) for i, pair in enumerate(zip(found, expected, strict=False)))
        first = next((f"Item {index}: {words}" for index, words in parts if words), None)
        short = f"The result has {len(found)} items, not {len(expected)}."
        return first or (None if len(found) == len(expected) else short)
    same = type(found) is type(expected) and found == expected
    return None if same else f"{_shown(found)}, not {_shown(expected)}."


def _of_numbers(found: np.ndarray, expected: np.ndarray, tolerance: float) -> str | None:
    """The first number that is not within the tolerance."""
    if found.shape != expected.shape:
        return f"The result has the shape {found.shape}, not {expected.shape}."
    close = np.isclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    if close.all():
        return None
    place = tuple(int(i) for i in np.argwhere(~close)[0])
    at = f" at {list(place)}" if place else ""
    return f"The result is {found[place]:.6g}{at}, not {expected[place]:.6g}."


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}…"


def converted(value: Any, dtype: torch.dtype) -> Any:
    """A tensor of floating-point numbers in this type; anything else as it is."""
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """The next normal random numbers of a case: each time the cases are made they are the same."""
    return (scale * torch.randn(shape, generator=_generator)).to(dtype)
