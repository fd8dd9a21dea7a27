"""Files that are whole or absent, what killed processes leave, full and read-only disks, locks."""

import ctypes
import errno
import io
import os
import shutil
import signal
import stat
import subprocess
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from parallel_runs import forks, small_config
from safetensors.torch import load_file
from tokenizer_reference import BYTES

from lmcore.alone import ALONE, Alone
from lmcore.checkpoint import read_weights, save_checkpoint, save_weights
from lmcore.cli.application import main
from lmcore.config import CorpusConfig, ModelConfig, TrainConfig
from lmcore.data import prepare
from lmcore.distributed.sharded_checkpoint import save_sharded
from lmcore.errors import UserError
from lmcore.files import Busy, atomic_write, is_locked, locked, temporary_folder, write_json
from lmcore.model import TransformerLM
from lmcore.profiling.cases import WorkloadConfig
from lmcore.profiling.runner import run_cases
from lmcore.profiling.timing import measure
from lmcore.run import RunFolder
from lmcore.train import train
from workbook.record import holding


@pytest.mark.parametrize(
    ("write", "arguments", "stays"), [(atomic_write, ("a",), {"a"}), (temporary_folder, (".preparing-", "."), set())]
)
def test_the_next_call_removes_what_killed_ones_left(tmp_path, monkeypatch, write, arguments, stays):
    """What a call that lives writes is left alone, and so is what is somebody else's."""
    monkeypatch.chdir(tmp_path)
    if (child := os.fork()) == 0:
        with write(*arguments):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (left,) = tmp_path.iterdir()
    (tmp_path / ".preparing-of-somebody").mkdir()
    with write(*arguments):
        for path in tmp_path.iterdir():
            os.utime(path, (1, 1))  # older than what is about to be locked
        with write(*arguments):
            assert len(list(tmp_path.iterdir())) == 3
            assert not left.exists()
    assert {path.name for path in tmp_path.iterdir()} == {".preparing-of-somebody"} | stays


