"""Checkpoints: saved whole or not at all, verified when loaded (CSE599-O A1 section 5.2)."""

import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.optim import Optimizer

from lmcore.config import ModelConfig, from_dict
from lmcore.errors import UserError, require, why_not_written
from lmcore.files import PlainUnpickler, atomic_write, not_a_pipe, sha256_file
from lmcore.model import TransformerLM

if TYPE_CHECKING:
    from torch.distributed.checkpoint import FileSystemReader

FORMAT = 1
SAFETENSORS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""Names of the types in a safetensors file."""
Source = str | os.PathLike | BinaryIO | IO[bytes]


def save_checkpoint(
    model: nn.Module, optimizer: Optimizer, iteration: int, out: Source, extra: dict[str, Any] | None = None
) -> None:
    """Writes model, optimizer, iteration and `extra` (plain values and tensors) to a path or a binary file object.

    A path is written atomically. The content carries its own SHA-256 digest. Raises `UserError` if `out` cannot be
    written.
    """
    save_states(model, model.state_dict(), optimizer.state_dict(), iteration, out, extra)


def save_states(
    model: nn.Module, weights: dict[str, Any], optimizer: dict[str, Any], iteration: int, out: Source,
    extra: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """`save_checkpoint` of states that were put together before, as from several processes."""
    content = {
        "iteration": iteration,
        "model_config": asdict(model.config) if isinstance(model, TransformerLM) else None,
        "model": weights,
        "optimizer": optimizer,
        "extra": extra or {},
    }
    content |= {"lmcore_format": FORMAT, "digest": digest(content)}
    if isinstance(out, str | os.PathLike):
        with atomic_write(out) as file:
            _save(content, file, out)
    else:
        torch.save(content, out)


def _save(content: dict, file: IO[bytes], path: str | os.PathLike) -> None:
    try:
        torch.save(content, file)
    except RuntimeError as error:  # torch's zip writer reports a full disk so
        raise UserError(f"Cannot write {path}: {why_not_written(error)}; nothing was changed there.") from error


def load_checkpoint(src: Source, model: nn.Module, optimizer: Optimizer) -> int:
    """Restores model and optimizer from a path or a binary file object; returns the iteration.

    Raises `UserError`, with model and optimizer untouched, if `src` is truncated, corrupted, not a checkpoint of this
    library, or of another architecture (the fields that differ are named).
    """
    return restore(read_checkpoint(src), model, optimizer, name=_name(src))


def read_checkpoint(src: Source, tensors: bool = True) -> dict[str, Any]:
    """The verified content of a checkpoint, tensors on the CPU. Raises `UserError` as `load_checkpoint` does.

    A sharded one is put together; without `tensors` it is only verified, and lacks `model` and the optimizer's state.
    """
    name = _name(src)
    if isinstance(src, str | os.PathLike) and Path(src).is_dir():
        return read_sharded_checkpoint(Path(src), tensors)
    with whole(name):
        content = load_plain(src)
        body = {key: value for key, value in content.items() if key not in ("lmcore_format", "digest")}
        require(
            digest(body) == content.get("digest", digest(body)),
            f"{name} is damaged: its content does not match its SHA-256 digest.",
        )
    require("digest" in content and of_this_library(body), f"{name} was not written by lmcore's save_checkpoint.")
    return body


def load_plain(src: Source) -> dict[str, Any]:
    """What `torch.save` wrote: tensors and plain values. Nothing else is loaded, and so nothing is run."""
    name = _name(src)
    with whole(name), warnings.catch_warnings(action="ignore"):  # of pickles that it will refuse
        src = not_a_pipe(src) if isinstance(src, str | os.PathLike) else src
        content = torch.load(src, map_location="cpu", weights_only=True)
    known = isinstance(content, dict) and "lmcore_format" in content
    require(known, f"{name} was not written by lmcore's save_checkpoint.")
    there = content["lmcore_format"]
    require(there == FORMAT, f"{name} has checkpoint format {there}; this version reads {FORMAT}.")
    return content


def of_this_library(content: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's content has everything that `save_states` puts there, each of its type."""
    types = {"iteration": int, "model": Mapping, "optimizer": Mapping, "extra": Mapping}
    there = all(isinstance(content.get(key), kind) for key, kind in types.items())
    return there and isinstance(content.get("model_config"), Mapping | None)


