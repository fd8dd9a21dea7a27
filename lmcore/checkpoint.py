"""Checkpoints: saved whole or not at all, verified when loaded (CSE599-O A1 section 5.2)."""

import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import IO, Any, BinaryIO

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.optim import Optimizer

from lmcore.config import ModelConfig, differing, from_dict
from lmcore.errors import UserError, require, why_not_written
from lmcore.files import atomic_write, not_a_pipe
from lmcore.model import TransformerLM

FORMAT = 2
SHARDED = "lmcore.distributed.sharded_checkpoint"
"""The module that knows checkpoints of many ranks, which are folders."""
Source = str | os.PathLike | BinaryIO | IO[bytes]


def save_checkpoint(
    model: nn.Module, optimizer: Optimizer | dict[str, Any], iteration: int, out: Source,
    extra: dict[str, Any] | None = None, weights: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Writes model, optimizer, iteration and `extra` (plain values and tensors) to a path or a binary file object.

    A path is written atomically; the content carries its SHA-256 digest. States put together from several processes
    stand in place of the optimizer and, as `weights`, of the model's. Raises `UserError` if `out` cannot be written.
    """
    content = {
        "iteration": iteration,
        "model_config": asdict(model.config) if isinstance(model, TransformerLM) else None,
        "model": model.state_dict() if weights is None else weights,
        "optimizer": optimizer.state_dict() if isinstance(optimizer, Optimizer) else optimizer,
        "extra": extra or {},
    }
    content |= {"lmcore_format": FORMAT, "digest": digest(content)}
    if not isinstance(out, str | os.PathLike):
        torch.save(content, out)
        return
    with atomic_write(out) as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # torch's zip writer reports a full disk so
            raise UserError(f"Cannot write {out}: {why_not_written(error)}; nothing was changed there.") from error


def load_checkpoint(src: Source, model: nn.Module, optimizer: Optimizer) -> int:
    """Restores model and optimizer from a path or a binary file object; returns the iteration.

    Raises `UserError`, with both untouched, if `src` is truncated, damaged, no checkpoint or of another architecture.
    """
    return restore(read_checkpoint(src), model, optimizer, name=_name(src))


def read_checkpoint(src: Source) -> dict[str, Any]:
    """The verified content of a checkpoint, tensors on the CPU. Raises `UserError` as `load_checkpoint` does.

    A sharded one, a folder, lacks `model` and the optimizer's state: its tensors are read by those who load it.
    """
    if isinstance(src, str | os.PathLike) and Path(src).is_dir():
        return import_module(SHARDED).read_sharded(Path(src))
    with whole(_name(src)):
        content = load_plain(src)
        types = {"iteration": int, "model_config": Mapping | None, "digest": str}
        types |= dict.fromkeys(("model", "optimizer", "extra"), Mapping)
        known = all(key in content and isinstance(content[key], kind) for key, kind in types.items())
        require(known, f"{_name(src)} was not written by lmcore's save_checkpoint.")
        noted = content.pop("digest")
        del content["lmcore_format"]
        require(digest(content) == noted, f"{_name(src)} is damaged: its content does not match its SHA-256 digest.")
    return content


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


@contextmanager
def whole(name: str, kind: str = "checkpoint") -> Iterator[None]:
    """A block that reads a file of this kind: what goes wrong there becomes a `UserError`."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except FileNotFoundError:
        hint = (
            "" if kind == "checkpoint" else "; a run writes its weights with a checkpoint, or a minute after it began"
        )
        raise UserError(f"There is no {kind} {name}{hint}.") from None
    except BaseException as error:  # a changed byte can make readers stumble over anything; PyTorch's is no Exception
        said = f"it is truncated, damaged or of another kind ({type(error).__name__})"
        raise UserError(f"{name} is not a whole {kind}: {said}.") from error


def restore(content: dict[str, Any], model: nn.Module, optimizer: Optimizer, name: str = "The checkpoint") -> int:
    """Puts the content of `read_checkpoint` into model and optimizer; returns the iteration."""
    if isinstance(model, TransformerLM) and content["model_config"] is not None:
        require_same(content["model_config"], asdict(model.config), name)
    require_same(_shapes(content["model"]), _shapes(model.state_dict()), name)
    there, here = content["optimizer"]["param_groups"], optimizer.state_dict()["param_groups"]
    # load_state_dict takes the options of another kind of optimizer without a word
    there, here = ([(sorted(group), len(group["params"])) for group in groups] for groups in (there, here))
    require(there == here, f"{name} holds the state of another optimizer or of other parameter groups.")
    optimizer.load_state_dict(content["optimizer"])
    model.load_state_dict(content["model"])
    return content["iteration"]


def require_same(there: Mapping[str, Any], here: Mapping[str, Any], name: str) -> None:
    """Raises `UserError` naming the fields of a config, or the shapes of weights, in which `name` differs from here."""
    differences = differing(there, here)
    require(not differences, f"{name} is of another architecture: {differences}.")


def _shapes(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in state.items()}


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


def save_weights(
    model: TransformerLM, path: str | os.PathLike, state: Mapping[str, Tensor] | None = None, **notes: Any
) -> None:
    """Writes the weights alone (`state`, if given) as safetensors, atomically; config and `notes` are its metadata."""
    state = model.state_dict() if state is None else state
    weights = {key: value.detach().cpu().contiguous() for key, value in sorted(state.items())}
    if model.config.tie_embeddings:
        weights.pop("lm_head.weight", None)  # the alias of the embeddings, which safetensors refuses
    metadata = {"model_config": json.dumps(asdict(model.config)), "digest": digest(weights)}
    metadata |= {key: json.dumps(value) for key, value in notes.items()}
    with atomic_write(path) as file:  # `save_file` would make another file, which only this user may read
        file.write(save(weights, metadata))


def load_model(path: str | os.PathLike, device: torch.device | str = "cpu") -> TransformerLM:
    """A model with the weights of a `save_weights` file, in evaluation mode on `device`.

    Raises `UserError` if the file is missing, truncated, damaged or was not written by `save_weights`.
    """
    weights, notes = read_weights(path)
    model = TransformerLM(notes["model_config"])
    if model.config.tie_embeddings:
        weights["lm_head.weight"] = weights["token_embeddings.weight"]
    require_same(_shapes(weights), _shapes(model.state_dict()), str(path))
    model.load_state_dict(weights)
    return model.to(device).eval()


def read_weights(path: str | os.PathLike) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Verified tensors and notes of a `save_weights` file; the note `model_config` is a `ModelConfig`."""
    with whole(str(path), "safetensors file"), safe_open(not_a_pipe(path), framework="pt") as file:
        metadata = file.metadata() or {}
        known = {"model_config", "digest"} <= metadata.keys()
        require(known, f"{path} was not written by lmcore's save_weights.")
        noted = metadata.pop("digest")
        notes = {key: json.loads(value) for key, value in metadata.items()}
        weights = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    require(digest(weights) == noted, f"{path} is damaged: its weights do not match their SHA-256 digest.")
    return weights, notes | {"model_config": from_dict(ModelConfig, notes["model_config"])}


def _name(src: Source) -> str:
    return str(Path(src)) if isinstance(src, str | os.PathLike) else "The checkpoint"
