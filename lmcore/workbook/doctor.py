"""What this machine has for lmcore, and what it lacks: `lmcore doctor`."""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

from lmcore.data import load_gpt2, open_data
from lmcore.device import device_name, select_device
from lmcore.errors import UserError
from lmcore.profiling.nsys.tool import INSTALL, find_nsys
from lmcore.provenance import environment
from lmcore.workbook.report.answers import format_bytes, join_words

OPTIONAL_PARTS = {
    "jupyterlab": ("working in the notebooks (make lab)", "pip install jupyterlab"),
    "nbval": ("checking the notebooks (make test)", "pip install -e .[dev]"),
    "pytest": ("the tests (make test)", "pip install -e .[dev]"),
    "pypdf": ("checking the writeup's PDF", "pip install -e .[dev]"),
    "pyarrow": ("WikiText-103, which comes as Parquet", "pip install -e .[wikitext]"),
    "tensorboard": ("watching training in TensorBoard", "pip install -e .[tensorboard]"),
    "wandb": ("watching training in Weights & Biases", "pip install -e .[wandb]"),
    "triton": ("our kernels and torch.compile on a GPU", "comes with the CUDA build of torch, on Linux"),
    "shellcheck": ("checking the job scripts (make test)", "it is in most systems' packages"),
}
"""Modules, and one program, that lmcore runs without: what each is for, and how to get it."""


def examine(folder: str | os.PathLike = ".") -> dict[str, Any]:
    """Everything the report says, as plain data. `folder` is where runs/ and data/ are or will be."""
    device, reason = select_device()
    here = environment()
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return {
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "platform": here["platform"],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "torch": {"version": torch.__version__, "cuda": torch.version.cuda},
        "device": {"type": device.type, "name": device_name(device), "reason": reason, "memory_bytes": memory},
        "driver": here["driver"],
        "git_commit": here["git_commit"],
        "disk_free_bytes": shutil.disk_usage(folder).free,
        "optional": [*optional_parts(), nsight_systems(), slurm()],
        "data": {"prepared": prepared_corpora(Path(folder) / "data"), "gpt2_tokenizer": gpt2_tokenizer()},
    }


def optional_parts() -> list[dict[str, Any]]:
    """Parts that lmcore runs without: whether each is there, what it is for and how to get it."""
    there = {name: bool(importlib.util.find_spec(name) or shutil.which(name)) for name in OPTIONAL_PARTS}
    return [
        {"name": name, "present": there[name], "purpose": purpose, "remedy": remedy}
        for name, (purpose, remedy) in OPTIONAL_PARTS.items()
    ]


def nsight_systems() -> dict[str, Any]:
    """The part of Nsight Systems, which hides in many places: its version and where it is."""
    part = {"name": "nsys", "purpose": "profiling with Nsight Systems, without which torch.profiler is used"}
    try:
        nsys = find_nsys()
    except UserError:
        return part | {"present": False, "remedy": INSTALL}
    detail = f"{nsys.version} ({nsys.path})"
    return part | {"present": True, "remedy": "", "detail": detail}


def slurm() -> dict[str, Any]:
    """The part of Slurm: its version, whether its controller answers, and then the partitions that have GPUs."""
    part = {"name": "slurm", "purpose": "jobs on a cluster, without which lmcore submit runs them here"}
    if shutil.which("sbatch") is None:
        return part | {"present": False, "remedy": "log in to a cluster's front end"}
    version = said("sbatch", "--version")[1].strip().rpartition(" ")[2] or "version unknown"
    code, shown, complaint = said("sinfo", "--noheader", "--format=%R|%G")
    partitions: dict[str, set[str]] = {}
    for name, _, resources in (line.strip().partition("|") for line in shown.splitlines()):
        found = [resource.partition("(")[0] for resource in resources.split(",") if resource.startswith("gpu")]
        partitions.setdefault(name, set()).update(found)
    gpus = [f"{name} ({' or '.join(sorted(found))})" for name, found in partitions.items() if found]
    places = f"GPUs in {join_words(gpus)}" if gpus else "no partition with GPUs"
    detail = f", {len(partitions)} partition{'' if len(partitions) == 1 else 's'}, {places}"
    if code != 0:
        detail = f"; its controller does not answer ({(complaint.splitlines() or ['sinfo said nothing'])[-1]})"
    return part | {"present": True, "remedy": "", "detail": version + detail}


def said(*command: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a program, which has ten seconds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, "", str(error)
    return done.returncode, done.stdout, done.stderr


def prepared_corpora(folder: Path) -> list[dict[str, Any]]:
    """Prepared corpora in `folder`, each with its size, or with what is wrong with it."""
    corpora = []
    for manifest in sorted(folder.glob("*/manifest.json")):
        try:
            data = open_data(manifest.parent)
            state = {"train_tokens": len(data.train), "valid_tokens": len(data.valid), "error": None}
        except UserError as error:
            state = {"error": str(error)}
        corpora.append({"folder": str(manifest.parent), **state})
    return corpora


def gpt2_tokenizer() -> dict[str, Any]:
    """Whether GPT-2's tokenizer can be had without a download."""
    try:
        load_gpt2(download=False)
    except UserError as error:
        return {"present": False, "error": str(error)}
    return {"present": True, "error": None}


def as_text(facts: dict[str, Any]) -> str:
    """The facts as aligned lines, a sentence for each thing that is missing."""
    device, gpt2 = facts["device"], facts["data"]["gpt2_tokenizer"]
    memory = f", {format_bytes(device['memory_bytes'])}" if device["memory_bytes"] else ""
    driver = f", driver {facts['driver']}" if facts["driver"] else ""
    cuda = f", built for CUDA {facts['torch']['cuda']}" if facts["torch"]["cuda"] else ", built without CUDA"
    lines = [
        ("Python", f"{facts['python']['version']} ({facts['python']['executable']})"),
        ("Machine", f"{facts['platform']}, {facts['cores']} cores, {format_bytes(facts['memory_bytes'])} memory"),
        ("torch", f"{facts['torch']['version']}{cuda}"),
        ("Device", f"{device['type']} ({device['name']}{memory}{driver}), because {device['reason']}"),
        ("Disk", f"{format_bytes(facts['disk_free_bytes'])} free here"),
        ("Code", facts["git_commit"] or "not a git checkout"),
    ]
    for part in facts["optional"]:
        detail = f" {part['detail']}" if part.get("detail") else ""
        state = f"present{detail}" if part["present"] else f"missing; to get it: {part['remedy']}"
        lines.append((part["name"], f"{state} — for {part['purpose']}"))
    lines.append(("GPT-2 tokenizer", "present" if gpt2["present"] else f"missing: {gpt2['error']}"))
    for corpus in facts["data"]["prepared"]:
        sizes = "{train_tokens:,} training and {valid_tokens:,} validation tokens"
        lines.append((corpus["folder"], corpus["error"] or sizes.format(**corpus)))
    if not facts["data"]["prepared"]:
        lines.append(("Corpora", "none prepared in data/; the embedded one needs nothing, others: lmcore data prepare"))
    width = max(len(name) for name, _ in lines) + 2
    return "\n".join(f"{name:<{width}}{text}" for name, text in lines)
