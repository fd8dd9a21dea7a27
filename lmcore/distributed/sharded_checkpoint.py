"""Checkpoints of many ranks: a folder to which every rank writes its part.

It loads on any number of ranks with any strategy: PyTorch's distributed checkpoints note which part of which tensor is
in which file. A folder is written beside its place, gets the digests of its files, and is renamed when it is whole.
"""

import errno
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.optim import Optimizer

from lmcore.alone import Alone, OneRank
from lmcore.checkpoint import FORMAT, load_plain, require_same
from lmcore.distributed.sharded_optimizer import ShardedOptimizer
from lmcore.distributed.strategies import parameters_of
from lmcore.errors import UserError, require, why_not_written
from lmcore.files import PlainUnpickler, atomic_write, read_json, remove, sha256_file, write_json

SHARDED_STATE, METADATA, MANIFEST = "state.pt", ".metadata", "manifest.json"
"""Of a sharded checkpoint: everything but the tensors; PyTorch's table of the tensors' parts; the SHA-256 digest of
every file, which is written last."""
PAGE = 1 << 16
"""Bytes that a disk has to have free to count as one with room."""


def stored_tensors(strategy: Alone, state: dict[Tensor, dict[str, Any]]) -> dict[str, Tensor]:
    """The model's tensors and the state's by `model.NAME` and `optimizer.NAME.MOMENT`; their memory is shared."""
    tensors, names = {}, {}
    for name, tensor in strategy.model.state_dict(keep_vars=True).items():
        if tensor not in names:  # tied ones once
            names[tensor] = name
            tensors[f"model.{name}"] = strategy.stored(tensor.detach(), tensor)
    for parameter, values in state.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{names[parameter]}.{key}"] = strategy.stored(value, parameter)
    return tensors


def save_sharded(
    strategy: Alone, optimizer: Optimizer, iteration: int, folder: Path, extra: dict[str, Any], ranks: OneRank
) -> None:
    """Writes a sharded checkpoint; every rank calls it.

    If one rank cannot write, it raises `UserError` and the others exit; nothing is then left in `folder`.
    """
    own = (optimizer.local if isinstance(optimizer, ShardedOptimizer) else optimizer).state
    name_of = {parameter: name for name, parameter in strategy.model.named_parameters()}
    counts = {name_of[p]: {k: v for k, v in values.items() if not isinstance(v, Tensor)} for p, values in own.items()}
    content = {
        "lmcore_format": FORMAT, "iteration": iteration, "model_config": asdict(strategy.model.config),
        "optimizer": {"param_groups": Optimizer.state_dict(optimizer)["param_groups"]},
        "names": [name_of[parameter] for parameter in parameters_of(optimizer)],
        "numbers": {name: count for part in ranks.gather(counts) for name, count in part.items()}, "extra": extra,
    }  # fmt: skip
    temporary = folder.with_name(f".{folder.name}.tmp")
    with ranks.checked(), writing(folder):
        if ranks.is_first:
            remove(temporary)
            with atomic_write(temporary / SHARDED_STATE) as file:
                torch.save(content, file)
    with ranks.checked(), writing(folder):
        with warnings.catch_warnings(action="ignore"):  # that one process is enough
            dcp.save(stored_tensors(strategy, own), storage_writer=dcp.FileSystemWriter(temporary), **among(ranks))
        digests = {path.name: sha256_file(path) for path in temporary.glob(f"__{ranks.rank}_*.distcp")}
    everyone = ranks.gather(digests)
    with ranks.checked(), writing(folder):
        if ranks.is_first:
            digests = {name: sha256_file(temporary / name) for name in (METADATA, SHARDED_STATE)}
            digests |= {name: digest for part in everyone for name, digest in part.items()}
            require(
                all((temporary / name).is_file() for name in digests),
                "what other ranks have written there is not to be seen from rank 0: all machines must share the folder",
            )
            write_json(temporary / MANIFEST, digests)
            remove(folder)
            temporary.rename(folder)


def among(ranks: OneRank) -> dict[str, Any]:
    """Between whom PyTorch's `save` and `load` communicate."""
    return {"no_dist": True} if ranks.size == 1 else {"process_group": ranks.group}


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """A block that writes a checkpoint; a full disk becomes a `UserError`, and what was begun is removed."""
    try:
        yield
    except (OSError, RuntimeError, UserError, dcp.CheckpointException) as error:
        if isinstance(error, dist.DistError):  # another rank is gone
            raise
        full = folder.parent.is_dir() and shutil.disk_usage(folder.parent).free < PAGE  # another rank may not say it
        shutil.rmtree(folder.with_name(f".{folder.name}.tmp"), ignore_errors=True)
        failures = [failure for failure, _ in getattr(error, "failures", {}).values()] or [error]
        said = os.strerror(errno.ENOSPC) if full else why_not_written(failures[0])
        raise UserError(f"Cannot write {folder}: {said}; nothing was changed there.") from error


