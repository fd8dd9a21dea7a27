"""Rewrites the commands of records that name a Jupyter kernel and its temporary file: what is known is the notebook.

One record is changed in one line; numbers stay as they are. Run once, from the project's folder.
"""

import re
from pathlib import Path

NOTEBOOKS = {
    "generate": "03_generate",
    "benchmark": "04_benchmark",
    "warmup": "04_benchmark",
    "components": "04_benchmark",
    "study": "04_benchmark",
    "nsys": "05_nsys",
    "memory": "06_memory",
    "kernels": "07_kernels",
}
"""Notebook that wrote the tables whose names begin so. Those of one notebook named the same kernel."""

for path in sorted(Path("results/h200").glob("*.json")):
    notebook = next((name for start, name in NOTEBOOKS.items() if path.stem.startswith(start)), None)
    command = f"lmcore workbook --scale gpu (notebook {notebook}: parameters not recorded)"
    text = path.read_text(encoding="utf-8")
    changed = re.sub(r'(?<="command": ")ipykernel_launcher\.py [^"]*', command, text)
    if changed != text:
        path.write_text(changed, encoding="utf-8")
        print(f"{path}: {command}")
