"""What an executed notebook has for the writeup: its answers, each with the table, figure and samples before it."""

import base64
import io
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nbformat
from PIL import Image

from workbook.notebook import tags
from workbook.report.answers import METADATA_KEY
from workbook.report.coverage import Answered
from workbook.seal import sealed_files

NOT_IN_WRITEUP = "not_in_writeup"
"""Tag of a cell that the writeup leaves out, text or outputs; pages show it."""

SUFFIXES = {"image/svg+xml": ".svg", "image/png": ".png", "image/jpeg": ".jpg"}
HEADING = re.compile(r"##? ")


@dataclass
class NotebookContents:
    """A notebook's text with its outputs, as Markdown, and its answers."""

    name: str
    text: list[str] = field(default_factory=list)
    answers: list[Answered] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    """Paths in the output folder of the results files that the notebook made."""


def read_contents(name: str, notebook: nbformat.NotebookNode, build: Path) -> NotebookContents:
    """The contents of an executed notebook. Its pictures are written into the folder `build`.

    A heading begins a section; what an answer is shown with stands in its section, after the answer before it.
    """
    results = [file for file in sealed_files(notebook) if file.startswith("results/")]
    contents, pictures = NotebookContents(name, results=results), 0
    table = figure = samples = ""
    for cell in (cell for cell in notebook.cells if NOT_IN_WRITEUP not in tags(cell)):
        if cell.cell_type == "markdown":
            contents.text.append(cell.source)
            if HEADING.match(cell.source):
                table = figure = samples = ""
        if cell.cell_type != "code":
            continue
        for output in cell.outputs:
            data = output.get("data", {})
            image = next((mime for mime in SUFFIXES if mime in data), None)
            if image is not None:
                pictures += 1
                file = build / f"{name}-{pictures}{SUFFIXES[image]}"
                figure = _picture(data[image], file, caption_of(cell, output, image) or "")
                contents.text.append(figure)
            elif found := _answer(output):
                text = re.sub(r"^> ?", "", data["text/markdown"], flags=re.MULTILINE).partition(".**")[2].strip()
                given = Answered(found["problem"], found["part"], name, found.get("missing", ""), text)
                given.table, given.figure, given.samples = table, figure, samples
                contents.answers.append(given)
                contents.text.append(text)
                table = figure = samples = ""
            elif text := data.get("text/markdown", ""):
                contents.text.append(text)
                if text.startswith(">"):
                    samples += f"\n\n{text}"
                elif text.startswith("|"):
                    table = text
    return contents


def given_answers(notebook: nbformat.NotebookNode) -> dict[str, str]:
    """Each answer as it is shown in an executed notebook, by problem and part."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = [(found, output["data"]["text/markdown"]) for output in outputs if (found := _answer(output))]
    return {f"{found['problem']} {found['part']}".strip(): text for found, text in shown}


def _answer(output: Any) -> dict[str, Any] | None:
    """What an output's metadata say of the answer that it is; IPython puts them in either place."""
    metadata = output.get("metadata", {})
    return metadata.get("text/markdown", metadata).get(METADATA_KEY)


def _picture(data: str, file: Path, caption: str) -> str:
    """A picture as Markdown, written into `file`; its caption in place of one that is broken."""
    content = data.encode() if file.suffix == ".svg" else base64.b64decode(data)
    try:
        if file.suffix == ".svg":
            ElementTree.fromstring(content)
        else:
            with Image.open(io.BytesIO(content)) as opened:
                opened.verify()
    except (ElementTree.ParseError, OSError, SyntaxError):
        return f"*{caption or 'A picture that is broken.'}*"
    file.write_bytes(content)
    return f"![{caption}]({file.name})"


def caption_of(cell: nbformat.NotebookNode, output: Any, mime: str) -> str | None:
    """A picture's caption: in the output's metadata, else in the cell's."""
    own = output.metadata.get(mime, {})
    return own.get("caption") or output.metadata.get("caption") or cell.metadata.get("caption")
