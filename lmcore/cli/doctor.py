"""What this machine has for lmcore, and what it lacks: `lmcore doctor`."""

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable
from functools import partial
from json import dumps
from pathlib import Path

import psutil

from lmcore.errors import UserError

OPTIONAL_PACKAGES = {
    "pyarrow": ("WikiText-103, which comes as Parquet", "pip install pyarrow"),
    "triton": ("our kernels and torch.compile on a GPU", "it comes with the CUDA build of torch, on Linux"),
}
"""Packages that lmcore runs without: what each is for, and how to get it."""


def doctor(json: bool = False) -> int:
    """Say what this machine has: Python, torch, the device and why, disk, optional parts, data.

    Args:
        json: Print it as JSON.
    """
    facts = examine()
    width = max(map(len, facts)) + 2
    lines = "\n".join(f"{name:<{width}}{text}" for name, text in facts.items())
    print(dumps(facts, indent=2, ensure_ascii=False) if json else lines)
    return 0


def examine(folder: str | os.PathLike = ".") -> dict[str, str]:
    """What is here, by name, and what to do about what is not. `folder` is where runs/ and data/ are or will be."""
    import torch

    from lmcore.data import load_gpt2
    from lmcore.device import device_name, select_device
    from lmcore.profiling.nsys.tool import find_nsys
    from lmcore.provenance import environment

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
        "nsys": said(lambda: f"present {(nsys := find_nsys()).version} ({nsys.path})"),
        "GPT-2 tokenizer": said(lambda: load_gpt2(download=False) and "present"),
        **prepared_corpora(Path(folder) / "data"),
    }


def said(look: Callable[[], str]) -> str:
    """What is found, or why it is not."""
    try:
        return look()
    except UserError as error:
        return str(error)


def prepared_corpora(folder: Path) -> dict[str, str]:
    """The size of each prepared corpus in `folder`, or what is wrong with it."""
    from lmcore.data import open_data

    def size(corpus: Path) -> str:
        data = open_data(corpus)
        return f"{len(data.train):,} training and {len(data.valid):,} validation tokens"

    corpora = [manifest.parent for manifest in sorted(folder.glob("*/manifest.json"))]
    none = {"Corpora": "none prepared in data/; the embedded one needs nothing, others: lmcore data prepare"}
    return {str(corpus): said(partial(size, corpus)) for corpus in corpora} or none
