"""No room on the disk: a sentence, nothing lost, and the same command resumes once there is room."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_bench import Bench, refusal

PAGE = 4096
STEP = 3
NAMES = ("config.json", "environment.json", "status.json", "metrics.jsonl", "step_", "best.safe", "last.safe")


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system in memory with room for one run and little more."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder]
    if os.geteuid() or shutil.which("mount") is None or subprocess.run(command, check=False).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_at_every_stage(bench: Bench, fault, tries, small_disk: Path, monkeypatch):
    """Room is cut page by page, so that each kind of file is at some time the first that does not fit."""
    needed = sum(-(-path.stat().st_size // PAGE) for path in bench.straight.path.rglob("*")) + 60
    monkeypatch.setattr(bench, "folder", small_disk)
    full, refused_files = needed // STEP, set()
    for pages in range(0, needed, needed // tries(full)):
        run = bench.new()
        fill(small_disk, leaving=pages)
        with fault("disk full") as it:
            said = bench.finish(run)
            if "lmcore:" in said:
                it.refused, sentence = True, refusal(said)
                assert "No space left on device" in sentence or "file_utils" in sentence or "write" in sentence, said
                refused_files |= {word for word in NAMES if word in sentence} or {sentence}
                assert not list(run.path.rglob("*.tmp")), "a file that did not fit was left behind"
                if run.status_file.exists():
                    assert run.status()["state"] in ("failed", "new", "running"), run.status()
                fill(small_disk, leaving=None)
                said = bench.finish(run)
                assert "lmcore:" not in said, said
            bench.require_same(run)
        fill(small_disk, leaving=None)
    every = {"config.json", "step_", "metrics.jsonl", "best.safe"}
    assert refused_files >= every if tries(full) == full else len(refused_files) > 1, refused_files


def fill(folder: Path, leaving: int | None) -> None:
    """Fills a file system but for some pages; None: empties it again."""
    ballast = folder / "ballast"
    ballast.unlink(missing_ok=True)
    if leaving is None:
        return
    free = os.statvfs(folder)
    with open(ballast, "wb") as file:
        file.write(bytes(max(0, free.f_bavail * free.f_frsize - leaving * PAGE)))
