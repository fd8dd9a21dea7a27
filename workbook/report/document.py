"""An executed notebook as a document: its Markdown, figures, tables, printed text and answers, without its code."""

import base64
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat

from workbook.notebook import ANSI_ESCAPE, KEEP_OUTPUT, tags
from workbook.report.answers import METADATA_KEY
from workbook.report.coverage import Answered
from workbook.report.pandoc import Node, attributes_of, parse, text_of, transform

REMOVE_OUTPUT, SHOW_STDOUT = "remove_output", "show_stdout"
"""Tags of a cell whose outputs the writeup leaves out, and of one whose printed text it shows.

Printed text is taken for progress and left out, unless its cell has this tag or `keep_output`.
"""

MAX_LINES = 60
SUFFIXES = {"image/svg+xml": ".svg", "image/png": ".png", "image/jpeg": ".jpg"}
OBJECT_REPR = re.compile(r"^\[?<[\w.]+[^<>]*( at 0x[0-9a-f]+|object|:)|^<Figure size|^(Text|Int|Float)\w*\(")
NUMBER = re.compile(r"[-+−]?[\d,.]*\d[\d,.]*([eE][-+]?\d+)?\s*([%×x]|[A-Za-zµ/]{1,9})?|[-–—]|nan|NaN|inf|∞|")


@dataclass
class NotebookDocument:
    """A notebook's blocks, and what the writeup lists about them."""

    name: str
    title: str = ""
    blocks: list[Node] = field(default_factory=list)
    answers: list[Answered] = field(default_factory=list)
    figures: int = 0


def read_document(name: str, notebook: nbformat.NotebookNode, folder: Path, build: Path) -> NotebookDocument:
    """The document of an executed notebook. Its pictures are written into build/figures, as the tree names them.

    `folder` is where the notebook's own relative links start.
    """
    document, parts = NotebookDocument(name), []
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and "papermill-error-cell-tag" not in tags(cell):
            parts.append(cell.source)
        elif cell.cell_type == "code" and REMOVE_OUTPUT not in tags(cell):
            parts += [_output(document, cell, output, build) for output in cell.outputs]
    blocks = parse("\n\n".join(parts))
    if not any(block["t"] == "Header" and block["c"][0] == 1 for block in blocks):
        blocks = [*parse(f"# {name.replace('_', ' ')}"), *blocks]
    first = next(block for block in blocks if block["t"] == "Header" and block["c"][0] == 1)
    first["c"][1][0], document.title = name, text_of(first["c"][2])
    document.blocks = transform(blocks, lambda node: _tidy(node, document, folder, build))
    return document


def _output(document: NotebookDocument, cell: nbformat.NotebookNode, output: Any, build: Path) -> str:
    """An output as Markdown; empty if it is not to be seen."""
    if output.output_type == "stream":
        asked = output.name == "stdout" and {SHOW_STDOUT, KEEP_OUTPUT} & set(tags(cell))
        return fenced(shorten(plain_text(output.text))) if asked else ""
    data = output.get("data", {})
    image = next((mime for mime in SUFFIXES if mime in data), None)
    if "text/markdown" in data:
        return _answer(document, output) or data["text/markdown"]
    if image is not None:
        content = data[image].encode() if image == "image/svg+xml" else base64.b64decode(data[image])
        target, caption = _save(document, content, SUFFIXES[image], build), caption_of(cell, output, image)
        title = f"**Figure {short(document.name)}.{document.figures}.** {caption}"
        return f"![{title if caption else ''}]({target})"
    if set(data) == {"text/plain"} and not OBJECT_REPR.match(data["text/plain"]):
        return fenced(shorten(plain_text(data["text/plain"])))
    return ""


def _answer(document: NotebookDocument, output: Any) -> str:
    """The answer that an output is, in a div of its own; empty if it is none."""
    metadata = output.metadata.get("text/markdown", output.metadata).get(METADATA_KEY)  # IPython does either
    if metadata is None:
        return ""
    answered = Answered(metadata["problem"], metadata["part"], document.name, missing=metadata.get("missing", ""))
    slug = re.sub(r"\W+", "-", answered.label).strip("-")
    answered.identifier = f"answer-{document.name}-{len(document.answers) + 1}-{slug}"
    document.answers.append(answered)
    text = re.sub(r"^> ?", "", output.data["text/markdown"], flags=re.MULTILINE)
    return f":::::: {{#{answered.identifier} .answer title={json.dumps(answered.label)}}}\n{text}\n::::::"


