"""pandoc, from its wheel: Markdown as pandoc's document tree, and the tree changed and written out."""

import json
import re
import subprocess
from collections.abc import Callable
from typing import Any

Node = dict[str, Any]
"""One element of pandoc's tree as JSON has it: {"t": type, "c": content}."""

MARKDOWN = "commonmark_x+implicit_figures-emoji-fancy_lists-yaml_metadata_block-smart"
"""Markdown as Jupyter reads it (CommonMark, pipe tables, dollar math), plus attributes, footnotes and fenced divs."""

ATTRIBUTES_FIRST = ("Div", "Span", "CodeBlock", "Code", "Link", "Image", "Table", "Figure")
"""Nodes whose content begins with [identifier, classes, key-value pairs]."""

MARKUP = re.compile(r"""[\\`*_{}\[\]()#+.!|~$^>:=@'"<&-]""")


def run_pandoc(source: str, target: str, text: str) -> str:
    """A text from one format into another. Raises `RuntimeError` with pandoc's own words if it fails."""
    import pypandoc

    command = [pypandoc.get_pandoc_path(), "-f", source, "-t", target, "--wrap=none"]
    # in a session of its own: Ctrl-C is for the workbook, which ends in order
    done = subprocess.run(
        command, input=text, capture_output=True, encoding="utf-8", check=False, start_new_session=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"pandoc failed: {done.stderr.strip()}")
    return done.stdout


def parse(markdown: str) -> list[Node]:
    """The blocks of a Markdown text."""
    return json.loads(run_pandoc(MARKDOWN, "json", markdown))["blocks"]


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


def attributes_of(node: Node) -> list[Any]:
    """[identifier, classes, key-value pairs] of a node; of one that has none, an empty one."""
    if node["t"] == "Header":
        return node["c"][1]
    return node["c"][0] if node["t"] in ATTRIBUTES_FIRST else ["", [], []]


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


def escaped(text: str) -> str:
    """Text as Markdown that shows it as it is."""
    return MARKUP.sub(lambda match: f"&#{ord(match[0])};", text)
