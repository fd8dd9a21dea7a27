"""`lmcore export` and `lmcore import`: models for other programs, and of others."""

from pathlib import Path
from typing import Annotated

import tyro

from lmcore.cli.training import load
from lmcore.files import require_exists


def export(
    run: Annotated[Path, tyro.conf.Positional],
    folder: Annotated[Path, tyro.conf.Positional],
    gguf: bool = False,
) -> int:
    """Write the best weights of a run as a Llama that transformers loads, with tokenizer and settings.

    Args:
        run: Run folder.
        folder: New folder for the model.
        gguf: Also write model.gguf, for llama.cpp and what builds on it.
    """
    model, codec = load(run)
    from lmcore.exchange.folders import export_model

    export_model(model, codec, folder, gguf)
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}.")
    return 0


def import_(
    folder: Annotated[Path, tyro.conf.Positional],
    run: Annotated[Path, tyro.conf.Positional],
    context_length: int | None = None,
    tokenizer: bool = True,
) -> int:
    """Make a run folder of a Llama in the format of transformers; generate, evaluate, export and train then take it.

    Args:
        folder: Folder with config.json, safetensors and, of the GPT-2 type, a tokenizer.
        run: New run folder. Training begins with its weights by --init-from, or with its config.json as --config.
        context_length: Positions that the model sees at a time; by default as many as it was made for.
        tokenizer: Whether to read the tokenizer, too; without one, generate needs --tokenizer.
    """
    require_exists(folder)
    from lmcore.accounting import num_parameters
    from lmcore.exchange.folders import import_model

    config = import_model(folder, run, context_length, tokenizer).config().model
    print(f"{run}: {num_parameters(config):,} parameters, {config.num_layers} layers, {config.num_heads} heads.")
    return 0
