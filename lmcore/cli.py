"""`lmcore`: each command is a thin call into a function of the library, imported only when the command runs."""

import argparse
import contextlib
import functools
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from lmcore import cli_benchmark, cli_data, cli_memory, cli_nsys
from lmcore.config import MODEL_SIZES, GenerateConfig, TrainConfig, from_dict, model_config, require
from lmcore.errors import EXIT_CODES, EXIT_INTERRUPTED, EXIT_USER_ERROR, UserError
from lmcore.files import read_json
from lmcore.text import utf8_text

EXIT_FAILURE, EXIT_CTRL_C = 1, 130
GENERATE_DEFAULTS = GenerateConfig()


def doctor(json: bool = False) -> int:
    """Say what this machine has: Python, torch, the device and why, disk, optional parts, data.

    Args:
        json: Print it as JSON.
    """
    from lmcore.doctor import as_json, as_text, examine

    print((as_json if json else as_text)(examine()))
    return 0


def train_command(base: TrainConfig) -> Callable[..., int]:
    """The train command, whose options default to `base`."""

    def train(
        run: Path,
        settings: Annotated[TrainConfig, tyro.conf.arg(name="")] = base,
        preset: str | None = None,
        config: Path | None = None,
    ) -> int:
        """Train a model into a run folder, or go on with the run that is there.

        The options override the settings of --preset or --config. Exit codes: 0 complete, 3 diverged, 4 out of
        memory, 75 stopped by a signal, saved, ready to go on.

        Args:
            run: Run folder.
            settings: What is trained, on what, how long.
            preset: Named settings to start from.
            config: JSON file of settings to start from, such as a run's config.json.
        """
        from lmcore.train import train

        result = train(settings, run)
        loss = "" if result.valid_loss is None else f", validation loss {result.valid_loss:.4f} nats per token"
        print(f"{run}: {result.state} at step {result.step}{loss}.")
        return EXIT_CODES[result.state]

    return train


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
        tokenizer: gpt2 or a tokenizer's folder; by default the one of the run's data.
        device: auto, cpu, mps, cuda or cuda:N.
    """
    from lmcore.checkpoint import load_model
    from lmcore.data import open_data, tokenizer_for
    from lmcore.device import select_device
    from lmcore.generate import generate_text
    from lmcore.run import RunFolder

    prompt, folder = tuple(utf8_text(prompt)), RunFolder(run)
    model = load_model(folder.best_weights, select_device(device)[0])
    codec = tokenizer_for(tokenizer, "embedded") if tokenizer else open_data(folder.config().data).tokenizer
    if len(prompt) > 1:
        for sample in generate_text(model, codec, prompt, settings):
            print(f"{sample.prompt}{sample.text}\n")
        return 0
    said = list(prompt)  # before the first piece: by then nothing is refused any more

    def stream(_: int, piece: str) -> None:
        print(*said, piece, sep="", end="", flush=True)
        said.clear()

    generate_text(model, codec, prompt, settings, stream=stream)
    print(*said)
    return 0


def sweep(folder: Annotated[Path, tyro.conf.Positional]) -> int:
    """Train, one after another, the runs of a sweep that nobody else has taken: one worker of `lmcore.sweep.run_sweep`.

    Args:
        folder: Folder with a sweep.json.
    """
    from lmcore.sweep import work

    work(folder)
    return 0


def workbook(
    scale: str = "smoke",
    data: str = "embedded",
    out: Path | None = None,
    notebooks: tuple[str, ...] = (),
    parameters: tuple[str, ...] = (),
) -> int:
    """Execute the notebooks in order and make the writeup. Exit codes: 1 a notebook failed, 75 stopped by a signal.

    Args:
        scale: smoke, laptop or gpu: a file in papermill_jobs/parameters/.
        data: embedded, a corpus to download (tinystories, ...), or a text file, a folder of text, a prepared corpus.
        out: Folder for everything that is made (default: runs/<scale>).
        notebooks: Only these, by number or name.
        parameters: name=value pairs that override notebook parameters of that name; values are Python literals or YAML.
    """
    from lmcore.parameters import parse_overrides
    from lmcore.workbook import run_workbook

    try:
        result = run_workbook(scale, data, out, notebooks or None, parse_overrides(parameters))
    except KeyboardInterrupt:
        print("lmcore: stopped; the same command goes on with the runs that are saved.", file=sys.stderr)
        return EXIT_INTERRUPTED
    if result.failure:
        print(result.failure, file=sys.stderr)
    print(f"HTML: {result.html}\nPDF:  {result.pdf}")
    return EXIT_FAILURE if result.failure else 0


def refresh(notebooks: tuple[str, ...] = ()) -> int:
    """Execute the notebooks at their defaults and rewrite their committed outputs: those of cells tagged keep_output.

    Args:
        notebooks: Only these, by number or name.
    """
    from lmcore.workbook import refresh

    changed = refresh(notebooks=notebooks or None)
    print("\n".join(f"{path}: rewritten" for path in changed) or "The committed outputs are up to date.")
    return 0


def writeup(out: Annotated[Path, tyro.conf.Positional], check: bool = False) -> int:
    """Make the writeup of an executed workbook again, or check the one that is there.

    Args:
        out: The workbook's folder.
        check: Only verify that HTML and PDF are sound, complete and without an error.
    """
    if check:
        from lmcore.report.verify import check_writeup

        found = check_writeup(out)
        print("Writeup complete: " + ", ".join(f"{count} {name}" for name, count in found.items()) + ".")
    else:
        from lmcore.report.writeup import write_writeup

        html, pdf = write_writeup(out)
        print(f"HTML: {html}\nPDF:  {pdf}")
    return 0


def preset_config(name: str) -> TrainConfig:
    """The recipe of that name, else the defaults with the model size of that name."""
    from lmcore.recipes import RECIPES

    presets = {size: TrainConfig(model=model_config(size)) for size in MODEL_SIZES} | RECIPES
    require(name in presets, f"There is no preset {name!r}; choose one of {', '.join(presets)}.")
    return presets[name]


def starting_config(arguments: Sequence[str]) -> TrainConfig:
    """Settings that `lmcore train` starts from: those of --preset or --config, else the defaults."""
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument("--preset")
    options.add_argument("--config")
    given, _ = options.parse_known_args(arguments)
    require(given.preset is None or given.config is None, "Give either --preset or --config, not both.")
    if given.config is not None:
        return from_dict(TrainConfig, read_json(given.config))
    return TrainConfig() if given.preset is None else preset_config(given.preset)


def application(arguments: Sequence[str]) -> tyro.extras.SubcommandApp:
    """All commands; the chosen one with its own defaults, the costly ones only named unless they are chosen."""
    chosen = arguments[0] if arguments else None
    base = starting_config(arguments[1:]) if chosen == "train" else TrainConfig()
    app = tyro.extras.SubcommandApp()
    app.command(deferred(doctor))
    data = cli_data.data_commands(deferred) if chosen == "data" else doctor
    app.command(data, name="data", help="Prepare, download and look at corpora.")
    tokenizer = cli_data.tokenizer_commands(deferred)
    app.command(tokenizer, name="tokenizer", help="Train a tokenizer; encode and decode with one.")
    measuring = (cli_benchmark.benchmark, cli_nsys.nsys, cli_memory.memory)
    for command in (train_command(base), generate, sweep, *measuring, workbook, refresh, writeup):
        app.command(deferred(command))
    return app


def deferred(command: Callable[..., int]) -> Callable[..., Callable[[], int]]:
    """The command as a function that only takes its arguments: parsing ends before anything runs."""

    @functools.wraps(command)
    def parsed(*arguments: Any, **options: Any) -> Callable[[], int]:
        return functools.partial(command, *arguments, **options)

    return parsed


def parse(arguments: Sequence[str]) -> Callable[[], int]:
    """The chosen command with its arguments. A value that a config refuses raises its own `UserError`.

    tyro would print such a sentence broken into a box, and prints its own ones so.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return application(arguments).cli(args=arguments, prog="lmcore")
    except SystemExit as stop:
        cause: BaseException | None = stop
        while cause is not None:
            if isinstance(cause, UserError):
                raise cause from None
            cause = cause.__context__
        if not said.getvalue():
            raise
        raise UserError(unboxed(said.getvalue())) from None


def unboxed(box: str) -> str:
    """What tyro says of wrong arguments, in one sentence.

    Its message is in the first section of a box, or in the second, after a title, where the terminal has no boxes.
    """
    sections: list[list[str]] = [[]]
    for line in box.splitlines():
        text = line.strip("│ ")
        if text and set(text) <= {"─", "-"}:
            sections.append([])
        elif text and not line.startswith(("╭", "╰")):
            sections[-1].append(text)
    message = sections[0] if "╭" in box or len(sections) == 1 else sections[1]
    return f"{' '.join(message).rstrip('.')}; see lmcore --help."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code. A user's mistake is one sentence on standard error and code 2."""
    try:
        return parse(list(sys.argv[1:] if arguments is None else arguments))()
    except UserError as error:
        print(f"lmcore: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except KeyboardInterrupt:
        print("lmcore: stopped.", file=sys.stderr)
        return EXIT_CTRL_C