def read_sharded(folder: Path) -> dict[str, Any]:
    """What `lmcore.checkpoint.read_checkpoint` gives of a folder: everything but the tensors, all files verified."""
    verify_files(folder)
    content = load_plain(folder / SHARDED_STATE)
    sharded_reader(folder).read_metadata()
    return content


def sharded_reader(folder: Path) -> dcp.FileSystemReader:
    """PyTorch's reader of distributed checkpoints, but for their metadata: a pickle, which could hold any call."""
    names = ("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
             "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")  # fmt: skip
    classes = [*(getattr(metadata, name) for name in names), filesystem._StorageInfo, torch.Size]
    allowed = {(kind.__module__, kind.__qualname__): kind for kind in classes}
    allowed |= {("torch", name): dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
    allowed |= {("torch.serialization", "_get_layout"): torch.serialization._get_layout}
    allowed |= {(module, "PosixPath"): PurePosixPath for module in ("pathlib", "pathlib._local")}

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
            try:
                with open(folder / METADATA, "rb") as file:
                    content = PlainUnpickler(file, allowed).load()
                places = {info.relative_path for info in content.storage_data.values()}
                sound = all(isinstance(e, metadata.TensorStorageMetadata) for e in content.state_dict_metadata.values())
            except Exception as error:  # a damaged pickle can raise anything
                raise UserError(f"{folder} is not a whole checkpoint: {METADATA} cannot be read ({error}).") from None
            require(
                sound and all(Path(place).name == place for place in places),
                f"{folder} is not a whole checkpoint: {METADATA} names more than tensors in its files.",
            )
            return content

    return Reader(folder)


def verify_files(folder: Path) -> None:
    """Raises `UserError` unless a sharded checkpoint has all its files as they were written."""
    try:
        digests, there = read_json(folder / MANIFEST), {path.name for path in folder.iterdir()}
        require(isinstance(digests, dict), f"{MANIFEST} has no digests.")
        for name in sorted(digests.keys() | there - {MANIFEST} | {METADATA, SHARDED_STATE}):
            require(name in digests, f"{MANIFEST} has no digest of {name}.")
            require(sha256_file(folder / name) == digests[name], f"{name} does not match its SHA-256 digest.")
    except (OSError, UserError) as error:
        said = f"{error.filename} cannot be read: {error.strerror}." if isinstance(error, OSError) else error
        raise UserError(f"{folder} is not a whole checkpoint: {said}") from error


def load_sharded(strategy: Alone, optimizer: Optimizer, folder: Path, ranks: OneRank) -> int:
    """Reads this rank's parts of a sharded checkpoint, written by any number of ranks; returns the iteration.

    The files must have been verified (`read_sharded`).
    """
    content = load_plain(folder / SHARDED_STATE)
    require_same(content["model_config"], asdict(strategy.model.config), str(folder))
    reader = sharded_reader(folder)
    names = dict(strategy.model.named_parameters())
    owner = optimizer.owner if isinstance(optimizer, ShardedOptimizer) else {}
    moments: dict[Tensor, dict[str, Tensor]] = {}
    for key, entry in sorted(reader.read_metadata().state_dict_metadata.items()):
        kind, _, rest = key.partition(".")
        name, _, moment = rest.rpartition(".")
        if kind == "optimizer" and owner.get(names.get(name), ranks.rank) == ranks.rank:
            parameter, dtype = names[name], entry.properties.dtype
            whole = entry.size == strategy.stored(parameter.detach(), parameter).shape
            empty = torch.zeros_like(parameter, dtype=dtype) if whole else torch.zeros(entry.size, dtype=dtype)
            moments.setdefault(parameter, {})[moment] = empty.detach()
    tensors = stored_tensors(strategy, moments)
    with warnings.catch_warnings(action="ignore"):
        try:
            dcp.load(tensors, storage_reader=reader, **among(ranks))
        except dcp.CheckpointException as error:  # no Exception
            said = str(error).strip().splitlines()[-1]
            raise UserError(f"{folder} cannot be read by all ranks: {said}.") from error
    numbers = content["numbers"]
    state = {
        index: {**numbers.get(name, {}), **moments.get(names[name], {})}
        for index, name in enumerate(content["names"])
        if name in numbers or names[name] in moments
    }
    optimizer.load_state_dict(content["optimizer"] | {"state": state})
    return content["iteration"]
