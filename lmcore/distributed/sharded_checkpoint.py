"""Checkpoints of many ranks: gathered into one file, or a folder to which every rank writes its part.

Both hold the same, and load on any number of ranks that divide the work in any way: PyTorch's distributed checkpoints
note which part of which tensor is in which file. A folder is written beside its place, gets the digests of its files,
and is renamed when it is whole.
"""

import errno
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
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

from lmcore.alone import Alone
from lmcore.checkpoint import FORMAT, load_plain, require_same_architecture, restore
from lmcore.distributed.sharded_optimizer import ShardedOptimizer
from lmcore.distributed.world import World
from lmcore.errors import UserError, require, why_not_written
from lmcore.files import PlainUnpickler, not_a_pipe, remove, sha256_file, write_json

SHARDED_STATE, METADATA, MANIFEST = "state.pt", ".metadata", "manifest.json"
"""Of a sharded checkpoint: everything but the tensors; PyTorch's table of the tensors' parts; the SHA-256 digest of
every file, which is written last."""
SHARDED_CONTENT = {"iteration", "model_config", "optimizer", "names", "numbers", "extra"}

PAGE = 1 << 16
"""Bytes that a disk has to have free to count as one with room."""


def names_of(way: Alone, optimizer: Optimizer) -> list[str]:
    """The parameters' names in the order in which the optimizer's state numbers them."""
    names = {parameter: name for name, parameter in way.model.named_parameters()}
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def own_state(optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    """Moments and counts of the parameters that this rank updates."""
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.local.state if optimizer.local is not None else {}
    return optimizer.state


def whole_moments(way: Alone, optimizer: Optimizer, world: World) -> dict[str, Any]:
    """The optimizer's state dict as one process would have it, on rank 0. Every rank calls it.

    Gathered tensors go to the CPU one by one, so that no GPU needs room for all.
    """
    order = [p for group in optimizer.param_groups for p in group["params"]]
    if isinstance(optimizer, ShardedOptimizer):
        number = {parameter: index for index, parameter in enumerate(order)}
        own = {
            number[p]: {key: v.cpu() if isinstance(v, Tensor) else v for key, v in values.items()}
            for p, values in own_state(optimizer).items()
        }
        parts: list[dict] | None = [{}] * world.size if world.is_first else None
        dist.gather_object(own, parts, group=world.group)
        moments = dict(sorted((index, values) for part in parts or [] for index, values in part.items()))
        return Optimizer.state_dict(optimizer) | {"state": moments}
    state = optimizer.state_dict()
    moments = {
        index: {k: kept(way, v, order[index], world) if isinstance(v, Tensor) else v for k, v in values.items()}
        for index, values in state["state"].items()
    }
    return state | {"state": moments}


def whole_weights(way: Alone, world: World) -> dict[str, Any]:
    """The model's state dict as one process would have it, on rank 0. Every rank calls it."""
    held = way.model.state_dict(keep_vars=True)
    return {name: kept(way, tensor.detach(), tensor, world) for name, tensor in held.items()}


def kept(way: Alone, tensor: Tensor, parameter: Tensor, world: World) -> Tensor | None:
    """The whole of a tensor: on rank 0, on the CPU if it was gathered, and nothing elsewhere."""
    whole = way.whole(tensor, parameter)
    if not world.is_first:
        return None
    return whole if whole is tensor else whole.cpu()


def load_whole(way: Alone, optimizer: Optimizer, content: dict[str, Any], name: str) -> int:
    """`lmcore.checkpoint.restore` on a rank that keeps parts of the content."""
    held = way.model.state_dict(keep_vars=True)
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    weights = {key: way.part(t, held[key]) if key in held else t for key, t in content["model"].items()}
    moments = {
        index: {key: way.part(v, order[index]) if isinstance(v, Tensor) else v for key, v in values.items()}
        for index, values in content["optimizer"]["state"].items()
        if index < len(order)
    }
    parts = {"model": weights, "optimizer": content["optimizer"] | {"state": moments}}
    return restore(content | parts, way.model, optimizer, name)


def stored_tensors(way: Alone, state: dict[Tensor, dict[str, Any]]) -> dict[str, Tensor]:
    """The model's tensors and the state's by `model.NAME` and `optimizer.NAME.MOMENT`; their memory is shared."""
    tensors, names = {}, {}
    for name, tensor in way.model.state_dict(keep_vars=True).items():
        if tensor not in names:  # tied ones once
            names[tensor] = name
            tensors[f"model.{name}"] = way.stored(tensor.detach(), tensor)
    for parameter, values in state.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{names[parameter]}.{key}"] = way.stored(value, parameter)
    return tensors


def save_sharded(
    way: Alone, optimizer: Optimizer, iteration: int, folder: Path, extra: dict[str, Any], world: World,
    background: bool = False,
) -> Callable[[bool], bool]:  # fmt: skip
    """Begins to write a sharded checkpoint; returns `finish(wait)`, which every rank calls until it returns True.

    With `background`, and more than one rank, tensors are copied and written while training continues. If one rank
    cannot write, it raises `UserError` and the others exit; nothing is then left in `folder`.
    """
    names, own = names_of(way, optimizer), own_state(optimizer)
    of = {parameter: name for name, parameter in way.model.named_parameters()}
    counts = {of[p]: {k: v for k, v in values.items() if not isinstance(v, Tensor)} for p, values in own.items()}
    numbers = {name: count for part in world.gather(counts) for name, count in part.items()}
    groups = Optimizer.state_dict(optimizer)["param_groups"]
    content = {"lmcore_format": FORMAT, "iteration": iteration, "model_config": asdict(way.model.config),
               "optimizer": {"param_groups": groups}, "names": names, "numbers": numbers, "extra": extra}  # fmt: skip
    temporary = folder.with_name(f".{folder.name}.tmp")
    with world.checked(), writing(folder):
        if world.is_first:
            remove(temporary)
            temporary.mkdir(parents=True)
            torch.save(content, temporary / SHARDED_STATE)
    tensors, writer = stored_tensors(way, own), dcp.FileSystemWriter(temporary)
    future: Future | None = None
    with world.checked(), writing(folder):
        if world.size == 1:
            with warnings.catch_warnings(action="ignore"):  # that one process is enough
                dcp.save(tensors, storage_writer=writer, no_dist=True)
        elif background:
            future = dcp.async_save(tensors, storage_writer=writer, process_group=world.background)
        else:
            dcp.save(tensors, storage_writer=writer, process_group=world.group)

    def finish(wait: bool = True) -> bool:
        if future is not None and not wait and not all(world.gather(future.done())):
            return False
        with world.checked(), writing(folder):
            if future is not None:
                future.result()
            digests = {path.name: sha256_file(path) for path in temporary.glob(f"__{world.rank}_*.distcp")}
            for path in temporary.iterdir():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
        everyone = world.gather(digests)
        with world.checked(), writing(folder):
            if world.is_first:
                for name in (METADATA, SHARDED_STATE):
                    digests[name] = sha256_file(temporary / name)
                for part in everyone[1:]:
                    digests |= part
                absent = [name for name in digests if not (temporary / name).is_file()]
                require(
                    not absent,
                    f"{folder.parent} must be a folder that all machines share: what other ranks have written there "
                    "is not to be seen from rank 0.",
                )
                write_json(temporary / MANIFEST, digests)
                remove(folder)
                temporary.rename(folder)
        return True

    return finish


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """A block that writes a checkpoint; a full disk becomes a `UserError`, and what was begun is removed."""
    try:
        yield
    except (OSError, RuntimeError, dcp.CheckpointException) as error:
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
    complete = content.keys() >= SHARDED_CONTENT
    require(complete, f"{folder} is not a whole checkpoint: {SHARDED_STATE} lacks a part.")
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
    damaged = f"{folder} is not a whole checkpoint"
    try:
        manifest = json.loads(not_a_pipe(folder / MANIFEST).read_text(encoding="utf-8"))
        there = {path.name for path in folder.iterdir()} - {MANIFEST}
        unlisted = sorted((there | {METADATA, SHARDED_STATE}) - manifest.keys())
        require(not unlisted, f"{damaged}: {MANIFEST} has no digest of {', '.join(unlisted)}.")
        for name, noted in manifest.items():
            if sha256_file(folder / name) != noted:
                raise UserError(f"{damaged}: {name} does not match its SHA-256 digest.")
    except (OSError, ValueError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        what = Path(error.filename).name if isinstance(error, OSError) and error.filename else MANIFEST
        raise UserError(f"{damaged}: {what} is missing or cannot be read.") from error


def load_sharded(way: Alone, optimizer: Optimizer, folder: Path, world: World) -> int:
    """Reads this rank's parts of a sharded checkpoint, written by any number of ranks; returns the iteration.

    The files must have been verified (`read_sharded`).
    """
    content = load_plain(folder / SHARDED_STATE)
    require_same_architecture(content["model_config"], way.model.config, str(folder))
    reader = sharded_reader(folder)
    there = reader.read_metadata().state_dict_metadata
    names = {name: parameter for name, parameter in way.model.named_parameters()}
    owner = optimizer.owner if isinstance(optimizer, ShardedOptimizer) else {}
    moments: dict[Tensor, dict[str, Tensor]] = {}
    for key, entry in sorted(there.items()):
        kind, _, rest = key.partition(".")
        name, _, moment = rest.rpartition(".")
        if kind == "optimizer" and owner.get(names.get(name), world.rank) == world.rank:
            parameter = names[name]
            whole, dtype = entry.size == way.shape(parameter), entry.properties.dtype
            empty = torch.zeros_like(parameter, dtype=dtype) if whole else torch.zeros(entry.size, dtype=dtype)
            moments.setdefault(parameter, {})[moment] = empty.detach()
    tensors = stored_tensors(way, moments)
    with warnings.catch_warnings(action="ignore"):
        try:
            alone = world.size == 1
            dcp.load(tensors, storage_reader=reader, process_group=None if alone else world.group, no_dist=alone)
        except dcp.CheckpointException as error:  # no Exception
            said = str(error).strip().splitlines()[-1]
            raise UserError(f"{folder} cannot be read by all ranks: {said}.") from error
    numbers, order = content["numbers"], content["names"]
    state = {
        index: {**numbers.get(name, {}), **moments.get(names[name], {})}
        for index, name in enumerate(order)
        if name in numbers or names[name] in moments
    }
    optimizer.load_state_dict(content["optimizer"] | {"state": state})
    return content["iteration"]