def _save(document: NotebookDocument, content: bytes, suffix: str, build: Path) -> str:
    """Writes a picture into the build folder; returns its path there."""
    document.figures += 1
    file = build / "figures" / f"{document.name}-{document.figures}{suffix}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return f"figures/{file.name}"


def caption_of(cell: nbformat.NotebookNode, output: Any, mime: str) -> str | None:
    """A picture's caption: in the output's metadata, else in the cell's."""
    own = output.metadata.get(mime, {})
    return own.get("caption") or output.metadata.get("caption") or cell.metadata.get("caption")


def short(name: str) -> str:
    """A notebook's number, or its name if it has none: 3 for 03_generate."""
    number = name.partition("_")[0]
    return str(int(number)) if number.isdigit() else name


def fenced(text: str) -> str:
    """Preformatted text as Markdown."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text) or [""]))
    return f"{fence}\n{text}\n{fence}"


def plain_text(text: str) -> str:
    """Terminal output as text: escapes dropped, a carriage return overwrites its line, control characters shown."""
    text = ANSI_ESCAPE.sub("", text).replace("\r\n", "\n")
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    shown = "\n".join(lines).strip("\n").expandtabs(4)
    return "".join(chr(0x2400 + ord(c)) if c < " " and c != "\n" else c for c in shown)


def shorten(text: str, limit: int = MAX_LINES) -> str:
    """The first and last lines of a long text, and how many are left out between them."""
    lines = text.split("\n")
    if len(lines) <= limit:
        return text
    half = limit // 2
    return "\n".join([*lines[:half], f"… {len(lines) - 2 * half} lines left out …", *lines[-half:]])


def _tidy(node: Node, document: NotebookDocument, folder: Path, build: Path) -> Node | list[Node]:
    """Identifiers and links made unique in the writeup, pictures gathered, raw HTML dropped, tables freed of widths."""
    kind, attributes = node["t"], attributes_of(node)
    if kind in ("RawBlock", "RawInline"):
        return []
    if attributes[0] and not attributes[0].startswith(("answer-", document.name)):
        attributes[0] = f"{document.name}-{attributes[0]}"
    if kind == "Link":
        node["c"][2][0] = _link_target(node["c"][2][0], document.name)
    if kind == "Table":
        free_columns(node)
    if kind != "Image" or node["c"][2][0].startswith(f"figures/{document.name}-"):
        return node
    target = node["c"][2][0]  # a picture of a Markdown cell; one that is not there becomes its description
    if "://" in target or Path(target).suffix not in SUFFIXES.values() or not (folder / target).is_file():
        return [{"t": "Emph", "c": node["c"][1] or [{"t": "Str", "c": target}]}]
    node["c"][2][0] = _save(document, (folder / target).read_bytes(), Path(target).suffix, build)
    return node


def _link_target(target: str, name: str) -> str:
    """Links within a notebook and to other notebooks as links within the writeup."""
    other = re.fullmatch(r"(?:\./)?([\w-]+)\.ipynb(?:#(.*))?", target)
    if other is not None:
        return f"#{other[1]}-{other[2].lower()}" if other[2] else f"#{other[1]}"
    return f"#{name}-{target[1:].lower()}" if target.startswith("#") else target


def free_columns(node: Node) -> None:
    """Columns as wide as their content, numbers in one line with their units, and to the right."""
    columns, bodies = node["c"][2], node["c"][4]
    rows = [row[1] for body in bodies for row in body[3]]
    for blocks in (cell[4] for row in rows for cell in row if NUMBER.fullmatch(text_of(cell[4]).strip())):
        for block in blocks:
            block["c"] = [{"t": "Str", "c": "\u00a0"} if each["t"] == "Space" else each for each in block["c"]]
    for index, column in enumerate(columns):
        column[1] = {"t": "ColWidthDefault"}
        texts = [text_of(row[index][4]).strip() for row in rows if index < len(row)]
        if column[0]["t"] == "AlignDefault" and any(texts) and all(NUMBER.fullmatch(text) for text in texts):
            column[0] = {"t": "AlignRight"}
