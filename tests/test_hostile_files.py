"""Files that others have made: whatever they hold, reading them runs nothing and ends in a sentence."""

import json
import os
import pickle
import re
import shutil
import socket
from pathlib import Path

import pytest
import torch
from parallel_runs import small_config
from tokenizer_reference import BYTES
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

import lmcore
import workbook
from lmcore.checkpoint import load_model, read_checkpoint
from lmcore.config import CorpusConfig
from lmcore.data import load_gpt2, open_corpus, open_data, prepare
from lmcore.data.prepared import map_tokens
from lmcore.distributed.sharded_checkpoint import verify_files
from lmcore.errors import UserError
from lmcore.files import read_json, sha256_file
from lmcore.profiling.memory.snapshot import read_snapshot
from lmcore.profiling.nsys.export import read_export
from lmcore.profiling.nsys.torch_trace import read_torch_trace
from lmcore.run import RunFolder
from lmcore.text import read_text
from lmcore.tokenizer import Tokenizer
from lmcore.tokenizer.files import read_merges
from lmcore.train import train
from workbook.parameters import read_mapping


class Harm:
    """A pickle of it makes a folder when it is loaded."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> RunFolder:
    """A run of eight steps with the sharded checkpoints of steps 4 and 8, and a plain one beside them."""
    folder = tmp_path_factory.mktemp("hostile")
    prepare("embedded", BYTES, folder / "data", CorpusConfig(num_documents=40), progress=False)
    config = small_config(folder / "data", steps=8, checkpoints="sharded")
    assert train(config, folder / "run").state == "complete"
    return RunFolder(folder / "run")


@pytest.fixture
def run(original, tmp_path) -> RunFolder:
    return RunFolder(shutil.copytree(original.path, tmp_path / "run"))


@pytest.fixture
def mark(tmp_path):
    """A folder that harm would make."""
    yield tmp_path / "harm"
    assert not (tmp_path / "harm").exists(), "reading the file ran what it holds"


def harm_beside_tensors(content, mark):
    content.planner_data = Harm(mark)
    return content


def bytes_for_a_tensor(content, _):
    """PyTorch loads what is no tensor with all that pickle can do."""
    content.state_dict_metadata["model.lm_head.weight"] = BytesStorageMetadata()
    return content


def another_folder(content, mark):
    for info in content.storage_data.values():
        info.relative_path = f"../{mark.parent.name}/file"
    return content


IN_METADATA = {
    "metadata": lambda _, mark: Harm(mark),
    "inside the metadata": harm_beside_tensors,
    "bytes": bytes_for_a_tensor,
    "another folder": another_folder,
    "no metadata": lambda content, _: {"state_dict_metadata": {}},
}
"""What is made of PyTorch's table of a sharded checkpoint."""


@pytest.mark.fault("crafted file that would run code", "refused_in_words")
@pytest.mark.parametrize("where", [*IN_METADATA, "state.pt", "__0_0.distcp"])
def test_a_sharded_checkpoint_runs_nothing_on_resume(run, mark, where, capsys):
    """Its digests are those of the hostile files, as whoever makes those can write both."""
    folder = run.checkpoint_file(8, sharded=True)
    if change := IN_METADATA.get(where):
        content = pickle.loads((folder / ".metadata").read_bytes())
        (folder / ".metadata").write_bytes(pickle.dumps(change(content, mark)))
    else:
        torch.save({"lmcore_format": 2, "iteration": Harm(mark)}, folder / where)
    names = [path.name for path in folder.iterdir() if path.name != "manifest.json"]
    (folder / "manifest.json").write_text(json.dumps({name: sha256_file(folder / name) for name in names}))
    run.last_weights.unlink()
    if where == "__0_0.distcp":  # tensors, read when the run has chosen its checkpoint
        with pytest.raises(UserError, match=r"step_00000008\.sharded cannot be read"):
            train(run.config(), run.path)
        return
    with pytest.raises(UserError, match=r"step_00000008\.sharded.* is not a whole checkpoint"):
        read_checkpoint(folder)
    assert train(run.config(), run.path).state == "complete"
    printed = capsys.readouterr().out
    assert "The checkpoint before it is tried." in printed
    assert "resuming from step 4" in printed


