"""Copies an executed workbook into a folder that is committed: notebooks with small pictures, the writeup, figures.

`python results/publish.py runs/record writeup/h200`: `make record` calls it.
"""

import ast
import base64
import io
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

from lmcore.errors import UserError, require
from lmcore.files import atomic_write, temporary_folder
from workbook.notebook import CLEAN_METADATA, INJECTED, KEPT_METADATA, read_notebook, tags, write_notebook
from workbook.record import read_records, unfinished
from workbook.report.contents import caption_of
from workbook.report.writeup import write_writeup
from workbook.seal import SEAL, cell_hashes

PICTURE_PPI, PICTURE_COLORS = 110, 128
"""Of the pictures in published notebooks."""

PICTURES = "(../figures/pictures/"
"""Where notebooks/ has them, in Markdown."""

MACHINE_PATH = r"(?<![\w.:/])/(?:home|Users|root|tmp|work|scratch|mnt|data|gpfs|nfs)/[\w./-]+"
"""Absolute paths as they are on somebody's machine."""


def publish(out: Path, to: Path) -> list[Path]:
    """Makes the writeup of the workbook in `out`, and copies it, the notebooks and the figures into `to`.

    Published notebooks hold pictures as PNG with their captions, a sentence in place of the parameters of the run, and
    no names of files and machines. Raises `UserError` where a notebook is not done, or one still names such a thing.
    """
    records = read_records(out)
    lacking = unfinished(records)
    require(not lacking, f"{''.join(lacking[:1])} Only a complete workbook is published.")
    figures = sorted((out / "figures").glob("*.svg"))
    for file in figures:
        refuse_machine_names(file.name, file.read_text(encoding="utf-8"))
    pdfs = write_writeup(out)
    sources = {to / file.name: file for file in pdfs} | {to / "figures" / file.name: file for file in figures}
    names = [f"{record.name}.ipynb" for record in records]
    made = {to / "notebooks" / name: published(out / "notebooks" / name) for name in names}
    for path, source in sources.items():
        with atomic_write(path) as file:
            file.write(source.read_bytes())
    for path, notebook in made.items():
        write_notebook(path, notebook)
    present = {*to.glob("*.pdf"), *(to / "figures").glob("*.svg"), *(to / "notebooks").glob("*.ipynb")}
    for old in present - {*sources, *made}:
        old.unlink()  # of an earlier workbook
    return [*sources, *made]


def published(executed: Path) -> Any:
    """An executed notebook without what belongs to its run; see `publish`."""
    import nbformat

    notebook = read_notebook(executed)
    for number, cell in enumerate(notebook.cells):
        if INJECTED in tags(cell):
            notebook.cells[number] = nbformat.v4.new_markdown_cell(executed_with(cell.source), id=cell.id)
    notebook.metadata = nbformat.from_dict(CLEAN_METADATA | {SEAL: notebook.metadata[SEAL]})
    count = 0
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "markdown":  # the pictures that explain stand once in the project
            cell.source = cell.source.replace(PICTURES, PICTURES.replace("../", "../../../"))
        cell.metadata = nbformat.from_dict({k: v for k, v in cell.metadata.items() if k in KEPT_METADATA})
        if cell.cell_type != "code":
            continue
        given, cell.outputs = cell.outputs, []
        for output in given:
            if output.get("name") == "stderr":
                continue
            cell.outputs.append(output)
            data = output.get("data", {})
            count += "image/svg+xml" in data or "image/png" in data
            if svg := data.get("image/svg+xml"):
                caption = caption_of(cell, output, "image/svg+xml")
                output.metadata.pop("image/svg+xml", None)
                output.data = nbformat.from_dict({"image/png": base64.b64encode(as_png(svg)).decode()})
                text = f"*Figure {count}.* {caption}"
                cell.outputs += [nbformat.v4.new_output("display_data", {"text/markdown": text})] if caption else []
            texts = [str(value) for kind, value in output.get("data", {}).items() if "png" not in kind]
            refuse_machine_names(f"{executed.stem}, cell {number}", "\n".join([*texts, str(output.get("text", ""))]))
    notebook.metadata[SEAL]["cells"] = cell_hashes(notebook)
    return notebook


def executed_with(injected: str) -> str:
    """A sentence with the parameters of a run, from the cell that papermill puts in, without paths."""
    lines = [ast.unparse(line) for line in ast.parse(injected).body]
    shown = [f"`{line}`" for line in lines if not re.search("""['"][^'"]*/""", line) and "\n" not in line]
    return f"*Executed with other parameters than these defaults:* {', '.join(shown)}." if shown else ""


def as_png(svg: str) -> bytes:
    """A vector picture as a small PNG on white, drawn by Typst."""
    import typst
    from PIL import Image

    with temporary_folder("lmcore-png-") as folder:
        Path(folder, "picture.svg").write_text(svg, encoding="utf-8")
        page = '#set page(width: auto, height: auto, margin: 0pt, fill: white)\n#image("picture.svg")'
        Path(folder, "page.typ").write_text(page, encoding="utf-8")
        drawn = typst.compile(str(Path(folder, "page.typ")), root=str(folder), format="png", ppi=PICTURE_PPI)
    packed = io.BytesIO()
    Image.open(io.BytesIO(drawn)).convert("RGB").quantize(PICTURE_COLORS).save(packed, "PNG", optimize=True)
    return packed.getvalue()


def refuse_machine_names(place: str, text: str) -> None:
    """Raises `UserError` at the first path or name of this machine in a text."""
    names = [name for name in (socket.gethostname(), os.environ.get("SLURMD_NODENAME")) if name and len(name) > 3]
    for pattern in (MACHINE_PATH, *(rf"\b{re.escape(name)}\b" for name in names)):
        if found := re.search(pattern, text):
            words = f"{place} names something of this machine, {found[0]!r}: print less there, then run it again."
            raise UserError(words)


if __name__ == "__main__":
    files = publish(Path(sys.argv[1]), Path(sys.argv[2]))
    print(f"{sys.argv[2]}: {len(files)} files, {sum(file.stat().st_size for file in files) / 1e6:.1f} MB.")
