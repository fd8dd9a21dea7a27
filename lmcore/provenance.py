"""Where a result comes from: everything that is needed to trust it and to repeat it (plan of the house, section 4)."""

import datetime
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from lmcore.device import device_name, select_device

PACKAGES = ("torch", "numpy", "triton", "tiktoken", "safetensors", "einops", "transformers")


def utc_now() -> str:
    """The current UTC time as ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def job_id() -> str | None:
    """Number of the batch job that this process belongs to: "17", "17_3" for a task of an array; None outside of jobs.

    LMCORE_JOB_ID is the number of a job that runs without Slurm.
    """
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"
    return os.environ.get("SLURM_JOB_ID") or os.environ.get("LMCORE_JOB_ID")


def git_state() -> dict[str, Any]:
    """Commit of lmcore's checkout and whether it holds changes.

    The variable LMCORE_GIT_COMMIT goes before it, for where the files were copied without their history.
    """
    if commit := os.environ.get("LMCORE_GIT_COMMIT"):
        return {"git_commit": commit, "git_dirty": None}
    folder = Path(__file__).parents[1]

    def git(*arguments: str) -> str | None:
        if shutil.which("git") is None:
            return None
        done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    # an lmcore installed into an environment inside someone else's checkout must not report that one's commit
    own = git("rev-parse", "--show-toplevel") == str(folder.resolve())
    commit = git("rev-parse", "HEAD") if own else None
    if commit is None:
        return {"git_commit": None, "git_dirty": None}
    return {"git_commit": commit, "git_dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}


def gpu_driver() -> str | None:
    """Version of the NVIDIA driver, or None."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else None


def package_versions() -> dict[str, str]:
    """Installed versions of the packages whose numbers could matter."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def command_line() -> str:
    """The command as typed, with the program's folder left out and paths relative to the working folder."""
    arguments = [os.path.relpath(word) if os.path.isabs(word) else word for word in sys.argv[1:]]
    program = Path(sys.argv[0])
    return " ".join([program.parent.name if program.name == "__main__.py" else program.name, *arguments])


def environment() -> dict[str, Any]:
    """Everything about the machine and the code that a result should carry."""
    cuda = torch.cuda.is_available()
    return {
        "time_utc": utc_now(),
        "command": command_line(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "device": device_name(select_device()[0]),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "driver": gpu_driver(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "packages": package_versions(),
        **git_state(),
    }
