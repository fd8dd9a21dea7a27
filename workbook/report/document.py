"""An executed notebook as a document: its Markdown, figures, tables and answers, and its code to be looked up."""

import base64
import html
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat

from workbook.notebook import (
    ANSI_ESCAPE,
    INJECTED,
    KEEP_OUTPUT,
    PARAMETERS,
    code_cells,
    execution_fault,
    heading_above,
    tags,
)
from workbook.report.answers import METADATA_KEY
from workbook.report.coverage import Answered
from workbook.report.pandoc import (
    ATTRIBUTES_FIRST,
    Node,
    code_block,
    div,
    figure,
    inlines,
    para,
    parse,
    strong,
    text_of,
    transform,
)

REMOVE_OUTPUT, SHOW_STDOUT = "remove_output", "show_stdout"
"""Tags of a cell whose outputs the writeup leaves out, and of one whose printed text it shows.

Printed text is taken for progress and left out, unless its cell has this tag or `keep_output`.
"""

MAX_LINES = 60
SUFFIXES = {"image/svg+xml": ".svg", "image/png": ".png", "image/jpeg": ".jpg"}
LATEX_ENVIRONMENT = re.compile(
    r"^[ \t]*\\begin\{(align|equation|gather)(\*?)\}(.*?)\\end\{\1\2\}[ \t]*$", re.MULTILINE | re.DOTALL
)
OBJECT_REPR = re.compile(r"^\[?<[\w.]+[^<>]*( at 0x[0-9a-f]+|object|:)|^<Figure size|^(Text|Int|Float)\w*\(")


@dataclass
class NotebookDocument:
    """A notebook's blocks and what the writeup lists about them."""

    name: str
    title: str
    blocks: list[Node]
    answers: list[Answered]
    figures: int


@dataclass
class Piece:
    """Something to show: Markdown or HTML to parse, or finished blocks."""

    kind: str
    """markdown, html or blocks."""
    content: Any
    answer: Answered | None = None
    parsed: list[Node] = field(default_factory=list)


def read_document(
    name: str, notebook: nbformat.NotebookNode, folder: Path, figures: Path, show_fault: bool = True
) -> NotebookDocument:
    """The document of an executed notebook. Its pictures are written into `figures`, and the tree names them there.

    `folder` is where the notebook's own relative links start. `show_fault` marks the cell that failed; in a notebook
    that was stopped none has.
    """
    answers: list[Answered] = []
    store = FigureStore(name, figures)
    fault = execution_fault(notebook) if show_fault else None
    pieces = list(_pieces(name, notebook, answers, store, fault))
    for kind, source in (("markdown", None), ("html", "html-native_divs-native_spans")):
        chosen = [piece for piece in pieces if piece.kind == kind]
        texts = [piece.content for piece in chosen]
        for piece, blocks in zip(chosen, parse(texts, *([source] if source else [])), strict=True):
            piece.parsed = blocks
    blocks: list[Node] = []
    for piece in pieces:
        made = piece.content if piece.kind == "blocks" else piece.parsed
        blocks += [div(made, piece.answer.identifier, "answer")] if piece.answer else made
    blocks = transform(blocks, lambda node: _tidy(node, name, folder, store))
    title = next((text_of(b["c"][2]) for b in blocks if b["t"] == "Header" and b["c"][0] == 1), None)
    if title is None:
        title = name.replace("_", " ")
        blocks.insert(0, {"t": "Header", "c": [1, [name, [], []], inlines(title)]})
    first = next(b for b in blocks if b["t"] == "Header" and b["c"][0] == 1)
    first["c"][1][0] = name
    return NotebookDocument(name, title, blocks, answers, store.count)


class FigureStore:
    """Writes pictures into the build folder and numbers those with captions."""

    def __init__(self, name: str, folder: Path):
        self.name, self.folder, self.count = name, folder, 0

    def save(self, content: bytes, suffix: str) -> str:
        """The picture's path relative to the build folder."""
        self.count += 1
        file = self.folder / f"{self.name}-{self.count}{suffix}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        return f"{self.folder.name}/{file.name}"


