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

OPTIONAL_PACKAGES = {
    "pyarrow": ("WikiText-103, which comes as Parquet", "pip install pyarrow"),
    "tensorboard": ("watching training in TensorBoard", "pip install tensorboard"),
    "wandb": ("watching training in Weights & Biases", "pip install wandb"),
    "triton": ("our kernels and torch.compile on a GPU", "it comes with the CUDA build of torch, on Linux"),
}
"""Packages that lmcore runs without: what each is for, and how to get it."""


def examine(folder: str | os.PathLike = ".") -> dict[str, Any]:
    """Everything the report says, as plain data. `folder` is where runs/ and data/ are or will be."""
    device, reason = select_device()
    here = environment()
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    packages = [
        {"name": name, "present": bool(importlib.util.find_spec(name)), "purpose": purpose, "remedy": remedy}
        for name, (purpose, remedy) in OPTIONAL_PACKAGES.items()
    ]
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
        "optional": [*packages, nsight_systems(), slurm()],
        "data": {"prepared": prepared_corpora(Path(folder) / "data"), "gpt2_tokenizer": gpt2_tokenizer()},
    }


def nsight_systems() -> dict[str, Any]:
    """The part of Nsight Systems, which hides in many places: its version and where it is."""
    part = {"name": "nsys", "purpose": "profiling with Nsight Systems, without which torch.profiler is used"}
    try:
        nsys = find_nsys()
    except UserError:
        return part | {"present": False, "remedy": INSTALL}
    return part | {"present": True, "detail": f"{nsys.version} ({nsys.path})"}


def slurm() -> dict[str, Any]:
    """The part of Slurm: whether its controller answers, and then the partitions that have GPUs."""
    part = {"name": "slurm", "purpose": "jobs on a cluster"}
    if shutil.which("sbatch") is None:
        return part | {"present": False, "remedy": "log in to a cluster's front end"}
    try:
        command = ["sinfo", "--noheader", "--format=%R %G"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return part | {"present": True, "detail": f"its controller does not answer ({error})"}
    gpus = [f"{name} ({gpu})" for name, gpu in map(str.split, sorted(set(shown.splitlines()))) if "gpu" in gpu]
    return part | {"present": True, "detail": f"GPUs in {', '.join(gpus)}" if gpus else "no partition with GPUs"}


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
    memory = f", {device['memory_bytes'] / 1e9:.0f} GB" if device["memory_bytes"] else ""
    driver = f", driver {facts['driver']}" if facts["driver"] else ""
    cuda = f", built for CUDA {facts['torch']['cuda']}" if facts["torch"]["cuda"] else ", built without CUDA"
    lines = [
        ("Python", f"{facts['python']['version']} ({facts['python']['executable']})"),
        ("Machine", f"{facts['platform']}, {facts['cores']} cores, {facts['memory_bytes'] / 1e9:.1f} GB memory"),
        ("torch", f"{facts['torch']['version']}{cuda}"),
        ("Device", f"{device['type']} ({device['name']}{memory}{driver}), because {device['reason']}"),
        ("Disk", f"{facts['disk_free_bytes'] / 1e9:.1f} GB free here"),
        ("Code", facts["git_commit"] or "not a git checkout"),
    ]
    for part in facts["optional"]:
        state = f"present {part.get('detail', '')}".strip() if part["present"] else f"missing: {part['remedy']}"
        lines.append((part["name"], f"{state} — for {part['purpose']}"))
    lines.append(("GPT-2 tokenizer", "present" if gpt2["present"] else f"missing: {gpt2['error']}"))
    for corpus in facts["data"]["prepared"]:
        sizes = "{train_tokens:,} training and {valid_tokens:,} validation tokens"
        lines.append((corpus["folder"], corpus["error"] or sizes.format(**corpus)))
    if not facts["data"]["prepared"]:
        lines.append(("Corpora", "none prepared in data/; the embedded one needs nothing, others: lmcore data prepare"))
    width = max(len(name) for name, _ in lines) + 2
    return "\n".join(f"{name:<{width}}{text}" for name, text in lines)