@contextmanager
def whole(name: str) -> Iterator[None]:
    """A block that reads a checkpoint: what goes wrong there becomes a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"There is no checkpoint {name}.") from None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a changed byte can make readers stumble over anything; PyTorch's is no Exception
        raise UserError(
            f"{name} is not a whole checkpoint: it is truncated, damaged or of another kind ({type(error).__name__})."
        ) from error


SHARDED_STATE, METADATA, MANIFEST = "state.pt", ".metadata", "manifest.json"
"""Of a sharded checkpoint: everything but the tensors; PyTorch's table of the tensors' parts; the SHA-256 digest of
every file, which is written last."""
SHARDED_CONTENT = {"iteration", "model_config", "optimizer", "names", "numbers", "aliases", "extra"}


def read_sharded_checkpoint(folder: Path, tensors: bool = True) -> dict[str, Any]:
    """`read_checkpoint` of a folder that `lmcore.distributed.sharded_checkpoint` wrote, on any number of processes."""
    verify_files(folder)
    content = load_plain(folder / SHARDED_STATE)
    reader = sharded_reader(folder)
    with whole(str(folder)):
        metadata: dict[str, Any] = reader.read_metadata().state_dict_metadata
        require(content.keys() >= SHARDED_CONTENT, f"{folder} is not a whole checkpoint: {SHARDED_STATE} lacks a part.")
        if not tensors:
            return content
        from torch.distributed.checkpoint import load

        found = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in metadata.items()}
        with warnings.catch_warnings(action="ignore"):  # that one process is enough
            load(found, storage_reader=reader, no_dist=True)
        return put_together(content, found)


def sharded_reader(folder: Path) -> "FileSystemReader":
    """PyTorch's reader of distributed checkpoints, but for their metadata: a pickle, which could hold any call."""
    from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata

    names = ("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
             "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")  # fmt: skip
    classes = [*(getattr(metadata, name) for name in names), filesystem._StorageInfo, torch.Size]
    allowed = {(kind.__module__, kind.__qualname__): kind for kind in classes}
    allowed |= {("torch", name): dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
    allowed |= {("torch.serialization", "_get_layout"): torch.serialization._get_layout}
    allowed |= {(module, "PosixPath"): PurePosixPath for module in ("pathlib", "pathlib._local")}

    class Reader(FileSystemReader):
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


def put_together(content: dict[str, Any], found: Mapping[str, Tensor]) -> dict[str, Any]:
    """The content of a sharded checkpoint as that of one file, from the tensors by `model.NAME` and
    `optimizer.NAME.MOMENT`."""
    names, numbers = content.pop("names"), content.pop("numbers")
    moments: dict[str, dict[str, Any]] = {name: dict(values) for name, values in numbers.items()}
    for key, tensor in sorted(found.items()):
        kind, _, rest = key.partition(".")
        if kind == "optimizer":
            name, _, moment = rest.rpartition(".")
            moments.setdefault(name, {})[moment] = tensor
    content["optimizer"] |= {"state": {i: moments[name] for i, name in enumerate(names) if name in moments}}
    weights = {key: tensor for key, tensor in sorted(found.items()) if key.startswith("model.")}
    content["model"] = {key.partition(".")[2]: tensor for key, tensor in weights.items()}
    for alias, name in content.pop("aliases").items():
        content["model"][alias] = content["model"][name]
    return content


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


def restore(content: dict[str, Any], model: nn.Module, optimizer: Optimizer, name: str = "The checkpoint") -> int:
    """Puts the content of `read_checkpoint` into model and optimizer; returns the iteration."""
    if isinstance(model, TransformerLM) and content["model_config"] is not None:
        require_same_architecture(content["model_config"], model.config, name)
    _require_same_tensors(content["model"], model, name)
    there, here = content["optimizer"]["param_groups"], optimizer.state_dict()["param_groups"]
    # load_state_dict takes the options of another kind of optimizer without a word
    if [_shape_of_group(group) for group in there] != [_shape_of_group(group) for group in here]:
        raise UserError(f"{name} holds the state of another optimizer or of other parameter groups.")
    optimizer.load_state_dict(content["optimizer"])
    model.load_state_dict(content["model"])
    return content["iteration"]


def _shape_of_group(group: Mapping[str, Any]) -> tuple[list[str], int]:
    return sorted(group), len(group["params"])


def require_same_architecture(saved: Mapping[str, Any], config: ModelConfig, name: str) -> None:
    """Raises `UserError` naming every field in which the saved architecture differs from `config`.

    A field that was not there yet when it was saved has its default.
    """
    there = asdict(ModelConfig()) | dict(saved)
    differences = [
        f"{field} ({there[field]} there, {value} here)"
        for field, value in asdict(config).items()
        if there[field] != value
    ]
    if differences:
        raise UserError(f"{name} is of another architecture: {', '.join(differences)}.")


def _require_same_tensors(saved: Mapping[str, Tensor], model: nn.Module, name: str) -> None:
    here = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    there = {key: tuple(value.shape) for key, value in saved.items()}
    differing = sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))
    if differing:
        shown = ", ".join(f"{k} ({there.get(k, 'absent')} there, {here.get(k, 'absent')} here)" for k in differing[:4])
        more = f" and {len(differing) - 4} more" if len(differing) > 4 else ""
        raise UserError(f"{name} is of another architecture: {shown}{more}.")