def _pieces(
    name: str,
    notebook: nbformat.NotebookNode,
    answers: list[Answered],
    store: FigureStore,
    fault: tuple[int, str] | None,
) -> Iterator[Piece]:
    numbers = {cell.id: number for number, cell in code_cells(notebook)}
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and "papermill-error-cell-tag" not in tags(cell):
            yield Piece("markdown", _mathjax_environments(_attachments(cell)))
        if cell.cell_type != "code":
            continue
        if cell.source.strip() and not {PARAMETERS, INJECTED} & set(tags(cell)):
            yield Piece("blocks", [listing(name, numbers[cell.id], cell.source)])
        if REMOVE_OUTPUT not in tags(cell):
            for output in cell.outputs:
                yield from _output_pieces(name, cell, output, answers, store, numbers)
        if fault is not None and numbers.get(cell.id) == fault[0]:
            yield Piece("blocks", [failure_box(name, notebook, cell, *fault)])


def _output_pieces(
    name: str,
    cell: nbformat.NotebookNode,
    output: Any,
    answers: list[Answered],
    store: FigureStore,
    numbers: dict[str, int],
) -> Iterator[Piece]:
    if output.output_type == "stream":
        if output.name == "stdout" and {SHOW_STDOUT, KEEP_OUTPUT} & set(tags(cell)):
            yield Piece("blocks", [code_block(shorten(plain_text(output.text)))])
        return
    if output.output_type not in ("display_data", "execute_result"):
        return
    data = output.data
    image = next((mime for mime in SUFFIXES if mime in data), None)
    if "text/markdown" in data:
        answered, text = _answered(name, output, answers), data["text/markdown"]
        text = re.sub(r"^> ?", "", text, flags=re.MULTILINE) if answered else text  # it gets a box of its own
        yield Piece("markdown", _mathjax_environments(text), answered)
    elif image is not None:
        content = data[image].encode() if image == "image/svg+xml" else base64.b64decode(data[image])
        caption = _caption(cell, output, image)
        target = store.save(content, SUFFIXES[image])
        number = [strong(f"Figure {short(name)}.{store.count}."), {"t": "Space"}]
        yield Piece("blocks", [figure(target, number + parse([caption])[0][0]["c"] if caption else [])])
    elif "text/html" in data:
        text = re.sub(r"<style.*?</style>", "", data["text/html"], flags=re.DOTALL)
        if 'class="highlight"' in text:  # show_source
            shown = html.unescape(re.sub(r"<[^>]*>", "", text)).strip()
            yield Piece("blocks", [listing(name, f"{numbers[cell.id]}-library", shown)])
        else:
            yield Piece("html", text)
    elif "text/latex" in data and "text/html" not in data:
        yield Piece("markdown", _mathjax_environments(data["text/latex"]))
    elif set(data) == {"text/plain"} and not OBJECT_REPR.match(data["text/plain"]):
        yield Piece("blocks", [code_block(shorten(plain_text(data["text/plain"])))])


def _answered(name: str, output: Any, answers: list[Answered]) -> Answered | None:
    """The answer that an output is, noted in `answers`; IPython puts its metadata under the MIME type or beside it."""
    metadata = output.metadata.get("text/markdown", output.metadata).get(METADATA_KEY)
    if metadata is None:
        return None
    slug = re.sub(r"\W+", "-", f"{metadata['problem']}-{metadata['part']}").strip("-")
    taken = sum(1 for known in answers if re.fullmatch(rf"answer-{name}-{slug}(-\d+)?", known.identifier))
    identifier = f"answer-{name}-{slug}" + (f"-{taken + 1}" if taken else "")
    found = {key: metadata[key] for key in ("problem", "part", "claims", "missing") if key in metadata}
    answers.append(Answered(notebook=name, identifier=identifier, **found))
    return answers[-1]


def short(name: str) -> str:
    """A notebook's number, or its name if it has none: 3 for 03_generate."""
    number = name.partition("_")[0]
    return str(int(number)) if number.isdigit() else name


def listing(name: str, number: int | str, source: str) -> Node:
    """Code as a block to be folded (HTML) or put into the appendix (PDF)."""
    return div([code_block(source)], f"{name}-code-{number}", "code")


