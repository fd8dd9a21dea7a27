"""pandoc, from its wheel: parsing Markdown and HTML into pandoc's document tree, and writing the tree out."""

import json
import re
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lmcore.files import temporary_folder

Node = dict[str, Any]
"""One element of pandoc's tree as JSON has it: {"t": type, "c": content}."""

MARKDOWN = "commonmark_x-emoji-fancy_lists-yaml_metadata_block-smart"
"""Markdown as Jupyter reads it (CommonMark, pipe tables, dollar math), plus attributes and footnotes."""

SEPARATOR = "lmcore-next-piece"


@cache
def pandoc_path() -> str:
    """The pandoc binary inside pypandoc_binary, or on PATH."""
    import pypandoc

    return pypandoc.get_pandoc_path()


def run_pandoc(arguments: Sequence[str], text: str = "", folder: Path | None = None) -> tuple[str, list[str]]:
    """Standard output and warnings. Raises `RuntimeError` with pandoc's own words if it fails."""
    command = [pandoc_path(), *arguments]
    done = subprocess.run(command, input=text, capture_output=True, encoding="utf-8", cwd=folder, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"pandoc failed: {done.stderr.strip()}")
    return done.stdout, [line for line in done.stderr.splitlines() if line.strip()]


def parse(texts: Sequence[str], source: str = MARKDOWN) -> list[list[Node]]:
    """The blocks of each text. The texts cannot touch one another: an open fence ends with its own text.

    One process parses them all. Identifiers and links to them come back as the text has them, so they may repeat.
    """
    if not texts:
        return []
    with temporary_folder("lmcore-pandoc-") as folder:
        separator = Path(folder, "separator")
        separator.write_text(f"{SEPARATOR}\n" if source == MARKDOWN else f"<p>{SEPARATOR}</p>\n", encoding="utf-8")
        names = []
        for number, text in enumerate(texts):
            Path(folder, f"piece{number}").write_text(text + "\n", encoding="utf-8")
            names += [f"piece{number}", separator.name]
        output, _ = run_pandoc(["--file-scope", "-f", source, "-t", "json", *names], folder=Path(folder))
    pieces: list[list[Node]] = [[]]
    for block in json.loads(output)["blocks"]:
        if block["t"] == "Para" and block["c"] == [{"t": "Str", "c": SEPARATOR}]:
            pieces.append([])
        else:
            pieces[-1].append(transform(block, _undo_file_scope))
    return pieces[:-1]


def _undo_file_scope(node: Node) -> Node:
    """--file-scope prefixes identifiers and links with the file's name."""

    def plain(identifier: str) -> str:
        return re.sub(r"^(#?)piece\d+__", r"\1", identifier)

    if node["t"] in ATTRIBUTES_FIRST:
        node["c"][0][0] = plain(node["c"][0][0])
    elif node["t"] == "Header":
        node["c"][1][0] = plain(node["c"][1][0])
    if node["t"] == "Link":
        node["c"][2][0] = plain(node["c"][2][0])
    return node


ATTRIBUTES_FIRST = ("Div", "Span", "CodeBlock", "Code", "Link", "Image", "Table", "Figure")
"""Nodes whose content begins with [identifier, classes, key-value pairs]."""


def transform(node: Any, change: Callable[[Node], Any]) -> Any:
    """A copy of a tree with `change` applied to each node, children first. `change` may return a list of nodes."""
    if isinstance(node, list):
        result: list[Any] = []
        for item in node:
            changed = transform(item, change)
            is_spliced = isinstance(changed, list) and isinstance(item, dict)
            result.extend(changed) if is_spliced else result.append(changed)
        return result
    if isinstance(node, dict):
        copy = {key: transform(value, change) for key, value in node.items()}
        return change(copy) if "t" in copy else copy
    return node


def text_of(node: Any) -> str:
    """The plain text of a tree."""
    if isinstance(node, list):
        return "".join(text_of(item) for item in node)
    if isinstance(node, dict):
        if node.get("t") in ("Space", "SoftBreak", "LineBreak"):
            return " "
        if node.get("t") in ("Code", "Math", "CodeBlock", "RawInline", "RawBlock"):
            return node["c"][1]
        if node.get("t") == "Str":
            return node["c"]
        return text_of(node.get("c", []))
    return ""


def inlines(text: str) -> list[Node]:
    """Text as words and spaces."""
    words: list[Node] = []
    for word in text.split():
        words += [{"t": "Str", "c": word}, {"t": "Space"}]
    return words[:-1]


def para(*content: Node) -> Node:
    """A paragraph of inlines."""
    return {"t": "Para", "c": list(content)}


def strong(text: str) -> Node:
    """Bold text."""
    return {"t": "Strong", "c": inlines(text)}


def link(text: str, target: str) -> Node:
    """A link."""
    return {"t": "Link", "c": [["", [], []], inlines(text), [target, ""]]}


def header(level: int, identifier: str, text: str) -> Node:
    """A heading."""
    return {"t": "Header", "c": [level, [identifier, [], []], inlines(text)]}


def div(blocks: list[Node], identifier: str = "", *classes: str) -> Node:
    """Blocks with an identifier and classes."""
    return {"t": "Div", "c": [[identifier, list(classes), []], blocks]}


def code_block(text: str) -> Node:
    """Preformatted text."""
    return {"t": "CodeBlock", "c": [["", [], []], text]}


def figure(target: str, caption: list[Node]) -> Node:
    """A picture, with its caption if there is one."""
    image = {"t": "Image", "c": [["", [], []], inlines(text_of(caption).replace("\\", "")), [target, ""]]}
    if not caption:
        return div([para(image)], "", "figure")
    return {"t": "Figure", "c": [["", [], []], [None, [{"t": "Plain", "c": caption}]], [{"t": "Plain", "c": [image]}]]}


def table(rows: Sequence[Sequence[list[Node]]], head: Sequence[str] = ()) -> Node:
    """A table of inline cells, with a head row if one is given."""

    def cell(content: list[Node]) -> list[Any]:
        return [["", [], []], {"t": "AlignDefault"}, 1, 1, [{"t": "Plain", "c": content}]]

    def row(cells: Sequence[list[Node]]) -> list[Any]:
        return [["", [], []], [cell(content) for content in cells]]

    columns = [[{"t": "AlignDefault"}, {"t": "ColWidthDefault"}] for _ in range(len(rows[0]))]
    heads = [row([inlines(text) for text in head])] if head else []
    body = [["", [], []], 0, [], [row(cells) for cells in rows]]
    return {"t": "Table", "c": [["", [], []], [None, []], columns, [["", [], []], heads], [body], [["", [], []], []]]}
