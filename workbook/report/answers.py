"""Answers: a template that a person wrote, values by keyword, and the claims it rests on."""

import inspect
import math
import re
import string
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from IPython.display import Markdown

from lmcore.errors import require
from lmcore.formatting import format_bytes, format_significant
from workbook.report.wording import format_count, format_seconds, join_words, scientific

METADATA_KEY = "lmcore_answer"
"""Key in the metadata of an answer's output, by which the writeup finds it."""

MARKUP = re.compile(r"""[\\`*_{}\[\]()#+.!|~$^>:=@'"<&-]""")

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
        found = {"problem": name, "part": part, "text": text}
        found |= {"values": dict(values), "claims": dict(claims), "missing": missing}
        self.metadata = {METADATA_KEY: found}


def answer(
    problem: str, template: str, claims: Mapping[str, Any] | None = None, missing: str = "", **values: Any
) -> Answer:
    """The answer to a handout problem, to be the last expression of its cell.

    `problem` is the handout's name, with the part in brackets if it has parts: "transformer_accounting (a)". `template`
    is Markdown, an f-string at best. With `values` it has fields for them, formatted as in `str.format`, and by these
    words besides: `{x:count}` 1.64 billion, `{x:bytes}` 6.55 GB, `{x:seconds}` 12.3 ms, `{x:power}` 4.51 · 10¹²,
    `{x:digits}` three digits. A list is joined: 1, 2 and 3. `claims` maps each statement that the answer rests on to
    whether it holds; what does not hold is printed below the answer. `missing`, a template too, is what the handout
    asks for and the answer lacks: the problem then counts as answered in part. Raises `UserError` on an empty text or
    another form of name.
    """
    match = re.fullmatch(r"([A-Za-z][\w ]*?)\s*(?:\(([\w, -]+)\))?", problem.strip())
    require(match is not None, f"A problem is named like 'adamw' or 'adamwAccounting (b)', not {problem!r}.")
    text = inspect.cleandoc(template)
    require(bool(text), f"The answer to {problem} is empty.")
    held = {claim: bool(np.all(holds)) for claim, holds in (claims or {}).items()}
    if values:
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


def escaped(text: str) -> str:
    """Text as Markdown that shows it as it is."""
    return MARKUP.sub(lambda match: f"&#{ord(match[0])};", text)


def plain(value: Any) -> Any:
    """A value as JSON has it, for the metadata of an answer: numpy's numbers and arrays as Python's, NaN as None."""
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)  # JSON has neither
    return value if isinstance(value, bool | int | float | str | None) else str(value)


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
