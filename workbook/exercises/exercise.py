"""An exercise: what is asked, the right answer, the inputs on which both are compared, and usual mistakes."""

import copy
import inspect
import linecache
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

EXERCISES: dict[str, "Exercise"] = {}
"""All exercises by name; those of a notebook stand in the order of its text."""

MISTAKES = yaml.safe_load((Path(__file__).parent / "mistakes.yaml").read_text(encoding="utf-8"))

Solution = Callable[..., Any]

_generator = torch.Generator()


@dataclass(frozen=True)
class Exercise:
    """A function or a class that a reader writes, or a number that a reader works out."""

    name: str
    notebook: str
    """"01_build"."""
    answer: Any
    """The library's function or a short one of a chapter, a class, or a tuple of both; of a question, the number."""
    cases: Callable[[], Sequence[tuple]]
    """Makes the arguments of each comparison, always the same."""
    names: Mapping[str, Any]
    """What the chapter's module knows."""
    avoid: tuple[str, ...] = ()
    """Names of functions that would be the exercise itself, "softmax"; the library is always one."""
    use: Callable[..., Any] = field(default=lambda solution, *arguments: solution(*arguments))
    """What is done with a solution and the arguments of a case, where it is more than a call."""
    tolerance: float = 1e-5
    """Largest relative difference, and the largest absolute one next to zero."""
    seconds: float = 20.0
    """Time that all cases may take."""
    dtypes: tuple[torch.dtype, ...] = ()
    """Types in which the first case is compared once more; in bfloat16 with a tolerance of 0.05."""

    @cached_property
    def mistakes(self) -> dict[str, Any]:
        """The function, or the number, that makes each usual mistake, by the sentence that tells it (mistakes.yaml)."""
        return {sentence: self._of_mistake(wrong) for sentence, wrong in MISTAKES[self.name].items()}

    @cached_property
    def expected(self) -> list[Any]:
        """What the answer makes of each case."""
        return self.outcomes(self.answer)

    def _of_mistake(self, wrong: Any) -> Any:
        slips = wrong if isinstance(wrong, list) else [str(wrong)]
        return slipped(self.answer, slips) if "=>" in slips[0] else eval(slips[0], {**self.names})

    @property
    def is_question(self) -> bool:
        """Whether a number is asked for, not a function."""
        return isinstance(self.answer, int | float)

    def inputs(self) -> list[tuple]:
        """The arguments of each case, always the same; tensors of several cases are not shared."""
        _generator.manual_seed(0)
        cases = copy.deepcopy([*self.cases()])
        others = [tuple(converted(value, dtype) for value in cases[0]) for dtype in self.dtypes]
        return cases + others

    def outcomes(self, solution: Solution) -> list[Any]:
        """What a solution makes of each case."""
        return self.of_inputs(solution, self.inputs())

    def of_inputs(self, solution: Solution, inputs: Sequence[tuple]) -> list[Any]:
        """What a solution makes of these arguments; PyTorch's random state stays as it was."""
        with torch.random.fork_rng(devices=[]):
            return [self.use(solution, *arguments) for arguments in inputs]

    def differences(self, found: Sequence[Any], expected: Sequence[Any]) -> list[str | None]:
        """How each outcome differs from what was expected, in a sentence; None where they agree."""
        tolerances = [self.tolerance] * len(expected)
        for place, dtype in enumerate(reversed(self.dtypes), start=1):
            tolerances[-place] = 0.05 if dtype == torch.bfloat16 else self.tolerance
        return [difference(*pair) for pair in zip(found, expected, tolerances, strict=True)]