def test_a_sharded_checkpoint_is_whole_only_if_every_file_has_its_digest(original, tmp_path):
    folder = shutil.copytree(original.checkpoint_file(8, sharded=True), tmp_path / "copy")
    verify_files(folder)
    for manifest in ("{}", "[]", "null", '{"state.pt": 1}', '{".metadata": "", "state.pt": ""}'):
        (folder / "manifest.json").write_text(manifest)
        with pytest.raises(UserError, match="is not a whole checkpoint"):
            verify_files(folder)


def pickled(path: Path, mark: Path) -> None:
    path.write_bytes(pickle.dumps({"device_traces": [], "segments": [], "x": Harm(mark)}))


def saved(path: Path, mark: Path) -> None:
    torch.save({"lmcore_format": 2, "digest": "0" * 64, "model": Harm(mark)}, path)


def tagged(path: Path, mark: Path) -> None:
    path.write_text(f"name: !!python/object/apply:os.mkdir ['{mark}']\n")


READERS = {
    "c.pt": read_checkpoint,
    "best.safetensors": load_model,
    "memory_snapshot.pickle": read_snapshot,
    "config.json": read_json,
    "vocab.bpe": read_merges,
    "train.txt": lambda path: [*read_text(path)],
}
YAML = {"01_build.yaml": read_mapping}
OTHERS = {
    "any": sha256_file,
    "train.bin": lambda path: map_tokens(path.parent, {"dtype": "uint8", "splits": {"train": {"tokens": 1}}}, "train"),
    "corpus.txt": lambda path: prepare(path, BYTES, path.with_name("out"), progress=False),
    "b.txt": lambda path: open_corpus(path.parent),
    "encoder.json": lambda path: Tokenizer.load(path.parent),
    "vocab.json": lambda path: load_gpt2(path.parent),
    "tokenizer.json": lambda path: Tokenizer.load(path.parent),
    "profile.json": read_torch_trace,
    "profile.sqlite": read_export,
    "manifest.json": lambda path: open_data(path.parent),
    "metrics.jsonl": lambda path: RunFolder(path.parent).append_metrics({"step": 1}),
    "status.json": lambda path: RunFolder(path.parent).status(),
}


@pytest.mark.fault("crafted file that would run code", "refused_in_words")
@pytest.mark.parametrize("name", [*READERS, *YAML])
def test_no_reader_runs_what_it_reads(tmp_path, mark, name):
    for write in (pickled, saved) if name in READERS else (tagged,):
        write(tmp_path / name, mark)
        with pytest.raises(UserError):
            (READERS | YAML)[name](tmp_path / name)


UNSAFE = re.compile(
    r"(?<![\w.])(?:(?:cloud)?pickle\.(?:loads?|Unpickler)|marshal\.loads?|shelve\.open|joblib\.load|(?:np|yaml)\.load"
    r"|yaml\.(?:unsafe|full)_load|pd\.read_pickle|(?:dcp\.)?FileSystemReader|dcp\.load_state_dict|eval|exec)\("
    r"|torch\.load\((?!.*weights_only=True)"
)
"""Calls that can run what they read."""
ALLOWED = {
    ("distributed", "ranks.py"), ("grading", "attempt.py"), ("exercises", "exercise.py"),
}  # fmt: skip
"""Functions go through a pipe to processes that this one has started; a notebook's cell is a program, and is run, that
of a hand-in with limits in a process of its own; the package's own catalogue has cases as code."""


def test_no_reader_can_run_code():
    found = set()
    for file in (file for package in (lmcore, workbook) for file in Path(package.__file__).parent.rglob("*.py")):
        found |= {(*file.parts[-2:], call) for call in UNSAFE.findall(file.read_text(encoding="utf-8"))}
    assert {tuple(place) for *place, _ in found} == ALLOWED


@pytest.mark.fault("pipe or socket in place of a file", "refused_in_words")
@pytest.mark.parametrize("kind", ["pipe", "socket"])
@pytest.mark.parametrize("name", [*READERS, *OTHERS])
def test_a_pipe_in_place_of_a_file_is_refused(tmp_path, monkeypatch, name, kind):
    """Opening it would wait for a writer that never comes."""
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        with socket.socket(socket.AF_UNIX) as server:
            monkeypatch.chdir(tmp_path)  # the name of a socket must be short
            server.bind(name)
    with pytest.raises(UserError, match="is a pipe"):
        (READERS | OTHERS)[name](tmp_path / name)