def _caption(cell: nbformat.NotebookNode, output: Any, mime: str) -> str | None:
    """The caption in the output's metadata, else in the cell's."""
    own = output.metadata.get(mime, {})
    return own.get("caption") or output.metadata.get("caption") or cell.metadata.get("caption")


def _attachments(cell: nbformat.NotebookNode) -> str:
    """A Markdown cell's text, with the pictures attached to it in place of their names."""
    text = cell.source
    for file, bundle in cell.get("attachments", {}).items():
        mime, content = next(iter(bundle.items()))
        text = text.replace(f"attachment:{file}", f"data:{mime};base64,{content}")
    return text


def _mathjax_environments(text: str) -> str:
    """Jupyter renders bare LaTeX environments as math; pandoc's Markdown needs the dollars."""

    def dollars(match: re.Match) -> str:
        inner = {"align": "aligned", "gather": "gathered"}.get(match[1])
        body = f"\\begin{{{inner}}}{match[3]}\\end{{{inner}}}" if inner else match[3].strip()
        return f"$${body}$$"

    return LATEX_ENVIRONMENT.sub(dollars, text)


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


def failure_box(name: str, notebook: Any, cell: Any, number: int, error: str) -> Node:
    """A plain notice of the cell that failed, with the end of its traceback."""
    heading = heading_above(notebook, number)
    where = f" under “{heading}”" if heading else ""
    blocks = [para(strong(f"Notebook {name} failed at code cell {number}{where}."), {"t": "Space"}, *inlines(error))]
    for output in cell.outputs:
        if output.output_type == "error" and output.traceback:
            blocks.append(code_block(shorten(plain_text("\n".join(output.traceback)), 16)))
    return div(blocks, "", "failure")


def _tidy(node: Node, name: str, folder: Path, store: FigureStore) -> Node | list[Node]:
    """Identifiers and links made unique in the writeup, pictures gathered, raw HTML dropped, tables freed of widths."""
    kind = node["t"]
    if kind in ("RawBlock", "RawInline"):
        return []
    if kind == "Header" or kind in ATTRIBUTES_FIRST:
        attributes = node["c"][1] if kind == "Header" else node["c"][0]
        known = attributes[0].startswith(("answer-", name))
        attributes[0] = attributes[0] if known or not attributes[0] else f"{name}-{attributes[0]}"
        attributes[2] = []
        if kind == "CodeBlock":
            attributes[1] = []
    if kind == "Link":
        node["c"][2][0] = _link_target(node["c"][2][0], name)
    if kind == "Image":
        return _gather_image(node, folder, store)
    if kind == "Table":
        _free_columns(node)
    return node


def _link_target(target: str, name: str) -> str:
    """Links within a notebook and to other notebooks as links within the writeup."""
    other = re.fullmatch(r"(?:\./)?([\w-]+)\.ipynb(?:#(.*))?", target)
    if other is not None:
        return f"#{other[1]}-{other[2].lower()}" if other[2] else f"#{other[1]}"
    return f"#{name}-{target[1:].lower()}" if target.startswith("#") else target


def _gather_image(node: Node, folder: Path, store: FigureStore) -> Node | list[Node]:
    """A picture of a Markdown cell copied into the build folder; one that cannot be found becomes its description."""
    target = node["c"][2][0]
    if target.startswith(f"{store.folder.name}/{store.name}-"):
        return node
    inline = re.fullmatch(r"data:([\w/+.-]+);base64,(.*)", target, flags=re.DOTALL)
    if inline is not None and inline[1] in SUFFIXES:
        node["c"][2][0] = store.save(base64.b64decode(inline[2]), SUFFIXES[inline[1]])
        return node
    file = folder / target
    if "://" in target or file.suffix not in SUFFIXES.values() or not file.is_file():
        return [{"t": "Emph", "c": node["c"][1] or inlines(target)}]
    node["c"][2][0] = store.save(file.read_bytes(), file.suffix)
    return node


NUMBER = re.compile(r"[-+−]?[\d,.]*\d[\d,.]*([eE][-+]?\d+)?\s*([%×x]|[A-Za-zµ/]{1,9})?|[-–—]|nan|NaN|inf|∞|")


def _free_columns(node: Node) -> None:
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
