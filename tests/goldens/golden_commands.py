"""What the commands take, and what they answer to bad input: found by calling `lmcore` in this process."""

import contextlib
import io
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import golden_library as library
from golden_runs import CORPUS, FOLDER

GROUPS = ("data", "tokenizer", "sweep", "submit")
"""Commands that have commands of their own."""


def called(arguments: list[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = library.command(arguments)
        except SystemExit as stop:
            code = stop.code
    return code, out.getvalue(), err.getvalue()


def help_of(words: list[str]) -> str:
    """The help of a command in one column, as it is printed where there are no boxes."""
    with patch.dict(os.environ, COLUMNS="100"):
        code, text, _ = called([*words, "--help"])
    assert code == 0, f"{' '.join(words)} --help ends with {code}"
    return text


def subcommands(words: list[str]) -> list[str]:
    """Names of the commands of a group, as its help lists them."""
    return re.search(r"^usage: .*\{(.*)\}", help_of(words))[1].split(",")


def options_of(words: list[str]) -> dict[str, str]:
    """For each option and positional argument, with the type that its help shows: required, or the default."""
    found: dict[str, list[str]] = {}
    section, name = "", None
    for line in map(str.rstrip, help_of(words).splitlines()):
        if set(line.strip()) == {"-"}:
            continue
        entry = re.match(r"^  (\S.*?)(?:  +(\S.*))?$", line)
        if title := re.match(r"^ (\S.*)$", line):
            section, name = title[1], None
        elif entry and not entry[1].startswith("-h,") and (entry[1][0] == "-" or section.startswith("positional")):
            name = entry[1]
            found[name] = [entry[2] or ""]
        elif name and line.strip():
            found[name].append(line.strip())
    end = re.compile(r".*\((required|default:.*?)\)$")
    return {name: match[1] if (match := end.match(" ".join(said).strip())) else "" for name, said in found.items()}


def all_options() -> dict[str, Any]:
    """The options of every command."""
    listed = subcommands([])
    commands = [[name] for name in listed if name not in GROUPS]
    commands += [["requeue"]] if "requeue" not in listed else []  # job.sh calls it, whether it is listed or not
    commands += [[group, name] for group in GROUPS for name in subcommands([group])]
    return {"commands": listed} | {" ".join(words): options_of(words) for words in commands}


LINES = """
lmcore
trian
train
train --run r --preset huge
train --run r --preset small --config c
train --run r --config nowhere.json
train --run r --config list.json
train --run r --config unknown.json
train --run r --config string.json
train --run r --config broken.json
train --run r --model.d-model 63
train --run r --model.d-model 48 --model.num-heads 16
train --run r --model.num-layers 0
train --run r --model.vocab-size -5
train --run r --model.rope-theta -1
train --run r --model.rope-theta nan
train --run r --model.dropout 1.0
train --run r --model.norm pst
train --run r --model.attention plane
train --run r --model.checkpoint-every 0
train --run r --model.embedding-init-std 0
train --run r --optimizer.learning-rate 0
train --run r --optimizer.learning-rate nan
train --run r --optimizer.learning-rate 1e-3 --optimizer.min-learning-rate 1e-2
train --run r --optimizer.betas 0.9 1.0
train --run r --optimizer.betas 0.9
train --run r --optimizer.warmup-steps -1
train --run r --optimizer.cosine-steps 5
train --run r --optimizer.max-grad-norm 0
train --run r --optimizer.weight-decay -0.1
train --run r --optimizer.name adam
train --run r --steps many
train --run r --steps 0
train --run r --batch-size -1
train --run r --seed -1
train --run r --seed 9223372036854775808
train --run r --keep-checkpoints 0
train --run r --precision fp8
train --run r --trackers mlflow
train --run r --learning-rat 3
train --run r --data nowhere
train --run r --data text.txt
train --run r --data corpus --device cpu --model.vocab-size 100
train --run r --data corpus --device cpu --model.vocab-size 300 --model.context-length 100000
train --run r --data corpus --device tpu
train --run text.txt --data corpus --device cpu --model.vocab-size 300 --model.context-length 16
train --run run --config run/config.json --data corpus --seed 5
train --run run --config run/config.json --data corpus --model.d-ff 32 --optimizer.eps 1e-6
train --run changed --config run/config.json --data corpus
generate
generate r --temperature -1
generate r --top-p 0
generate r --top-k 0
generate r --max-new-tokens 0
generate r --precision fp8
generate r --seed -3
generate nowhere
generate text.txt
generate run
generate run --tokenizer nowhere --device cpu
generate run --tokenizer corpus/tokenizer --device tpu
generate run --tokenizer corpus/tokenizer --device cpu --ops fused --no-kv-cache
generate broken --device cpu
data
data prepare
data prepare embedded
data prepare nowhere --out d
data prepare empty.txt --out d --tokenizer bpe:300
data prepare latin.txt --out d --tokenizer bpe:300
data prepare text.txt --out d --tokenizer bpe:many
data prepare text.txt --out d --tokenizer bpe:100
data prepare text.txt --out d --tokenizer nowhere
data prepare embedded --out d --tokenizer bpe:300 --num-documents 0
data prepare embedded --out text.txt --tokenizer bpe:300 --num-documents 20
data prepare text.txt --out d --tokenizer bpe:300 --valid-fraction 2
data prepare text.txt --out d --tokenizer bpe:300 --valid nowhere.txt
data info nowhere
data info broken_corpus
data info text.txt
data download nothing
tokenizer
tokenizer train
tokenizer train nowhere.txt --out t
tokenizer train text.txt --out t --vocab-size 100
tokenizer train latin.txt --out t --vocab-size 300
tokenizer train text.txt --out text.txt --vocab-size 300
tokenizer encode --tokenizer nowhere --text a
tokenizer encode --tokenizer bpe:300x --text a
tokenizer decode --tokenizer nowhere 1
tokenizer decode --tokenizer corpus/tokenizer 100000
tokenizer decode --tokenizer corpus/tokenizer -- -1
tokenizer decode --tokenizer corpus/tokenizer one
benchmark --size huge
benchmark --mode backward
benchmark --precision fp8
benchmark --steps 0
benchmark --warmup-steps -1
benchmark --batch-size 0
benchmark --model.d-model 63
benchmark --size small --context-length 0
benchmark --ops fused --precision fp16 --model.dropout 0.1
benchmark --ops fussed
nsys --top 0
nsys --range a
nsys --trim a.sqlite
nsys --report nowhere.sqlite
nsys --report nowhere.json
nsys --report text.txt
nsys --report text.sqlite
nsys --report broken.json
nsys --report kernels.sqlite --range nothing
nsys --report kernels.sqlite --range inference --scope block
nsys --size huge
nsys --mode sideways
memory --top -1
memory --snapshot nowhere.pickle
memory --snapshot text.txt
memory --snapshot evil.pickle
memory --size huge
memory --mode step
memory --steps 3
sweep
sweep run
sweep run nowhere
sweep run broken.yaml
sweep run unknown.yaml
sweep run sweep.yaml --task -1
sweep run sweep.yaml --set steps
sweep run sweep.yaml --set nothing=3
sweep run sweep.yaml --set optimizer.learning_rate=0
sweep table nowhere
sweep table nowhere --set steps=3
sweep work nowhere
submit
submit workbok
submit notebook
submit notebook 99 --dry-run
submit notebook 02 --dry-run --scale huge
submit notebook 02 --dry-run --parameters nothing=3
submit notebook 02 --dry-run --parameters steps
submit notebook 02 --dry-run --time soon
submit notebook 02 --dry-run --site nowhere.yaml
submit workbook --dry-run --scale huge
submit workbook --dry-run --notebooks 99
submit workbook --dry-run --data nowhere
submit sweep
submit sweep nowhere --dry-run
submit sweep learning_rate --dry-run --concurrency 0
submit sweep learning_rate --dry-run --set nothing=1
jobs --tail -1
jobs nowhere --tial 3
requeue
requeue nowhere --attempts 0
workbook --scale huge
workbook --notebooks 99
workbook --parameters steps
workbook --parameters steps={4
workbook --parameters 0steps=4
workbook --data nowhere
workbook --stop-seconds soon
writeup
writeup nowhere
writeup nowhere --check
writeup text.txt
refresh --notebooks 99
handin nowhere
handin --names mit
handin run
doctor --jsn
doctor now
"""
"""The command lines, one a line; those of submit, workbook and refresh are called in the project's folder."""

IN_PROJECT = ("submit", "workbook", "refresh")


def fill(folder: Path, project: Path) -> None:
    """What the command lines find in their working folder: sound and damaged files."""
    shutil.copytree(CORPUS, folder / "corpus")
    shutil.copytree(FOLDER / "plain", folder / "run")
    shutil.copytree(FOLDER / "plain", folder / "changed")
    changed = folder / "changed" / "config.json"
    changed.write_text(changed.read_text().replace('"seed": 0', '"seed": 7'))
    shutil.copytree(FOLDER / "plain", folder / "broken")
    (folder / "broken" / "checkpoints" / "best.safetensors").write_bytes(b"\x10" * 100)
    shutil.copytree(CORPUS, folder / "broken_corpus")
    with open(folder / "broken_corpus" / "train.bin", "r+b") as file:
        file.write(b"\xff" * 8)
    texts = {
        "text.txt": "the cat sat on the mat with the hat\n" * 99,
        "empty.txt": "",
        "text.sqlite": "this is not a database, " * 99,
        "list.json": "[1, 2]",
        "unknown.json": '{"stepps": 3}',
        "string.json": '{"steps": "3"}',
        "broken.json": '{"steps": ',
        "broken.yaml": "task: [train",
        "unknown.yaml": "colour: blue\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "latin.txt").write_bytes("caf\xe9 ".encode("latin-1") * 99)
    (folder / "evil.pickle").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    shutil.copy(project / "papermill_jobs" / "sweeps" / "learning_rate.yaml", folder / "sweep.yaml")
    shutil.copy(project / "tests" / "data" / "h200_two_layers_nsys2025.3.sqlite", folder / "kernels.sqlite")


def refusals(folder: Path, project: Path) -> dict[str, Any]:
    """For each command line its exit code and the lines of standard error, with places put in general terms."""
    fill(folder, project)
    found = {}
    for line in LINES.strip().splitlines():
        words = [] if line == "lmcore" else shlex.split(line)
        place = project if words and words[0] in IN_PROJECT else folder
        with contextlib.chdir(place), patch.dict(os.environ, COLUMNS="80"), patch("sys.stdin", io.StringIO()):
            code, _, err = called(words)
        found[line] = {"exit code": code, "says": in_general(err, folder, project).splitlines()}
    return found


def in_general(text: str, folder: Path, project: Path) -> str:
    """A sentence without what differs between machines: folders, temporary names, versions of interpreters."""
    for place, name in ((folder, "<folder>"), (project, "<project>")):
        text = text.replace(str(place.resolve()), name).replace(str(place), name)
    return re.sub(r"0x[0-9a-f]{6,}", "<address>", text)
