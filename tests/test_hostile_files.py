"""Files that others have made: whatever they hold, reading them runs nothing and ends in a sentence."""

import ast
import json
import os
import pickle
import shutil
import socket
from pathlib import Path

import pytest
import torch
from parallel_runs import small_config
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

import lmcore
from lmcore.checkpoint import load_model, read_checkpoint
from lmcore.config import CorpusConfig
from lmcore.data import open_data, prepare
from lmcore.distributed.sharded_checkpoint import verify_files
from lmcore.errors import UserError
from lmcore.files import read_json, sha256_file
from lmcore.profiling.memory.snapshot import read_snapshot
from lmcore.run import RunFolder
from lmcore.text import END_OF_TEXT, read_text
from lmcore.tokenizer import Tokenizer
from lmcore.tokenizer.files import read_merges
from lmcore.train import train
from workbook.jobs.site import load_site
from workbook.parameters import read_parameters

BYTES = Tokenizer({i: bytes([i]) for i in range(256)} | {256: END_OF_TEXT.encode()}, [], [END_OF_TEXT])


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


def in_metadata(change):
    """Writes PyTorch's table of a sharded checkpoint again, with what `change` makes of it."""

    def write(folder: Path, mark: Path) -> None:
        content = pickle.loads((folder / ".metadata").read_bytes())
        (folder / ".metadata").write_bytes(pickle.dumps(change(content, mark)))

    return write


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


def harm_in(name: str):
    def write(folder: Path, mark: Path) -> None:
        path = next(folder.glob(name))
        torch.save({"lmcore_format": 2, "iteration": Harm(mark)}, path)

    return write


SHARDED = {
    "metadata": in_metadata(lambda _, mark: Harm(mark)),
    "inside the metadata": in_metadata(harm_beside_tensors),
    "bytes": in_metadata(bytes_for_a_tensor),
    "another folder": in_metadata(another_folder),
    "no metadata": in_metadata(lambda content, _: {"state_dict_metadata": {}}),
    "state": harm_in("state.pt"),
    "tensors": harm_in("__0_0.distcp"),
}


@pytest.mark.parametrize("where", SHARDED)
def test_a_sharded_checkpoint_runs_nothing_on_resume(run, mark, where, capsys):
    """Its digests are those of the hostile files, as whoever makes those can write both."""
    folder = run.checkpoint_file(8, sharded=True)
    SHARDED[where](folder, mark)
    names = [path.name for path in folder.iterdir() if path.name != "manifest.json"]
    (folder / "manifest.json").write_text(json.dumps({name: sha256_file(folder / name) for name in names}))
    run.last_weights.unlink()
    if where == "tensors":  # read when the run has chosen its checkpoint
        with pytest.raises(UserError, match=r"step_00000008\.sharded cannot be read"):
            train(run.config(), run.path)
        return
    with pytest.raises(UserError, match=r"step_00000008\.sharded.* is not a whole checkpoint"):
        read_checkpoint(folder)
    assert train(run.config(), run.path).state == "complete"
    printed = capsys.readouterr().out
    assert "The checkpoint before it is tried." in printed
    assert "resuming from step 4" in printed


@pytest.mark.parametrize("manifest", ["{}", "[]", "null", '{"state.pt": 1}', '{".metadata": "", "state.pt": ""}'])
def test_a_sharded_checkpoint_is_whole_only_if_every_file_has_its_digest(run, manifest):
    folder = run.checkpoint_file(8, sharded=True)
    verify_files(folder)
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
    "checkpoint": (read_checkpoint, saved, "c.pt"),
    "pickle for a checkpoint": (read_checkpoint, pickled, "c.pt"),
    "weights": (load_model, saved, "best.safetensors"),
    "pickle for weights": (load_model, pickled, "last.safetensors"),
    "memory snapshot": (read_snapshot, pickled, "memory_snapshot.pickle"),
    "JSON": (read_json, pickled, "config.json"),
    "merges": (read_merges, pickled, "vocab.bpe"),
    "text": (lambda path: [*read_text(path)], pickled, "train.txt.gz"),
    "site": (load_site, tagged, "site.yaml"),
    "parameters": (read_parameters, tagged, "01_build.yaml"),
}


@pytest.mark.parametrize("reader", READERS)
def test_no_reader_runs_what_it_reads(tmp_path, mark, reader):
    read, write, name = READERS[reader]
    write(tmp_path / name, mark)
    with pytest.raises(UserError):
        read(tmp_path / name)


SAFE = {
    "torch.load": lambda call: any(
        word.arg == "weights_only" and isinstance(word.value, ast.Constant) and word.value.value is True
        for word in call.keywords
    ),
    "yaml.load": lambda call: ast.unparse(call.args[1]) in ("yaml.BaseLoader", "StrictLoader"),
}
UNSAFE = {
    "pickle.load", "pickle.loads", "pickle.Unpickler", "cloudpickle.load", "cloudpickle.loads", "np.load", "eval",
    "exec", "yaml.unsafe_load", "yaml.full_load", "pd.read_pickle", "marshal.loads", "dcp.FileSystemReader",
    "FileSystemReader", "shelve.open", "joblib.load", "dcp.load_state_dict",
}  # fmt: skip
BETWEEN_PROCESSES = Path("distributed", "ranks.py")
"""Functions go through a pipe to processes that this one has started."""
NOTEBOOKS = Path("workbook/parameters.py")
"""Runs a cell of the project's own notebooks, which are programs."""


def test_the_library_has_no_reader_that_can_run_code():
    root, found = Path(lmcore.__file__).parent, []
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or path.relative_to(root) in (BETWEEN_PROCESSES, NOTEBOOKS):
                continue
            name = ast.unparse(node.func)
            if name in UNSAFE or not SAFE.get(name, lambda _: True)(node):
                found.append(f"{path.relative_to(root)}:{node.lineno} {name}")
    assert found == []


PIPES = {
    "checkpoint": (read_checkpoint, "c.pt"),
    "weights": (load_model, "best.safetensors"),
    "snapshot": (read_snapshot, "s.pickle"),
    "JSON": (read_json, "config.json"),
    "merges": (read_merges, "vocab.bpe"),
    "checksum": (sha256_file, "train.bin"),
    "text": (lambda path: [*read_text(path)], "train.txt"),
    "corpus": (lambda path: prepare(path, BYTES, path.with_name("out"), progress=False), "corpus.txt"),
    "prepared": (lambda path: open_data(path.parent), "manifest.json"),
    "metrics": (lambda path: RunFolder(path.parent).append_metrics({"step": 1}), "metrics.jsonl"),
    "status": (lambda path: RunFolder(path.parent).status(), "status.json"),
}


@pytest.mark.parametrize("kind", ["pipe", "socket"])
@pytest.mark.parametrize("reader", PIPES)
def test_a_pipe_in_place_of_a_file_is_refused(tmp_path, monkeypatch, reader, kind):
    """Opening it would wait for a writer that never comes."""
    read, name = PIPES[reader]
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        with socket.socket(socket.AF_UNIX) as server:
            monkeypatch.chdir(tmp_path)  # the name of a socket must be short
            server.bind(name)
    with pytest.raises(UserError):
        read(tmp_path / name)
