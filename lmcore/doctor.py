"""What this machine has for lmcore, and what it lacks: `lmcore doctor`."""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import torch

from lmcore.data import load_gpt2, open_data
from lmcore.device import device_name, select_device
from lmcore.errors import UserError
from lmcore.profiling.nsys.tool import find_nsys
from lmcore.provenance import environment

OPTIONAL_PACKAGES = {
    "pyarrow": ("WikiText-103, which comes as Parquet", "pip install pyarrow"),
    "tensorboard": ("watching training in TensorBoard", "pip install tensorboard"),
    "wandb": ("watching training in Weights & Biases", "pip install wandb"),
    "triton": ("our kernels and torch.compile on a GPU", "it comes with the CUDA build of torch, on Linux"),
}
"""Packages that lmcore runs without: what each is for, and how to get it."""


def examine(folder: str | os.PathLike = ".") -> dict[str, str]:
    """What is here, by name, and what to do about what is not. `folder` is where runs/ and data/ are or will be."""
    (device, reason), here = select_device(), environment()
    name, driver, cuda = device_name(device), here["driver"], torch.version.cuda
    if device.type == "cuda":
        name += f", {torch.cuda.get_device_properties(device).total_memory / 1e9:.0f} GB"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    packages = {
        name: f"{'present' if importlib.util.find_spec(name) else f'missing: {remedy}'} — for {purpose}"
        for name, (purpose, remedy) in OPTIONAL_PACKAGES.items()
    }
    return {
        "Python": f"{platform.python_version()} ({sys.executable})",
        "Machine": f"{here['platform']}, {cores} cores, {psutil.virtual_memory().total / 1e9:.1f} GB memory",
        "torch": f"{torch.__version__}, built {f'for CUDA {cuda}' if cuda else 'without CUDA'}",
        "Device": f"{device.type} ({name}{f', driver {driver}' if driver else ''}), because {reason}",
        "Disk": f"{shutil.disk_usage(folder).free / 1e9:.1f} GB free here",
        "Code": here["git_commit"] or "not a git checkout",
        **packages,
        "nsys": nsight_systems(),
        "slurm": slurm(),
        "GPT-2 tokenizer": gpt2_tokenizer(),
        **prepared_corpora(Path(folder) / "data"),
    }


def nsight_systems() -> str:
    """Nsight Systems, which hides in many places: its version and where it is."""
    try:
        nsys = find_nsys()
    except UserError as error:
        return f"missing, so that torch.profiler is used: {error}"
    return f"present {nsys.version} ({nsys.path}) — for profiling"


def slurm() -> str:
    """Whether Slurm's controller answers, and then the partitions that have GPUs."""
    if shutil.which("sbatch") is None:
        return "missing: log in to a cluster's front end — for jobs on a cluster"
    try:
        command = ["sinfo", "--noheader", "--format=%R %G"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"present, but its controller does not answer ({error})"
    gpus = [f"{name} ({gpu})" for name, gpu in map(str.split, sorted(set(shown.splitlines()))) if "gpu" in gpu]
    return f"present, GPUs in {', '.join(gpus)}" if gpus else "present, no partition with GPUs"


def gpt2_tokenizer() -> str:
    """Whether GPT-2's tokenizer can be had without a download."""
    try:
        load_gpt2(download=False)
    except UserError as error:
        return f"missing: {error}"
    return "present"


def prepared_corpora(folder: Path) -> dict[str, str]:
    """The size of each prepared corpus in `folder`, or what is wrong with it."""
    corpora = {}
    for manifest in sorted(folder.glob("*/manifest.json")):
        try:
            data = open_data(manifest.parent)
            found = f"{len(data.train):,} training and {len(data.valid):,} validation tokens"
        except UserError as error:
            found = str(error)
        corpora[str(manifest.parent)] = found
    return corpora or {"Corpora": "none prepared in data/; the embedded one needs nothing, others: lmcore data prepare"}


def as_text(facts: dict[str, str]) -> str:
    """The facts as aligned lines."""
    width = max(map(len, facts)) + 2
    return "\n".join(f"{name:<{width}}{text}" for name, text in facts.items())