def test_content_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Else a crash after the rename could leave an empty file where the old one was. Two writers share no file."""
    path, order = tmp_path / "a", []

    def noted(name, call):
        def note(*arguments):
            is_folder = name == "fsync" and stat.S_ISDIR(os.fstat(arguments[0]).st_mode)
            order.append((f"{name} folder" if is_folder else name, path.exists()))
            return call(*arguments)

        return note

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, noted(name, getattr(os, name)))
    with atomic_write(path) as file:
        file.write(b"1")
    assert order == [("fsync", False), ("replace", False), ("fsync folder", True)]
    with atomic_write(path) as one, atomic_write(path) as other:
        assert one.name != other.name
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("umask", [0o022, 0o077])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_are_a_file_that_the_package_reads_with_the_usual_permissions(tmp_path, umask, dtype):
    before, path = os.umask(umask), tmp_path / "w.safetensors"
    try:
        model = TransformerLM(ModelConfig(31, 8, 16, 1, 2, 24)).to(dtype)
        save_weights(model, path, step=3)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    there, state = load_file(path), model.state_dict()
    assert there.keys() == state.keys()
    assert all(there[key].dtype == dtype and torch.equal(there[key], value) for key, value in state.items())
    assert read_weights(path)[1]["step"] == 3


# Disks that are full, or only to be read


NEW_USER, NEW_MOUNTS = 0x10000000, 0x00020000  # of unshare(2)


def in_a_file_system(pipe, function, disk: Path, mode: str) -> None:
    """Sends the lines that `function(disk)` prints where the folder is a file system of 4 MB of its own, or None."""
    maps = {"setgroups": "deny", "uid_map": f"0 {os.getuid()} 1", "gid_map": f"0 {os.getgid()} 1"}
    if ctypes.CDLL(None).unshare(NEW_USER | NEW_MOUNTS):
        pipe.send(None)
        return
    for name, text in maps.items():
        Path("/proc/self", name).write_text(text)
    mount = f"mount -t tmpfs -o size=4m tmpfs {disk}; cp -r {disk}.before/. {disk}; mount -o remount,{mode} {disk}"
    subprocess.run(["sh", "-ec", mount], check=True)
    with redirect_stdout(io.StringIO()) as said, redirect_stderr(said):
        function(disk)
    pipe.send(said.getvalue().splitlines())


def on_disk(function, disk: Path, mode: str) -> list[str]:
    """The lines that `function(disk)` prints in a process that sees a file system there, read-only or not."""
    shutil.copytree(disk, f"{disk}.before")
    ours, theirs = forks().Pipe()
    process = forks().Process(target=in_a_file_system, args=(theirs, function, disk, mode))
    process.start()
    theirs.close()
    lines = ours.recv()
    process.join()
    if lines is None:
        pytest.skip("a file system of its own needs namespaces for users and mounts")
    return lines


def use_a_read_only_disk(disk: Path) -> None:
    """Trains on the corpus that is there, and gives the commands that write there."""
    print(train(small_config(disk / "data", steps=2), disk.with_name("run")).state)
    for command in (
        ["data", "info", str(disk / "data")],
        ["train", "--run", str(disk / "run"), "--data", str(disk / "data")],
        ["data", "prepare", "embedded", "--tokenizer", "bpe:257", "--out", str(disk / "data")],
        ["tokenizer", "train", str(disk / "text.txt"), "--out", str(disk / "bpe"), "--vocab-size", "257"],
        ["benchmark", "--out", str(disk / "b"), "--device", "cpu"],
        ["memory", "--out", str(disk / "m"), "--device", "cpu"],
    ):
        print("code", main(command))


@pytest.mark.fault("disk that is full, read-only or has no locks", "refused_in_words")
def test_a_read_only_disk_is_read_and_what_writes_ends_in_a_sentence(tmp_path):
    for name in ("run", "bpe", "b", "m"):
        (tmp_path / "disk" / name).mkdir(parents=True)
    data = tmp_path / "disk" / "data"
    prepare("embedded", BYTES, data, CorpusConfig(num_documents=30), progress=False)
    (data / "checked.json").unlink()
    (tmp_path / "disk" / "text.txt").write_text("some text")
    lines = on_disk(use_a_read_only_disk, tmp_path / "disk", "ro")
    assert "complete" in lines
    assert [line for line in lines if line.startswith("code")] == ["code 0"] + ["code 2"] * 5
    sentences = [line for line in lines if line.startswith("lmcore: ")]
    assert len(sentences) == 5
    assert all("Read-only file system" in sentence for sentence in sentences), sentences


def write_to_a_full_disk(disk: Path) -> None:
    """Weights, checkpoints and JSON for which there is no room."""
    model = TransformerLM(ModelConfig(5000, 16, 256, 2, 4, 512))
    alone = Alone(model, TrainConfig(model.config))
    optimizer = alone.optimizer()
    for write in (
        lambda: save_checkpoint(model, optimizer, 1, disk / "step.pt"),
        lambda: save_sharded(alone, optimizer, 1, disk / "step.sharded", {}, ALONE),
        lambda: save_weights(model, disk / "best.safetensors"),
        lambda: write_json(disk / "big.json", "x" * 5_000_000),
    ):
        try:
            write()
        except UserError as error:
            print(error)
        assert list(disk.iterdir()) == []


@pytest.mark.fault("disk that is full, read-only or has no locks", "refused_in_words")
def test_a_full_disk_is_called_that(tmp_path):
    (tmp_path / "disk").mkdir()
    assert on_disk(write_to_a_full_disk, tmp_path / "disk", "rw") == [
        f"Cannot write {tmp_path}/disk/{name}: No space left on device; nothing was changed there."
        for name in ("step.pt", "step.sharded", "best.safetensors", "big.json")
    ]


def test_a_value_that_utf8_cannot_hold_is_a_sentence(tmp_path):
    write_json(tmp_path / "a.json", 1)
    with pytest.raises(UserError, match=r"Cannot write .*a\.json: .*udce9"):
        write_json(tmp_path / "a.json", {"data": os.fsdecode(b"caf\xe9")})
    assert (tmp_path / "a.json").read_text() == "1\n"
    assert len(list(tmp_path.iterdir())) == 1


# Locks


def no_locks(*_, **__):
    raise OSError(errno.ENOLCK, "No locks available")


NEEDING = {
    "a run folder": lambda folder: RunFolder(folder).lock().__enter__(),
    "a corpus": lambda folder: prepare("embedded", BYTES, folder, CorpusConfig(num_documents=2), progress=False),
    "cases": lambda folder: run_cases(
        measure, {"case": WorkloadConfig(model=ModelConfig(31, 8, 16, 1, 2, 24), device="cpu")}, folder
    ),
    "a notebook": lambda folder: holding(folder, ["01_build"]).__enter__(),
}


@pytest.mark.fault("disk that is full, read-only or has no locks", "refused_in_words")
@pytest.mark.parametrize("what", NEEDING)
def test_a_file_system_without_locks_is_one_sentence_everywhere(tmp_path, monkeypatch, what):
    monkeypatch.setattr(FileLock, "_acquire", no_locks)
    with pytest.raises(UserError, match=f"^The file system of {tmp_path}.* cannot lock files.*mount it with flock"):
        NEEDING[what](tmp_path)


def test_a_held_lock_is_said_in_the_words_given_or_waited_for(tmp_path):
    lock, held = tmp_path / "a" / ".lock", threading.Event()

    def hold() -> None:
        with locked(lock, ""):
            held.set()
            time.sleep(0.2)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    assert is_locked(lock)
    with pytest.raises(Busy, match=r"^It is taken\.$"), locked(lock, "It is taken."):
        pass
    with locked(lock, "", seconds=60):
        pass
    thread.join()
    assert not is_locked(lock)
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match=r"file cannot be written to \((Not a directory|File exists)\)"),
        locked(tmp_path / "file" / ".lock", ""),
    ):
        pass
