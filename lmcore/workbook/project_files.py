"""The project's own files: what is code and text of it, and what was made by it, is too large, or is secret."""

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

import nbformat

from lmcore.errors import UserError, require
from lmcore.workbook.notebook import read_notebook

MAX_FILE_BYTES = 5_000_000
"""Larger files are left out: data, or what the code has made."""

MADE_FOLDERS = ("runs", "data", "submission", "build", "dist")
"""Folders at the top of the project that hold what was made, downloaded or handed in."""

CACHES = [
    "__pycache__",
    ".git",
    ".hg",
    ".venv",
    "venv",
    ".tox",
    "node_modules",
    "wandb",
    ".ipynb_checkpoints",
    ".*_cache",
    ".hypothesis",
    ".idea",
    ".vscode",
    "*.egg-info",
]
MADE_FILES = [
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.safetensors",
    "*.bin",
    "*.npy",
    "*.npz",
    "*.pickle",
    "*.pkl",
    "*.nsys-rep",
    "*.damaged",
    "*.pyc",
    "*.tmp",
    "*.zip",
    "*.whl",
    "*.log",
    ".DS_Store",
    ".coverage",
    "slurm-*.out",
]
"""Checkpoints, token files, reports of profilers, logs, archives."""

SECRET_FILES = [
    ".env",
    ".env.*",
    "*.env",
    ".envrc",
    "*.pem",
    "*.key",
    "*.p12",
    "*.pfx",
    "id_rsa*",
    "id_dsa*",
    "id_ecdsa*",
    "id_ed25519*",
    ".netrc",
    "_netrc",
    ".pypirc",
    ".npmrc",
    ".git-credentials",
    ".htpasswd",
    "credentials*",
    "kaggle.json",
]
SECRET_WORDS = {"token", "secret", "secrets", "password", "passwords", "apikey"}
"""A word of these in a file's name makes it a secret's, unless it is code: hf_token.txt is one, tokenizer.py is not."""

CODE_SUFFIXES = (".py", ".ipynb", ".md", ".sh", ".sbatch")

SECRETS = {
    "a private key": rb"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----",
    "a Hugging Face token": rb"\bhf_[A-Za-z0-9]{30,}",
    "a GitHub token": rb"\b(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_\w{40})",
    "an AWS access key": rb"\bAKIA[0-9A-Z]{16}\b",
    "an API key": rb"(?i)key\b\\?[\"']?\s*[:=]\s*\\?[\"']?[0-9a-f]{40}\b",
}
"""What keys look like. The last is one of Weights & Biases, 40 hexadecimal digits, where it is given to a key."""


def project_files(project: Path, excluded: Sequence[Path] = ()) -> tuple[list[Path], dict[str, list[str]]]:
    """The files that are the project, relative to it and sorted, and the names of the others by the reason.

    Those of a checkout are what git tracks and what it does not ignore; without git, all files but those of folders
    that are known to be made. `excluded` folders are left out with all that they hold.
    """
    require(project.is_dir(), f"There is no project folder {project}.")
    excluded = [folder.resolve() for folder in excluded]
    found, left_out = git_files(project) or ([], {})
    if not found:
        found, left_out = list(walk(project.resolve(), project.resolve(), left_out)), left_out
    kept = []
    for file in sorted(found):
        reason = why_left_out(project / file, file, excluded)
        if reason is None:
            kept.append(file)
        else:
            left_out.setdefault(reason, []).append(file.as_posix())
    return kept, left_out


def git_files(project: Path) -> tuple[list[Path], dict[str, list[str]]] | None:
    """Files that git tracks or does not ignore, and those that it does; None where `project` is no checkout."""
    if shutil.which("git") is None or not (project / ".git").exists():
        return None

    def listed(*options: str) -> list[str] | None:
        command = ["git", "-C", project, "ls-files", "-z", "--exclude-standard", *options]
        done = subprocess.run(command, capture_output=True, check=False)
        return [name.decode(errors="surrogateescape") for name in done.stdout.split(b"\0") if name] or (
            None if done.returncode else []
        )

    files, ignored = listed("--cached", "--others"), listed("--others", "--ignored", "--directory")
    if files is None:
        return None
    here = {Path(name) for name in files if (project / name).is_file() or (project / name).is_symlink()}
    return list(here), {"ignored by git": ignored} if ignored else {}


def walk(folder: Path, project: Path, left_out: dict[str, list[str]]) -> Iterator[Path]:
    """All files below `folder`; folders that are made or caches are not entered, and named in `left_out`."""
    for path in sorted(folder.iterdir()):
        name = path.relative_to(project)
        if path.is_dir() and not path.is_symlink():
            made = name.as_posix() in MADE_FOLDERS
            if made or matches(path.name, CACHES):
                left_out.setdefault("made by the code" if made else "a cache", []).append(f"{name.as_posix()}/")
            else:
                yield from walk(path, project, left_out)
        elif path.is_file() or path.is_symlink():
            yield name


def why_left_out(path: Path, name: Path, excluded: Iterable[Path]) -> str | None:
    """Why a file of the project is not handed in, or None if it is."""
    if path.is_symlink():
        return "a link"
    if any(path.resolve().is_relative_to(folder) for folder in excluded):
        return "made by the code"
    if name.parts[0] in MADE_FOLDERS and len(name.parts) > 1:
        return "made by the code"
    if any(matches(part, CACHES) for part in name.parts[:-1]):
        return "a cache"
    if is_secret_name(name.name):
        return "named like a secret"
    if matches(name.name, MADE_FILES):
        return "made by the code"
    if path.stat().st_size > MAX_FILE_BYTES:
        return f"larger than {MAX_FILE_BYTES / 1e6:.0f} MB"
    if name.suffix == ".ipynb" and is_executed_copy(path):
        return "a notebook as papermill executed it"
    return None


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether the name matches one of the patterns."""
    return any(fnmatch(name, pattern) for pattern in patterns)


def is_secret_name(name: str) -> bool:
    """Whether a file is named as those are that hold passwords, tokens and keys."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    return matches(name.lower(), SECRET_FILES) or (not name.endswith(CODE_SUFFIXES) and bool(words & SECRET_WORDS))


def is_executed_copy(path: Path) -> bool:
    """Whether papermill wrote this notebook; one that cannot be read is none of its."""
    try:
        notebook: nbformat.NotebookNode = read_notebook(path)
    except UserError:
        return False
    return "papermill" in notebook.metadata


def refuse_secrets(files: Iterable[Path]) -> None:
    """Raises `UserError` naming the file and the line of the first thing that looks like a key."""
    for path in files:
        content = path.read_bytes()
        for what, pattern in SECRETS.items():
            if found := re.search(pattern, content):
                line = content.count(b"\n", 0, found.start()) + 1
                raise UserError(
                    f"{path} line {line} looks like {what}; take it out of the file (and revoke it, if it was ever "
                    "shared), then make the hand-in again: nothing was written."
                )
