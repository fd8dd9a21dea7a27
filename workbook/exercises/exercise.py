"""An exercise: what is asked, the library's answer, the inputs on which both are compared, and usual mistakes."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

EXERCISES: dict[str, "Exercise"] = {}
"""All exercises by name, in the order of the notebooks."""

Solution = Callable[..., Any]

_generator = torch.Generator()


@dataclass(frozen=True)
class Exercise:
    """A function or a class that a reader writes, or a number that a reader works out."""

    name: str
    notebook: str
    """"01_build"."""
    answer: Any
    """The library's own function; of a question, the number."""
    cases: Callable[[], Sequence[tuple]]
    """Makes the arguments of each comparison, always the same."""
    mistakes: Mapping[str, Any]
    """A sentence for each usual mistake, with the function, or the number, that makes it."""
    avoid: tuple[str, ...] = ()
    """Names of functions that would be the exercise itself, "softmax"; the library is always one."""
    use: Callable[..., Any] = field(default=lambda solution, *arguments: solution(*arguments))
    """What is done with a solution and the arguments of a case, where it is more than a call."""
    tolerance: float = 1e-5
    """Largest relative difference, and the largest absolute one next to zero."""
    seconds: float = 20.0
    """Time that all cases may take."""

    @property
    def is_question(self) -> bool:
        """Whether a number is asked for, not a function."""
        return isinstance(self.answer, int | float)

    def inputs(self) -> list[tuple]:
        """The arguments of each case, always the same; tensors of several cases are not shared."""
        _generator.manual_seed(0)
        return copy.deepcopy([*self.cases()])

    def outcomes(self, solution: Solution) -> list[Any]:
        """What a solution makes of each case."""
        return self.of_inputs(solution, self.inputs())

    def of_inputs(self, solution: Solution, inputs: Sequence[tuple]) -> list[Any]:
        """What a solution makes of these arguments."""
        return [self.use(solution, *arguments) for arguments in inputs]


def exercise(name: str, answer: Any, cases: Any = ((),), *, mistakes: Mapping[str, Any], **options: Any) -> Exercise:
    """Adds an exercise to `EXERCISES`. `cases` is a function that makes them or, of plain values, the cases."""
    assert name not in EXERCISES, name
    made = cases if callable(cases) else lambda: cases
    notebook = options.pop("notebook")
    EXERCISES[name] = Exercise(name, notebook, answer, made, mistakes, **options)
    return EXERCISES[name]


def difference(found: Any, expected: Any, tolerance: float) -> str | None:
    """How what was found differs from what was expected, in a sentence; None where they agree."""
    if isinstance(expected, Tensor):
        if not isinstance(found, Tensor):
            return f"The result is a {type(found).__name__}, not a tensor."
        if found.shape != expected.shape:
            return f"The result has the shape {tuple(found.shape)}, not {tuple(expected.shape)}."
        if found.dtype != expected.dtype:
            return f"The result is {found.dtype}, not {expected.dtype}.".replace("torch.", "")
        return _of_numbers(found.detach().double().numpy(), expected.detach().double().numpy(), tolerance)
    if isinstance(expected, bool | str | bytes | None):
        return (
            None if type(found) is type(expected) and found == expected else f"{_shown(found)}, not {_shown(expected)}."
        )
    if isinstance(expected, int | float | np.ndarray):
        if not isinstance(found, int | float | np.ndarray | np.generic | Tensor):
            return f"The result is a {type(found).__name__}, not a number."
        if np.shape(found) != np.shape(expected):
            return f"The result has the shape {np.shape(found)}, not {np.shape(expected)}."
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
    if isinstance(expected, Tensor):
        return float((found.detach().double() - expected.detach().double()).abs().max()) if expected.numel() else 0.0
    if isinstance(expected, Mapping):
        return max((largest_error(found[name], expected[name]) for name in expected), default=0.0)
    if isinstance(expected, Sequence) and not isinstance(expected, str | bytes):
        return max((largest_error(*pair) for pair in zip(found, expected, strict=True)), default=0.0)
    return abs(float(found) - float(expected)) if isinstance(expected, int | float) else 0.0


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """The next normal random numbers of a case: each time the cases are made they are the same."""
    return (scale * torch.randn(shape, generator=_generator)).to(dtype)
