"""`lmcore export` and `lmcore import`: run folders to and from folders of Hugging Face's transformers."""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from lmcore.checkpoint import save_weights, whole
from lmcore.config import ModelConfig, TrainConfig, replace
from lmcore.errors import require
from lmcore.exchange.gguf import write_gguf
from lmcore.exchange.llama import HUGGING_FACE, from_llama, llama_config, model_config_of, to_llama, weight_names
from lmcore.files import atomic_write, new_folder, not_a_pipe, read_json, write_json
from lmcore.model import TransformerLM
from lmcore.provenance import environment
from lmcore.run import RunFolder
from lmcore.text import END_OF_TEXT
from lmcore.tokenizer import Tokenizer
from lmcore.tokenizer.hugging_face import FILE, tokenizer_json

CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"


def export_model(model: TransformerLM, tokenizer: Tokenizer, folder: str | os.PathLike, gguf: bool = False) -> None:
    """Writes a folder that `AutoModelForCausalLM` and `AutoTokenizer` of transformers load as a Llama, in float32.

    With `gguf`, model.gguf of the package gguf beside them. Raises `UserError`, with nothing written, naming a setting
    that Llama cannot express, for a tokenizer of more tokens than the model, and if there is such a folder.
    """
    config = model.config
    values, most = llama_config(config), tokenizer.vocab_size
    require(most <= config.vocab_size, f"The tokenizer has {most} tokens, the model knows {config.vocab_size}.")
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.eot_id)
    texts = dict.fromkeys(("bos_token", "eos_token"), END_OF_TEXT)
    texts |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.context_length}
    contents = {
        CONFIG_FILE: {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32"} | values | ends,
        "generation_config.json": ends,
        FILE: tokenizer_json(tokenizer.vocab, tokenizer.merges, tokenizer.special_ids),
        "tokenizer_config.json": texts | {"clean_up_tokenization_spaces": False},
    }
    if unused := list(range(most, config.vocab_size)):  # of a padded vocabulary; lmcore never samples them
        contents["generation_config.json"] = ends | {"suppress_tokens": unused}
    state = {name: weight.detach().cpu().contiguous() for name, weight in model.state_dict().items()}
    with new_folder(folder) as new:
        for name, content in contents.items():
            write_json(new / name, content)
        with atomic_write(new / WEIGHTS_FILE) as file:
            file.write(save(to_llama(config, state), {"format": "pt"}))
        if gguf:
            write_gguf(config, state, tokenizer, new / "model.gguf")


def import_model(
    source: str | os.PathLike, folder: str | os.PathLike, context_length: int | None = None, tokenizer: bool = True
) -> RunFolder:
    """Makes a run folder of a Llama's folder: weights in float32, tokenizer, and settings to begin a training run with.

    `context_length` replaces the model's. Raises `UserError`, with nothing written, for a folder without
    config.json, weights as safetensors or, unless `tokenizer` is false, a tokenizer; for another architecture, a
    setting, tensor or shape that our model does not have, and a file that is damaged; and if `folder` is there.
    """
    source, folder = Path(source), Path(folder)
    values = read_json(source / CONFIG_FILE)
    require(isinstance(values, dict), f"{source / CONFIG_FILE} must be a JSON object.")
    config = model_config_of(values, str(source / CONFIG_FILE))
    if context_length is not None:
        config = replace(config, context_length=context_length)
    if (codec := Tokenizer.load(source) if tokenizer else None) is not None:
        fits = codec.vocab_size <= config.vocab_size and END_OF_TEXT in codec.special_ids
        require(fits, f"The tokenizer in {source} has no {END_OF_TEXT}, or more tokens than the model.")
    state = from_llama(config, read_weights_of(source, config))
    with new_folder(folder) as new:
        run = RunFolder(new)
        settings = TrainConfig(config, data=str(folder / "data"), init_from=str(folder))
        run.begin(settings, environment() | {"imported_from": str(source.resolve())})
        if codec is not None:
            codec.save(run.tokenizer_folder)
        save_weights(TransformerLM(config, device="meta"), run.best_weights, state, step=0)
    return RunFolder(folder)


def read_weights_of(source: Path, config: ModelConfig) -> dict[str, Tensor]:
    """The tensors of a Llama's folder. Raises `UserError` naming one that is missing, unknown or of another shape."""
    state, wanted = read_tensors(source), set()
    for _, name in weight_names(config, HUGGING_FACE):  # ended by the first that is missing, however many layers
        require(name in state, f"{source} lacks the tensor {name}.")
        wanted.add(name)
    unused = {"lm_head.weight"} | {name for name in state if name.endswith("rotary_emb.inv_freq")}
    more = sorted(state.keys() - wanted - unused)
    require(not more, f"{source} has the tensor {', '.join(more[:1])}, which lmcore's model lacks.")
    for name, weight in to_llama(config, TransformerLM(config, device="meta").state_dict()).items():
        there, here = tuple(state[name].shape), tuple(weight.shape)
        require(there == here, f"{source}: {name} has the shape {there}; by {CONFIG_FILE} it is {here}.")
        kind = state[name].dtype
        require(kind in (torch.float32, torch.bfloat16, torch.float16), f"{source}: {name} is of the type {kind}.")
    return state


def read_tensors(source: Path) -> dict[str, Tensor]:
    """All tensors of a folder: of model.safetensors, or of the files that an index names."""
    names, tensors = {WEIGHTS_FILE}, {}
    if (source / INDEX_FILE).is_file():
        index: Any = read_json(source / INDEX_FILE)
        places = index.get("weight_map") if isinstance(index, dict) else None
        sound = isinstance(places, dict) and all(isinstance(n, str) and n == Path(n).name for n in places.values())
        require(sound, f"{source / INDEX_FILE} needs a weight_map of tensors to files beside it.")
        names = set(places.values())
    for path in sorted(source / name for name in names):
        require(path.is_file(), f"There is no file {path}; weights are read as safetensors alone.")
        with whole(str(path), "safetensors file"):
            tensors |= load_file(not_a_pipe(path))
    return tensors
