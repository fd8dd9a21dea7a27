"""Where a result comes from: everything that is needed to trust it and to repeat it."""

import contextlib
import datetime
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("torch", "numpy", "triton", "tiktoken", "safetensors", "einops", "transformers")

COMMIT_FILE = "commit.txt"
"""Into which `git archive` puts the commit, by .gitattributes."""

KERNELS = ("ipykernel_launcher.py", "colab_kernel_launcher.py")
COMMAND = "LMCORE_COMMAND"
"""Variable in which a kernel finds what executes its notebook."""
ELSEWHERE = "..."
"""Stands for the folders of a path outside of the project."""


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

    The first that knows it: git, in lmcore's own checkout; commit.txt, into which `git archive` and the archives of
    hosting sites write the commit; the variable LMCORE_GIT_COMMIT, for files that were copied in another way.
    """
    folder = Path(__file__).parents[1]

    def git(*arguments: str) -> str | None:
        return said("git", "-C", str(folder), *arguments)

    # an lmcore installed into an environment inside someone else's checkout must not report that one's commit
    own = git("rev-parse", "--show-toplevel") == str(folder.resolve())
    if own and (commit := git("rev-parse", "HEAD")) is not None:
        return {"git_commit": commit, "git_dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    return {"git_commit": exported_commit() or os.environ.get("LMCORE_GIT_COMMIT") or None, "git_dirty": None}


def said(program: str, *arguments: str) -> str | None:
    """What a program prints; None if it is not there or fails."""
    if shutil.which(program) is None:
        return None
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def exported_commit() -> str | None:
    """The commit that an archive of the repository has noted beside the code; None if none has."""
    file = Path(__file__).with_name(COMMIT_FILE)
    noted = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
    return noted if re.fullmatch("[0-9a-f]{40,64}", noted) else None


def gpu_driver() -> str | None:
    """Version of the NVIDIA driver, or None."""
    versions = said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return versions.splitlines()[0].strip() if versions else None


def package_versions() -> dict[str, str]:
    """Installed versions of the packages whose numbers could matter."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def command_line() -> str:
    """The command as typed, without the folder of the program and those outside of the project.

    In a notebook's kernel, whose own arguments say nothing: the command that executes the notebook, with all its
    parameters where lmcore runs it; in JupyterLab the notebook's name.
    """
    return notebook_command() if Path(sys.argv[0]).name in KERNELS else command_of(sys.argv)


def command_of(words: Sequence[str]) -> str:
    """A program and its arguments in one line that a shell would take."""
    program = Path(words[0])
    name = shown(words[0]) if program.suffix == ".py" else program.name
    name = program.parent.name if program.name == "__main__.py" else name.removeprefix(f"{ELSEWHERE}/")
    return shlex.join([name, *map(shown, words[1:])])


def shown(word: str) -> str:
    """An argument, PATH or NAME=PATH, with an absolute path as it is from the working folder.

    Of one outside of it and of the project only the last part is shown: the rest is of that machine alone.
    """
    name, equals, path = word.rpartition("=")
    if not os.path.isabs(path):
        return word
    near = any(Path(path).is_relative_to(folder) for folder in (Path.cwd(), Path(__file__).parents[1]))
    return name + equals + (os.path.relpath(path) if near else f"{ELSEWHERE}/{Path(path).name}")


@contextlib.contextmanager
def executing(notebook: str, parameters: Mapping[str, Any]) -> Iterator[None]:
    """Tells kernels that are started meanwhile which command executes which notebook, with which parameters."""
    values = {name: shown(value) if isinstance(value, str) else value for name, value in parameters.items()}
    given = ", ".join(f"{name}={json.dumps(value, default=str)}" for name, value in values.items())
    before = os.environ.get(COMMAND)
    os.environ[COMMAND] = f"{command_line()} (notebook {notebook}: {given or 'defaults'})"
    try:
        yield
    finally:
        os.environ.pop(COMMAND) if before is None else os.environ.update({COMMAND: before})


def notebook_command() -> str:
    """What executes the notebook of this kernel: lmcore, which says so, papermill or the like, or Jupyter."""
    if command := os.environ.get(COMMAND):
        return command
    with contextlib.suppress(psutil.Error):
        words = psutil.Process().parent().cmdline()
        if any(word.endswith(".ipynb") for word in words):
            module = words[1:2] == ["-m"]
            return command_of(words[2:] if module else words[Path(words[0]).name.startswith("python") :])
    name = Path(os.environ.get("JPY_SESSION_NAME", "")).name  # which Jupyter's server sets
    return f"notebook {name.removesuffix('.ipynb')}" if name.endswith(".ipynb") else "a notebook"


def torch_build() -> dict[str, Any]:
    """PyTorch's version, CUDA's, and the device that it takes by default.

    A build for CPUs alone is told by its version, so that it need not be imported, which takes seconds.
    """
    version = metadata.version("torch")
    if version.endswith("+cpu") and sys.platform != "darwin" and "torch" not in sys.modules:
        return {"torch": version, "cuda": None, "device": "CPU", "gpu": None}
    import torch

    from lmcore.device import device_name, select_device

    cuda = torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "device": device_name(select_device()[0]),
        "gpu": torch.cuda.get_device_name() if cuda else None,
    }


def environment() -> dict[str, Any]:
    """Everything about the machine and the code that a result should carry."""
    return {
        "time_utc": utc_now(),
        "command": command_line(),
        "python": platform.python_version(),
        **torch_build(),
        "driver": gpu_driver(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "packages": package_versions(),
        **git_state(),
    }
