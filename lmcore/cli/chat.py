"""`lmcore chat` and `lmcore play`: the best weights of a run continue what is typed, in the terminal or on a page."""

import signal
import sys
from codecs import getincrementaldecoder
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from lmcore.cli.output import text_output, utf8_text
from lmcore.cli.training import load
from lmcore.config import GenerateConfig, replace
from lmcore.text import optional

DEFAULTS = GenerateConfig()
Run = Annotated[Path, tyro.conf.Positional]
COMMANDS = "/reset, /temperature 0.8, /quit; Ctrl-C stops a reply, Ctrl-D ends"


def chat(run: Run, settings: Annotated[GenerateConfig, tyro.conf.arg(name="")] = DEFAULTS, device: str = "auto") -> int:
    """Continue what is typed, line by line and token by token: the model sees the last tokens of all that was written.

    Args:
        run: Run folder.
        settings: How to sample; the seed grows by one with each line.
        device: auto, cpu, mps, cuda or cuda:N.
    """
    model, codec = load(run, device)
    print(f"{run} continues text; it was not trained to follow instructions. {COMMANDS}.", flush=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ends a reply, not the command
    ids: list[int] = []
    while True:
        try:
            line = next(utf8_text(iter(partial(input, "> " if sys.stdin.isatty() else ""), None)))
            command, _, value = line.partition(" ")
            if command == "/reset":
                ids.clear()
            elif command == "/temperature":
                try:
                    settings = replace(settings, temperature=float(value))
                except ValueError as error:
                    print(error)
            elif command == "/quit":
                return 0
            elif command.startswith("/"):
                print(f"There is no {command}, but {COMMANDS}.")
            else:
                ids += codec.encode("\n" * bool(ids and line) + line)
                reply(model, codec, ids, settings)
                settings = replace(settings, seed=settings.seed + 1)
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print()


def reply(model: Any, codec: Any, ids: list[int], settings: GenerateConfig) -> None:
    """Adds to `ids` what the model continues them with, and prints each character when all its bytes are there."""
    from lmcore.generate import generate

    decode = getincrementaldecoder("utf-8")("replace").decode

    def on_token(_: int, token: int) -> None:
        ids.append(token)
        print(decode(codec.decode_bytes([token])), end="", flush=True, file=text_output())

    window = ids[-model.config.context_length :]
    generate(model, [window], settings, codec.eot_id, on_token, num_ids=codec.vocab_size)
    print(decode(b"", True), flush=True, file=text_output())


def play(run: Run, port: int = 0, device: str = "auto") -> int:
    """Serve a page to this machine alone, on which the model continues a prompt and shows each token's probability.

    Args:
        run: Run folder.
        port: Port on 127.0.0.1; 0: a free one.
        device: auto, cpu, mps, cuda or cuda:N.
    """
    model, codec = load(run, device)
    return optional("lmcore.cli.page", "lmcore play needs", "tornado", "chat").serve(model, codec, run, port)
