"""What this machine has for lmcore, and what it lacks: `lmcore doctor`."""

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from lmcore.errors import UserError
from lmcore.recipes import RECIPES

OPTIONAL_PACKAGES = {
    "pyarrow": "for Parquet files, as which WikiText-103 comes, too: pip install pyarrow",
    "triton": "for our kernels and torch.compile on a GPU: it comes with the CUDA build of torch, on Linux",
}
"""Packages that lmcore runs without: what each is for, and how to get it."""


def doctor(measure: bool = False) -> int:
    """Say what this machine has; with --measure also how fast each recipe trains (on a CPU: smoke and laptop)."""
    for name, text in examine(measure=measure):
        print(f"{name:<24}{text}", flush=True)
    return 0


def examine(folder: str | os.PathLike = ".", measure: bool = False) -> Iterator[tuple[str, str]]:
    """What is here, by name, and what to do about what is not. `folder` is where runs/ and data/ are or will be."""
    import psutil
    import torch

    from lmcore.data import open_data
    from lmcore.data.tokenizers import gpt2_folder
    from lmcore.device import device_name, select_device
    from lmcore.profiling.nsys.tool import find_nsys, nsys_version
    from lmcore.profiling.runner import run_apart
    from lmcore.provenance import environment
    from lmcore.speed import kernels, training_speed
    from lmcore.tokenizer.files import find_files

    (device, reason), here = select_device(), environment()
    name, driver, cuda = device_name(device), here["driver"], torch.version.cuda
    if device.type == "cuda":
        name += f", {torch.cuda.get_device_properties(device).total_memory / 1e9:.0f} GB"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = {
        "Python": f"{platform.python_version()} ({sys.executable})",
        "Machine": f"{here['platform']}, {cores} cores, {psutil.virtual_memory().total / 1e9:.1f} GB memory",
        "torch": f"{torch.__version__}, built {f'for CUDA {cuda}' if cuda else 'without CUDA'}",
        "Device": f"{device.type} ({name}{f', driver {driver}' if driver else ''}), because {reason}",
        "Kernels": kernels(device),
        "Disk": f"{shutil.disk_usage(folder).free / 1e9:.1f} GB free here",
        "Code": here["git_commit"] or "not a git checkout",
    }
    for package, purpose in OPTIONAL_PACKAGES.items():
        facts[package] = "present" if importlib.util.find_spec(package) else f"missing, {purpose}"
    facts["nsys"] = said(lambda: f"present {nsys_version(nsys := find_nsys())} ({nsys})")
    facts["GPT-2 tokenizer"] = said(lambda: f"present ({find_files(gpt2_folder())[0].parent})")
    for manifest in sorted(Path(folder, "data").glob("*/manifest.json")):
        corpus = manifest.parent
        facts[str(corpus)] = said(lambda corpus=corpus: f"{len(open_data(corpus).train):,} training tokens")
    yield from facts.items()
    for name, config in RECIPES.items() if measure else ():
        if name in ("smoke", "laptop") or device.type != "cpu":  # elsewhere a step of the others takes minutes
            outcome, answer = run_apart(training_speed, (config,), timeout=300)
            yield name, answer if outcome == "complete" else f"{outcome}: {answer}"


def said(look: Callable[[], str]) -> str:
    """What is found, or why it is not."""
    try:
        return look()
    except UserError as error:
        return str(error)
