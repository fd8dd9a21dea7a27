"""Where a result comes from: everything that is needed to trust it and to repeat it."""

import contextlib
import datetime
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from itertools import dropwhile
from pathlib import Path
from typing import Any

import psutil

PACKAGES = (
    "torch", "numpy", "triton", "tiktoken", "gigatoken", "rustbpe", "safetensors", "einops", "transformers",
    "flash-attn-4", "liger-kernel", "cut-cross-entropy", "torchao",
)  # fmt: skip
KERNELS = ("ipykernel_launcher.py", "colab_kernel_launcher.py")
COMMAND = "LMCORE_COMMAND"
"""Variable in which a kernel finds what executes its notebook."""


def utc_now() -> str:
    """The current UTC time as ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def job_id() -> str | None:
    """Number of the Slurm job that this process belongs to, as "17", or "17_3" in an array; None outside of jobs."""
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"
    return os.environ.get("SLURM_JOB_ID")


def git_state() -> dict[str, Any]:
    """Commit of lmcore's code, and whether files that git tracks were changed since (None: unknown).

    Outside of lmcore's own checkout: what commit.txt holds, into which `git archive` and the archives of hosting sites
    write the commit, else the variable LMCORE_GIT_COMMIT.
    """
    folder = Path(__file__).parents[1]

    def git(*arguments: str) -> str | None:
        return said("git", "-C", str(folder), *arguments)

    # an lmcore installed into an environment inside someone else's checkout must not report that one's commit
    if git("rev-parse", "--show-toplevel") == str(folder.resolve()):
        dirty = bool(git("status", "--porcelain", "--untracked-files=no"))
        return {"git_commit": git("rev-parse", "HEAD"), "git_dirty": dirty}
    file = Path(__file__).with_name("commit.txt")
    exported = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
    known = exported if re.fullmatch("[0-9a-f]{40,64}", exported) else os.environ.get("LMCORE_GIT_COMMIT")
    return {"git_commit": known, "git_dirty": None}


def said(program: str, *arguments: str) -> str | None:
    """What a program prints; None if it is not there or fails."""
    if shutil.which(program) is None:
        return None
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def command_line() -> str:
    """The command as typed, without the folder of the program and those outside of the project.

    In a notebook's kernel, whose own arguments say nothing: what the variable LMCORE_COMMAND holds, else the name of
    the notebook in JupyterLab, else the command of papermill or the like.
    """
    words = sys.argv
    if Path(words[0]).name in KERNELS:
        if command := os.environ.get(COMMAND):
            return command
        if session := os.environ.get("JPY_SESSION_NAME"):
            return f"notebook {Path(session).stem}"
        with contextlib.suppress(psutil.Error):
            words = psutil.Process(os.getppid()).cmdline()
        words = [*dropwhile(lambda word: word == "-m" or Path(word).name.startswith("python"), words)] or words
    program = Path(words[0])
    name = shown(words[0]) if program.suffix == ".py" else program.name
    return shlex.join([program.parent.name if program.name == "__main__.py" else name, *map(shown, words[1:])])


def shown(word: str) -> str:
    """An argument, PATH or NAME=PATH, with an absolute path as it is from the working folder.

    Of one outside of it and of the project only the last part is shown: the rest is of that machine alone.
    """
    name, equals, path = word.rpartition("=")
    if not os.path.isabs(path):
        return word
    near = any(Path(path).is_relative_to(folder) for folder in (Path.cwd(), Path(__file__).parents[1]))
    return name + equals + (os.path.relpath(path) if near else f".../{Path(path).name}")


def version(package: str) -> str | None:
    """The version of an installed package; None without it."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def environment(device: Any = None) -> dict[str, Any]:
    """Machine, `device` (None: its best), versions, code and command: what a result should carry."""
    import torch

    from lmcore.device import device_name, select_device

    cuda = torch.cuda.is_available()
    drivers = said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "time_utc": utc_now(),
        "command": command_line(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "device": device_name(device or select_device()[0]),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "driver": drivers.splitlines()[0].strip() if drivers else None,
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "packages": {package: found for package in PACKAGES if (found := version(package))},
        **git_state(),
    }
