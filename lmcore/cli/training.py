"""`lmcore train`, `lmcore evaluate` and `lmcore generate`: a run folder from a configuration, its losses, its texts."""

import argparse
import os
import shlex
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from lmcore.accounting import num_parameters
from lmcore.cli.output import text_output, utf8_text
from lmcore.config import MODEL_SIZES, CorpusConfig, GenerateConfig, TrainConfig, from_dict, model_config, replace
from lmcore.errors import EXIT_CODES, EXIT_FAILURE, require, require_path
from lmcore.files import read_json, require_exists
from lmcore.formatting import format_significant
from lmcore.recipes import RECIPES
from lmcore.stopping import stop_signals

GENERATE_DEFAULTS = GenerateConfig()

PRESETS = {size: TrainConfig(model=model_config(size)) for size in MODEL_SIZES} | RECIPES
"""What `--preset` names: a recipe, or the defaults with the model of a named size."""

EVAL_TOKENS = 2**18
"""How much of a text that has no validation file is evaluated while a model trains, unless the settings say."""

SECONDS_TO_END = 20.0
"""How long a process of several has to end after an error."""


def train_command(base: TrainConfig, arguments: Sequence[str]) -> Callable[..., int]:
    """The train command, whose options default to `base`; the `arguments` say which of them are given."""

    def train(
        run: Path | None = None,
        settings: Annotated[TrainConfig, tyro.conf.arg(name="")] = base,
        preset: Annotated[str | None, tyro.conf.arg(help=presets_help())] = None,
        config: Path | None = None,
        tokenizer: str | None = None,
        field: str = "text",
    ) -> int:
        """Train a model into a run folder, or resume the run that is there.

        The options override the settings of --preset or --config. Texts are prepared first, into a folder in data/.
        Exit codes: 0 complete, 3 diverged, 4 out of memory, 75 stopped by a signal, saved, ready to resume. A second
        SIGINT or SIGTERM ends it at once: 130, 143.

        Args:
            run: Run folder; None: runs/DATA, or runs/DATA-PRESET.
            settings: What is trained, on what, how long.
            config: JSON file of settings to start from, such as a run's config.json.
            tokenizer: For texts: gpt2, bpe:10000 (trained here), or a tokenizer's folder; None: of as many tokens as
                the preset has. The model gets the tokenizer's vocabulary, unless --model.vocab-size is given.
            field: For records (.jsonl, .parquet): the field that holds the text.
        """
        from lmcore.data.prepared import short_name

        run = run or Path("runs", "-".join(filter(None, (short_name(settings.data), preset))))
        words = {word.partition("=")[0].replace("_", "-") for word in arguments}
        fixed = config is not None or "--model.vocab-size" in words
        settings = on_prepared(settings, tokenizer, field, fixed)
        divided = settings.strategy != "none"
        if divided:  # of a rank that is gone PyTorch's store tells with the addresses of its code
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        with stop_signals():  # from here on, as importing torch takes a while
            from lmcore.train import train

            try:
                result = train(settings, run)
            except BaseException:
                if divided:  # the end of a process may wait for a rank that never answers
                    timer = threading.Timer(SECONDS_TO_END, os._exit, [EXIT_FAILURE])
                    timer.daemon = True
                    timer.start()
                raise
        loss = "" if result.valid_loss is None else f", validation loss {result.valid_loss:.4f} nats per token"
        if not divided or os.environ.get("RANK", "0") == "0":
            print(f"{run}: {result.state} at step {result.step}{loss}.")
            if result.state == "complete" and settings.keep_weights:
                print(f"Next: lmcore generate {shlex.quote(str(run))} --prompt 'Once upon a time' --temperature 0.8")
        return EXIT_CODES[result.state]

    return train


def on_prepared(settings: TrainConfig, tokenizer: str | None, field: str, fixed: bool) -> TrainConfig:
    """The settings with a prepared corpus, made here of texts, and with its vocabulary, if theirs is not `fixed`."""
    from lmcore.data.prepared import is_prepared, prepare, read_manifest

    folder, vocab_size = Path(settings.data), settings.model.vocab_size
    if is_prepared(folder):
        require(tokenizer is None, f"{folder} is prepared, with a tokenizer of its own: leave out --tokenizer.")
    else:
        tokenizer = tokenizer or ("gpt2" if vocab_size == 50_257 else f"bpe:{vocab_size}")
        folder = prepare(settings.data, tokenizer, config=CorpusConfig(field=field)).folder
        source = read_manifest(folder)["request"]["source"]
        if "train_files" in source and not source["valid_files"] and settings.eval_tokens is None:
            settings = replace(settings, eval_tokens=max(EVAL_TOKENS, settings.model.context_length))
    vocab_size = vocab_size if fixed else read_manifest(folder)["vocab_size"]
    return replace(settings, data=str(folder), model__vocab_size=vocab_size)


