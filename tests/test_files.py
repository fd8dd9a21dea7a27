"""Files that are whole or absent, what killed processes leave, full and read-only disks, locks."""

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

from lmcore.checkpoint import read_weights, save_weights
from lmcore.config import CorpusConfig, ModelConfig
from lmcore.data import prepare
from lmcore.errors import UserError
from lmcore.files import Busy, atomic_write, is_locked, locked, temporary_folder, write_json
from lmcore.model import TransformerLM
from lmcore.profiling.runner import run_cases
from lmcore.profiling.timing import measure
from lmcore.profiling.workload import WorkloadConfig
from lmcore.run import RunFolder
from lmcore.text import END_OF_TEXT
from lmcore.tokenizer import Tokenizer
from workbook.record import holding

BYTES = Tokenizer({i: bytes([i]) for i in range(256)} | {256: END_OF_TEXT.encode()}, [], [END_OF_TEXT])


@pytest.mark.parametrize(
    ("write", "arguments", "stays"), [(atomic_write, ("a",), {"a"}), (temporary_folder, (".preparing-", "."), set())]
)
def test_the_next_call_removes_what_killed_ones_left(tmp_path, monkeypatch, write, arguments, stays):
    """What a call that lives writes is left alone, and so is what is somebody else's."""
    monkeypatch.chdir(tmp_path)
    block = f"with {write.__name__}{arguments}:\n    os.kill(os.getpid(), signal.SIGKILL)"
    imports = f"import os, signal\nfrom lmcore.files import {write.__name__}\n"
    assert subprocess.run([sys.executable, "-c", imports + block], check=False).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    (tmp_path / ".preparing-of-somebody").mkdir()
    time.sleep(0.6)
    with write(*arguments):
        time.sleep(0.6)
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


def on_disk(mount: str, setup: str, block: str, tmp_path: Path) -> str:
    """What `block` printed in a process that sees `tmp_path/disk` as a file system of its own, filled by `setup`."""
    disk = tmp_path / "disk"
    disk.mkdir()
    imports = (
        f"import os, sys\nfrom pathlib import Path\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from parallel_runs import small_config\nfrom lmcore.cli.application import main\n"
        "from lmcore.train import train\n"
        f"from test_files import *\ndisk = Path({str(disk)!r})\n"
    )
    names = ("setup", "block")
    for name, text in zip(names, (setup, block), strict=True):
        body = textwrap.indent(textwrap.dedent(text), "    ")
        (tmp_path / f"{name}.py").write_text(f"{imports}if __name__ == '__main__':\n    pass\n{body}")
    first, second = (f"{sys.executable} {tmp_path}/{name}.py" for name in names)
    script = f"mount -t tmpfs -o size=4m tmpfs {disk} && {first} && {mount} {second}"
    if not shutil.which("unshare") or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("a file system of its own needs unshare -rm")
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script.replace("{disk}", str(disk))],
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout + done.stderr


READ_ONLY = "mount -o remount,ro {disk} &&"


@pytest.mark.fault("disk that is full, read-only or has no locks", "survived")
def test_data_on_a_read_only_disk_is_trained_on(tmp_path):
    setup = """
        prepare("embedded", BYTES, disk / "data", CorpusConfig(num_documents=30), progress=False)
        (disk / "data" / "checked.json").unlink()
    """
    block = f"""
        config = small_config(disk / "data", steps=2)
        print(train(config, {str(tmp_path / "run")!r}).state)
        again = prepare("embedded", BYTES, disk / "data", CorpusConfig(num_documents=30), progress=False)
        print(again.manifest["splits"]["train"]["documents"])
        print(main(["data", "info", str(disk / "data")]))
    """
    said = on_disk(READ_ONLY, setup, block, tmp_path).splitlines()
    assert said[-1] == "0"
    assert {"complete", "30"} <= set(said)


@pytest.mark.fault("disk that is full, read-only or has no locks", "refused_in_words")
def test_commands_on_a_read_only_disk_end_in_a_sentence(tmp_path):
    block = """
        for command in (
            ["train", "--run", str(disk / "run"), "--data", str(disk / "data")],
            ["data", "prepare", "embedded", "--tokenizer", "bpe:257", "--out", str(disk / "new")],
            ["data", "prepare", "embedded", "--tokenizer", "bpe:257", "--out", str(disk / "data")],
            ["tokenizer", "train", str(disk / "text.txt"), "--out", str(disk / "bpe"), "--vocab-size", "257"],
            ["benchmark", "--out", str(disk / "b"), "--device", "cpu"],
            ["memory", "--out", str(disk / "m"), "--device", "cpu"],
        ):
            print(main(command))
    """
    setup = """
        prepare("embedded", BYTES, disk / "data", CorpusConfig(num_documents=30), progress=False)
        (disk / "text.txt").write_text("some text")
        for name in ("run", "new", "bpe", "b", "m"):
            (disk / name).mkdir()
    """
    lines = on_disk(READ_ONLY, setup, block, tmp_path).splitlines()
    assert lines.count("2") == 6, lines
    sentences = [line for line in lines if line.startswith("lmcore: ")]
    assert len(sentences) == 6
    assert all("Read-only file system" in sentence for sentence in sentences), sentences


@pytest.mark.fault("disk that is full, read-only or has no locks", "refused_in_words")
def test_a_full_disk_is_called_that(tmp_path):
    block = """
        from lmcore.checkpoint import save_checkpoint
        from lmcore.config import TrainConfig
        from lmcore.distributed.sharded_checkpoint import save_sharded
        from lmcore.alone import ALONE, Alone
        from lmcore.optimizer import AdamW
        model = TransformerLM(ModelConfig(5000, 16, 256, 2, 4, 512))
        way = Alone(model, TrainConfig(model.config))
        optimizer = way.optimizer()
        for write in (
            lambda: save_checkpoint(model, optimizer, 1, disk / "step.pt"),
            lambda: save_sharded(way, optimizer, 1, disk / "step.sharded", {}, ALONE),
            lambda: save_weights(model, disk / "best.safetensors"),
            lambda: write_json(disk / "big.json", "x" * 5_000_000),
        ):
            try:
                write()
            except UserError as error:
                print(error)
            assert list(disk.iterdir()) == []
    """
    lines = on_disk("", "", block, tmp_path).splitlines()
    names = ("step.pt", "step.sharded", "best.safetensors", "big.json")
    assert lines == [
        f"Cannot write {tmp_path}/disk/{n}: No space left on device; nothing was changed there." for n in names
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
    "cases": lambda folder: run_cases(
        measure, {"case": WorkloadConfig(model=ModelConfig(31, 8, 16, 1, 2, 24), device="cpu")}, folder
    ),
    "a corpus": lambda folder: prepare("embedded", BYTES, folder, CorpusConfig(num_documents=2), progress=False),
    "a notebook": lambda folder: holding(folder, ["01_build"]).__enter__(),
}


@pytest.mark.fault("disk that is full, read-only or has no locks", "refused_in_words")
@pytest.mark.parametrize("what", NEEDING)
def test_a_file_system_without_locks_is_one_sentence_everywhere(tmp_path, monkeypatch, what):
    monkeypatch.setattr(FileLock, "_acquire", no_locks)
    sentence = (
        f"^The file system of {tmp_path}.* cannot lock files, so two .* mount it with flock, or choose a folder on"
    )
    with pytest.raises(UserError, match=sentence):
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
