"""Answers: a template that a person wrote, values by keyword, and the claims it rests on."""

import inspect
import math
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from IPython.display import Markdown

from lmcore.errors import require

METADATA_KEY = "lmcore_answer"
"""Key in the metadata of an answer's output, by which the writeup finds it."""

BLOCK_START = re.compile(r"\s*(\||[-*+] |\d+[.)] |#|>|```|\$\$|<)")


class Answer(Markdown):
    """A quoted block that begins with a uniform marker; its metadata holds what it was made of."""

    def __init__(
        self, name: str, part: str, text: str, values: Mapping[str, Any], claims: Mapping[str, bool], missing: str
    ):
        label = f"{name} ({part})" if part else name
        gap = "\n\n" if BLOCK_START.match(text) else " "
        failed = [claim for claim, holds in claims.items() if not holds]
        note = f"\n\n*Missing:* {missing}." if missing else ""
        note += f"\n\n*Does not hold on this machine:* {'; '.join(failed)}." if failed else ""
        lines = f"**Answer — {label}.**{gap}{text}{note}".split("\n")
        super().__init__("\n".join(f"> {line}".rstrip() for line in lines))  # a box wherever it is shown
        found = {"problem": name, "part": part, "values": dict(values), "claims": dict(claims), "missing": missing}
        self.metadata = {METADATA_KEY: found}


def answer(
    problem: str, template: str, claims: Mapping[str, Any] | None = None, missing: str = "", **values: Any
) -> Answer:
    """The answer to a handout problem, to be the last expression of its cell.

    `problem` is the handout's name, with the part in brackets if it has parts: "transformer_accounting (a)". `template`
    is Markdown with fields for the `values`, formatted as in `str.format`, and by these words besides: `{x:count}`
    1.64 billion, `{x:bytes}` 6.55 GB, `{x:seconds}` 12.3 ms, `{x:power}` 4.51 · 10¹², `{x:digits}` three digits. A
    list is joined: 1, 2 and 3. `claims` maps each statement that the answer rests on to whether it holds; what
    does not hold is printed below the answer. `missing`, a template too, is what the handout asks for and the answer
    lacks: the problem then counts as answered in part. Raises `UserError` on an empty text or another form of name.
    """
    match = re.fullmatch(r"([A-Za-z][\w ]*?)\s*(?:\(([\w, -]+)\))?", problem.strip())
    require(match is not None, f"A problem is named like 'adamw' or 'adamwAccounting (b)', not {problem!r}.")
    text = inspect.cleandoc(template)
    require(bool(text), f"The answer to {problem} is empty.")
    held = {claim: bool(np.all(holds)) for claim, holds in (claims or {}).items()}
    if values or claims is not None:
        text, missing = (AnswerFormatter().format(each, **values) for each in (text, missing))
    return Answer(match[1], match[2] or "", text, {name: plain(value) for name, value in values.items()}, held, missing)


class AnswerFormatter(string.Formatter):
    """`str.format` with the words of `FORMATS`, with lists joined, and with NaN as what it is: not measured."""

    def format_field(self, value: Any, format_spec: str) -> str:
        """One field of a template; what is missing or not a number was not measured."""
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return "(not measured)"
        if isinstance(value, list | tuple | np.ndarray):
            return join_words([self.format_field(each, format_spec) for each in value])
        return FORMATS[format_spec](value) if format_spec in FORMATS else format(value, format_spec)


def plain(value: Any) -> Any:
    """A value as JSON has it, for the metadata of an answer: numpy's numbers and arrays as Python's, NaN as None."""
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)  # JSON has neither
    return value if isinstance(value, bool | int | float | str | None) else str(value)


SCALES = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"))
BYTE_UNITS = ("bytes", "KB", "MB", "GB", "TB", "PB")


def format_significant(value: float, digits: int = 3) -> str:
    """`value` rounded to significant digits, in plain notation with thousands separated: 0.000123, 1.64, 12,300."""
    rounded = float(f"{value:.{digits}g}")
    decimals = max(0, digits - 1 - _exponent(rounded))
    return f"{rounded:,.{decimals}f}"


def _exponent(value: float) -> int:
    return int(f"{value:e}".partition("e")[2])


def scientific(value: float, digits: int = 3) -> str:
    """A number by its power of ten, for Markdown: $4.51 \\cdot 10^{12}$; with one digit, 1e-5 is $10^{-5}$."""
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    power = f"10^{{{int(exponent)}}}"
    return f"${power}$" if mantissa == "1" else rf"${mantissa} \cdot {power}$"


def format_count(value: float, digits: int = 3) -> str:
    """A count in words from a million on: 1.64 billion, 12,345."""
    rounded = float(f"{value:.{digits}g}")
    for size, name in SCALES:
        if abs(rounded) >= size:
            return f"{format_significant(value / size, digits)} {name}"
    return f"{round(value):,}" if float(value).is_integer() else format_significant(value, digits)


def format_bytes(value: float, digits: int = 3) -> str:
    """Bytes in decimal units, as the handouts count them (1 GB = 10^9 bytes): 6.55 GB."""
    unit = 0
    while abs(float(f"{value:.{digits}g}")) >= 1000 and unit < len(BYTE_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{format_significant(value, digits) if unit else round(value)} {BYTE_UNITS[unit]}"


def format_seconds(value: float) -> str:
    """A duration in the unit that suits it: 350 µs, 12.3 ms, 4.56 s, 3 min 20 s, 5 h 12 min, 9.2 days."""
    if value == 0:
        return "0 s"
    if value < 0.9995e-3:
        return f"{format_significant(value * 1e6)} µs"
    if value < 0.9995:
        return f"{format_significant(value * 1e3)} ms"
    if value < 59.95:
        return f"{format_significant(value)} s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s" if seconds else f"{minutes} min"
    hours, minutes = divmod(round(value / 60), 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{format_significant(value / 86400)} days"


def format_percent(fraction: float, digits: int = 3) -> str:
    """A fraction as a percentage: 0.1234 -> 12.3%."""
    return f"{format_significant(100 * fraction, digits)}%"


def join_words(words: Sequence[str], conjunction: str = "and") -> str:
    """a; a and b; a, b and c."""
    words = [str(word) for word in words]
    return " ".join([", ".join(words[:-1]), conjunction, words[-1]]) if len(words) > 1 else "".join(words)


FORMATS = {
    "count": format_count,
    "bytes": format_bytes,
    "seconds": format_seconds,
    "power": scientific,
    "digits": format_significant,
}
"""Formats of the fields of an answer's template, besides Python's own."""


def table(frame: pd.DataFrame, **formats: str | Callable[[Any], str]) -> Markdown:
    """The frame as a table for people, without its index; missing values are "–".

    `formats` say how a column is written: by a word of `FORMATS`, by a format as in `str.format` (".1%"), or by a
    function of the value. Other numbers are written as they are.
    """
    shown = frame.astype(object).where(frame.notna(), None)
    for name, form in formats.items():
        write = form if callable(form) else FORMATS.get(form, ("{:" + form + "}").format)
        shown[name] = [None if value is None else write(value) for value in shown[name]]
    return Markdown(shown.fillna("–").to_markdown(index=False, disable_numparse=True))