def digest(value: Any) -> str:
    """SHA-256 over nested dicts, lists, plain values and tensors (dtype, shape and bytes), in hexadecimal."""
    state = hashlib.sha256()
    _update(state, value)
    return state.hexdigest()


def _update(state: "hashlib._Hash", value: Any) -> None:
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous()
        state.update(f"tensor {data.dtype} {tuple(data.shape)}".encode())
        if data.numel():
            state.update(data.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        state.update(f"map {len(value)}".encode())
        for key, item in value.items():
            state.update(repr(key).encode())
            _update(state, item)
    elif isinstance(value, list | tuple):
        state.update(f"list {len(value)}".encode())
        for item in value:
            _update(state, item)
    else:
        state.update(repr(value).encode())


def save_weights(model: TransformerLM, path: str | os.PathLike, **notes: Any) -> None:
    """Writes the weights alone as safetensors, atomically; `notes` go into the file's metadata with the config."""
    write_weights(model.config, model.state_dict(), path, **notes)


def write_weights(config: ModelConfig, state: Mapping[str, Tensor], path: str | os.PathLike, **notes: Any) -> None:
    """`save_weights` of a state dict that was put together before, as from several processes."""
    weights = _distinct_weights(config, state)
    metadata = {"model_config": json.dumps(asdict(config)), "digest": digest(weights)}
    metadata |= {key: json.dumps(value) for key, value in notes.items()}
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in weights.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": SAFETENSORS[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with atomic_write(path) as file:  # the package's own function makes another file, which only this user may read
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in weights.values():
            file.write(tensor.reshape(-1).view(torch.uint8).numpy())


def load_model(path: str | os.PathLike, device: torch.device | str = "cpu") -> TransformerLM:
    """A model with the weights of a `save_weights` file, in evaluation mode on `device`.

    Raises `UserError` if the file is missing, truncated, damaged or was not written by `save_weights`.
    """
    weights, notes = read_weights(path)
    model = TransformerLM(notes["model_config"])
    if model.config.tie_embeddings:
        weights["lm_head.weight"] = weights["token_embeddings.weight"]
    _require_same_tensors(weights, model, str(path))
    model.load_state_dict(weights)
    return model.to(device).eval()


def read_weights(path: str | os.PathLike) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Verified tensors and notes of a `save_weights` file; the note `model_config` is a `ModelConfig`."""
    try:
        with safe_open(not_a_pipe(path), framework="pt") as file:
            metadata = file.metadata() or {}
            weights = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    except FileNotFoundError:
        raise UserError(f"There are no weights {path}; a run has them from its first evaluation on.") from None
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} is not a whole safetensors file: it is truncated, damaged or of another kind."
        ) from error
    if not {"model_config", "digest"} <= metadata.keys():
        raise UserError(f"{path} was not written by lmcore's save_weights.")
    if digest(weights) != metadata.pop("digest"):
        raise UserError(f"{path} is damaged: its weights do not match their SHA-256 digest.")
    try:
        notes = {key: json.loads(value) for key, value in metadata.items()}
    except ValueError as error:
        raise UserError(f"{path} is damaged: the notes beside its weights are not JSON.") from error
    return weights, notes | {"model_config": from_dict(ModelConfig, notes["model_config"])}


def _distinct_weights(config: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict in the order of its names, without the alias of tied embeddings, which safetensors refuses."""
    weights = {key: value.detach().cpu().contiguous() for key, value in sorted(state.items())}
    if config.tie_embeddings:
        del weights["lm_head.weight"]
    return weights


def _name(src: Source) -> str:
    return str(Path(src)) if isinstance(src, str | os.PathLike) else "The checkpoint"