def exercise(cases: Any = ((),), *, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
    """A decorator that adds its function or class to `EXERCISES`, by its name where no other is given.

    `cases` is a function that makes them or, of plain values, the cases; `options` are fields of `Exercise`.
    """

    def add(answer: Any) -> Any:
        key = name or answer.__name__
        assert key not in EXERCISES, key
        made = cases if callable(cases) else lambda: cases
        EXERCISES[key] = Exercise(key, answer=answer, cases=made, **options)
        return answer

    return add


def slipped(answer: Any, slips: Sequence[str]) -> Any:
    """The function or class, or the last one of a tuple, whose source has other texts: each slip is "old => new".

    Raises `ValueError` where a text does not stand there exactly once.
    """
    if isinstance(answer, tuple):
        return (*answer[:-1], slipped(answer[-1], slips))
    source = re.search(r"^(def|class) .*", inspect.getsource(answer), re.DOTALL | re.MULTILINE)[0]
    for slip in slips:
        old, new = (text.removesuffix(" ").removeprefix(" ") for text in slip.split("=>"))
        if source.count(old) != 1:
            raise ValueError(f"{old!r} stands {source.count(old)} times in {answer.__name__}, not once.")
        source = source.replace(old, new)
    return defined(source, answer.__name__, vars(sys.modules[answer.__module__]))


def defined(source: str, name: str, names: Mapping[str, Any]) -> Any:
    """The function or class `name` that the source defines, where it knows `names`; `inspect` finds the source."""
    file, scope = f"<{name} {hash(source)}>", dict(names)
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), scope)
    return scope[name]


def codes(answer: Any) -> set[CodeType]:
    """The code of a function, of a class's methods, of what a partial calls, or of several of them."""
    if isinstance(answer, tuple):
        return set().union(*map(codes, answer))
    if isinstance(answer, partial):
        return codes(answer.func)
    functions = vars(answer).values() if isinstance(answer, type) else [answer]
    return {function.__code__ for function in functions if isinstance(function, FunctionType)}


def difference(found: Any, expected: Any, tolerance: float) -> str | None:
    """How what was found differs from what was expected, in a sentence; None where they agree."""
    if isinstance(expected, Tensor):
        if not isinstance(found, Tensor):
            return f"The result is a {type(found).__name__}, not a tensor."
        if found.dtype != expected.dtype and found.shape == expected.shape:
            return f"The result is {found.dtype}, not {expected.dtype}.".replace("torch.", "")
        return _of_numbers(found.detach().double().numpy(), expected.detach().double().numpy(), tolerance)
    if isinstance(expected, bool | str | bytes | None):
        same = type(found) is type(expected) and found == expected
        return None if same else f"{_shown(found)}, not {_shown(expected)}."
    if isinstance(expected, int | float | np.ndarray):
        if not isinstance(found, int | float | np.ndarray | np.generic | Tensor):
            return f"The result is a {type(found).__name__}, not a number."
        return _of_numbers(np.asarray(found, float), np.asarray(expected, float), tolerance)
    if isinstance(expected, Mapping):
        if not isinstance(found, Mapping) or found.keys() != expected.keys():
            return f"The result is {_shown(found)}, where the keys are {', '.join(map(str, expected))}."
        parts = ((name, difference(found[name], expected[name], tolerance)) for name in expected)
        return next((f"{name}: {words}" for name, words in parts if words), None)
    if isinstance(expected, Sequence):
        if not isinstance(found, Sequence):
            return f"The result is a {type(found).__name__}, not a {type(expected).__name__}."
        parts = ((i, difference(*pair, tolerance)) for i, pair in enumerate(zip(found, expected, strict=False)))
        first = next((f"Item {index}: {words}" for index, words in parts if words), None)
        short = f"The result has {len(found)} items, not {len(expected)}."
        return first or (None if len(found) == len(expected) else short)
    return None if found == expected else f"{_shown(found)}, not {_shown(expected)}."


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


def largest_error(found: Any, expected: Any) -> float:
    """Largest absolute difference of all numbers in two results of one form."""
    if isinstance(expected, Mapping):
        return max((largest_error(found[name], expected[name]) for name in expected), default=0.0)
    if isinstance(expected, Tensor | int | float):
        apart = torch.as_tensor(found).double() - torch.as_tensor(expected).double()
        return float(apart.abs().max()) if apart.numel() else 0.0
    if isinstance(expected, Sequence) and not isinstance(expected, str | bytes):
        return max((largest_error(*pair) for pair in zip(found, expected, strict=True)), default=0.0)
    return 0.0


def converted(value: Any, dtype: torch.dtype = torch.float64) -> Any:
    """A tensor of floating-point numbers in this type; anything else as it is."""
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """The next normal random numbers of a case: each time the cases are made they are the same."""
    return (scale * torch.randn(shape, generator=_generator)).to(dtype)
