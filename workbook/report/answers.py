"""Answers to the handouts' problems, with the conclusions that they rest on, and tables for people."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from IPython.display import Markdown

from lmcore.errors import require
from lmcore.formatting import format_bytes, format_significant
from workbook.report.wording import format_count, format_seconds, scientific

METADATA_KEY = "lmcore_answer"
"""Key in the metadata of an answer's output, by which the writeup finds it."""

MARKUP = re.compile(r"""[\\`*_{}\[\]()#+.!|~$^>:=@'"<&-]""")

NOT_A_NUMBER = re.compile(r"\bnan\b%?")

NUMBER = re.compile(r"–|[-+−±~]?[\d.,]+[\w.,\s×±%/()−–-]*")
"""What a cell of a column of numbers is, with its unit."""

BLOCK_START = re.compile(r"\s*(\||[-*+] |\d+[.)] |#|>|```|\$\$|<)")


def answer(problem: str, text: Any, holds: Mapping[str, Any] | None = None, missing: str = "") -> Markdown:
    """The answer to a handout problem, to be the last expression of its cell.

    `problem` is the handout's name, with the part in brackets if it has parts: "transformer_accounting (a)". `text` is
    Markdown, as a rule an f-string; a number in it that is NaN is shown as not measured. `holds` maps a conclusion that
    another machine could contradict to whether it holds here (all of an array); what does not is printed below the
    answer. `missing` is what the handout asks for and the answer lacks: the problem then counts as answered in part.
    `...` in place of the text is an answer that is yet to be written. Raises `UserError` on an empty text or another
    form of name.
    """
    match = re.fullmatch(r"([A-Za-z][\w ]*?)\s*(?:\(([\w, -]+)\))?", problem.strip())
    require(match is not None, f"A problem is named like 'adamw' or 'adamwAccounting (b)', not {problem!r}.")
    if text is ...:
        return Markdown(f"> **Answer — {problem}.** *Not written yet.*")
    text = NOT_A_NUMBER.sub("(not measured)", inspect.cleandoc(text))
    require(bool(text), f"The answer to {problem} is empty.")
    held = {conclusion: bool(np.all(true)) for conclusion, true in (holds or {}).items()}
    found = {"problem": match[1], "part": match[2] or "", "text": text, "holds": held, "missing": missing}
    failed = [conclusion for conclusion, true in held.items() if not true]
    note = f"\n\n*Missing:* {missing}." if missing else ""
    note += f"\n\n*Does not hold on this machine:* {'; '.join(failed)}." if failed else ""
    gap = "\n\n" if BLOCK_START.match(text) else " "
    lines = f"**Answer — {problem.strip()}.**{gap}{text}{note}".split("\n")
    # a quoted block is a box wherever it is shown; by its metadata the writeup finds it
    return Markdown("\n".join(f"> {line}".rstrip() for line in lines), metadata={METADATA_KEY: found})


def escaped(text: str) -> str:
    """Text as Markdown that shows it as it is."""
    return MARKUP.sub(lambda match: f"&#{ord(match[0])};", text)


FORMATS = {
    "count": format_count,
    "bytes": format_bytes,
    "seconds": format_seconds,
    "power": scientific,
    "digits": format_significant,
}
"""Words for the formats of a table's columns."""


def table(frame: pd.DataFrame, **formats: str | Callable[[Any], str]) -> Markdown:
    """The frame as a table for people, without its index, numbers to the right; missing values are "–".

    `formats` say how a column is written: by a word of `FORMATS`, by a format as in `str.format` (".1%"), or by a
    function of the value. Other numbers are written as they are.
    """
    shown = frame.astype(object).where(frame.notna(), None)
    for name, form in formats.items():
        write = form if callable(form) else FORMATS.get(form, ("{:" + form + "}").format)
        shown[name] = [None if value is None else write(value) for value in shown[name]]
    shown = shown.fillna("–").astype(str)
    sides = ["right" if shown[name].str.fullmatch(NUMBER).mean() > 0.5 else "left" for name in shown]
    return Markdown(shown.to_markdown(index=False, disable_numparse=True, colalign=sides if len(shown) else None))