def presets_help() -> str:
    """The presets with their sizes."""
    sizes = (
        f"{name} ({', '.join(format_significant(size / 1e6) for size in (num_parameters(config.model), tokens))})"
        for name, config in PRESETS.items()
        for tokens in [config.steps * config.tokens_per_step]
    )
    return (
        "Settings to start from; smoke and laptop end within 15 minutes on two cores of a CPU. With millions of "
        f"parameters, and of tokens that are read: {', '.join(sizes)}."
    )


def evaluate(
    run: Annotated[Path, tyro.conf.Positional],
    split: Literal["valid", "dev"] = "valid",
    data: Path | None = None,
    device: str = "auto",
) -> int:
    """Print how well the best weights of a run predict a text: loss, perplexity, accuracy, loss per byte and word.

    Args:
        run: Run folder.
        split: valid, or dev: the last training documents, on which settings are chosen.
        data: Prepared corpus; by default the one of the run.
        device: auto, cpu, mps, cuda or cuda:N.
    """
    require_exists(run)
    if data is not None:
        require_exists(data)
    from lmcore.checkpoint import load_model
    from lmcore.data import open_data
    from lmcore.device import select_device
    from lmcore.evaluate import evaluate
    from lmcore.run import RunFolder

    folder, (place, _) = RunFolder(run), select_device(device)
    corpus = open_data(data or folder.config().data)
    same = folder.tokenizer_fingerprint() in (None, corpus.tokenizer.fingerprint)
    require(same, f"The run {run} has another tokenizer than the data in {corpus.folder}.")
    learned = split == "dev" != folder.config().evaluate_on
    learned = learned and folder.first_start().get("data_fingerprint") == corpus.fingerprint
    found = evaluate(load_model(folder.best_weights, place), corpus, split, device=place)
    print(
        f"{run} on {split}{', which it has read' * learned}: loss {found.loss:.4f} nats per token (perplexity "
        f"{found.perplexity:.2f}), accuracy {found.accuracy:.1%}, {found.loss_per_byte:.4f} nats per byte, "
        f"word perplexity {found.word_perplexity:.2f}; {found.tokens:,} tokens, {found.bytes:,} bytes, "
        f"{found.words:,} words."
    )
    return 0


def generate(
    run: Annotated[Path, tyro.conf.Positional],
    settings: Annotated[GenerateConfig, tyro.conf.arg(name="")] = GENERATE_DEFAULTS,
    prompt: tuple[str, ...] = ("",),
    tokenizer: str | None = None,
    device: str = "auto",
) -> int:
    """Continue prompts with the best weights of a run: one of them word by word, several in one batch.

    Args:
        run: Run folder.
        settings: How to sample.
        prompt: Texts to continue; empty: the beginning of a document.
        tokenizer: gpt2 or a tokenizer's folder; by default the one of the run.
        device: auto, cpu, mps, cuda or cuda:N.
    """
    prompt = tuple(utf8_text(prompt))
    model, codec = load(run, device, tokenizer)
    from lmcore.generate import generate_text

    if len(prompt) > 1:
        for sample in generate_text(model, codec, prompt, settings):
            print(f"{sample.prompt}{sample.text}\n", file=text_output())
        return 0
    said = list(prompt)  # before the first piece: by then nothing is refused any more

    def stream(_: int, piece: str) -> None:
        print(*said, piece, sep="", end="", flush=True, file=text_output())
        said.clear()

    generate_text(model, codec, prompt, settings, stream=stream)
    print(*said, file=text_output())
    return 0


def load(run: Path, device: str = "cpu", tokenizer: str | None = None) -> tuple[Any, Any]:
    """The best weights of a run and its tokenizer, or the one that `tokenizer` names.

    Raises `UserError` for a path that is not there before it imports torch.
    """
    require_exists(run)
    from lmcore.data import load_tokenizer

    codec = load_tokenizer(tokenizer) if tokenizer else None
    from lmcore.checkpoint import load_model
    from lmcore.device import select_device
    from lmcore.run import RunFolder

    folder = RunFolder(run)
    model = load_model(folder.best_weights, select_device(device)[0])
    return model, codec or folder.tokenizer()


def starting_config(arguments: Sequence[str]) -> TrainConfig:
    """Settings that `lmcore train` starts from: those of --preset or --config, else the defaults."""
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument("--preset")
    options.add_argument("--config")
    given, _ = options.parse_known_args(arguments)
    require(given.preset is None or given.config is None, "Give either --preset or --config, not both.")
    if given.config is not None:
        require_path("--config", given.config)
        require_exists(given.config)
        return from_dict(TrainConfig, read_json(given.config))
    known = ", ".join(PRESETS)
    require(given.preset in (None, *PRESETS), f"There is no preset {given.preset!r}; choose one of {known}.")
    return PRESETS.get(given.preset, TrainConfig())
