"""The notebooks of a project, the parameters that each gets at a scale, and what their values must be."""

import ast
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import yaml

from lmcore.config import MODEL_SIZES, ModelConfig, from_dict
from lmcore.errors import UserError, require, require_path
from lmcore.files import read_json
from lmcore.recipes import RECIPES
from lmcore.text import END_OF_TEXT
from lmcore.workbook.notebook import declared_parameters, literals, read_notebook

PARAMETERS_FOLDER = Path("papermill_jobs") / "parameters"
"""One folder for each scale, with a YAML file for each notebook: what `papermill -f` takes."""


def is_project(folder: Path) -> bool:
    """Whether the folder holds notebooks and their parameters."""
    return (folder / "notebooks").is_dir() and (folder / PARAMETERS_FOLDER).is_dir()


def find_project() -> Path:
    """Folder that holds notebooks/: the current one or one above it, else lmcore's checkout."""
    here = Path.cwd()
    for folder in (here, *here.parents, Path(__file__).resolve().parents[2]):
        if is_project(folder):
            return folder
    raise UserError("There is no notebooks/ folder here: run this in a checkout of the project.")


def find_notebooks(project: Path, names: Sequence[str] | None = None) -> list[Path]:
    """The numbered notebooks in order; `names` ("02" or "02_train") picks some. Raises `UserError` on another name."""
    found = {path.stem: path for path in sorted((project / "notebooks").glob("[0-9][0-9]_*.ipynb"))}
    require(bool(found), f"There are no notebooks named like 01_build.ipynb in {project / 'notebooks'}.")
    for name in names or []:
        there = name and any(stem.startswith(name) for stem in found)
        require(bool(there), f"There is no notebook {name!r}; there are {', '.join(found)}.")
    return [path for stem, path in found.items() if not names or stem.startswith(tuple(names))]


def resolve_parameters(
    project: Path, notebooks: Sequence[Path], scale: str, overrides: Mapping[str, Any], common: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Parameters of each notebook by its name: those of papermill_jobs/parameters/<scale>/<notebook>.yaml, then
    `common`, then `overrides`, which go to each notebook that declares them.

    Raises `UserError` on an unknown scale, on a parameter that no notebook declares (papermill would only warn), and on
    a value that the notebook would refuse.
    """
    folder = project / PARAMETERS_FOLDER / scale
    scales = ", ".join(sorted(path.name for path in folder.parent.iterdir() if path.is_dir()))
    known = Path(scale).name == scale and folder.is_dir()  # a scale is a folder's name in runs/, too
    require(known, f"There is no scale {scale!r} ({folder} is missing); choose one of {scales}.")
    names = {path.stem for path in find_notebooks(project)}
    for file in folder.glob("*.yaml"):
        require(file.stem in names, f"{file} names no notebook.")
    declared = {path.stem: declared_parameters(read_notebook(path), path.stem) for path in notebooks}
    every = sorted({key for known in declared.values() for key in known})
    for key in overrides:
        require(key in every, f"No notebook has a parameter {key!r}; there are {', '.join(every)}.")
    resolved = {}
    for name, known in declared.items():
        chosen = {key: value for key, value in overrides.items() if key in known}
        resolved[name] = read_parameters(folder / f"{name}.yaml") | dict(common) | chosen
        check_parameters(name, known, resolved[name], project / "notebooks")
    return resolved


def read_parameters(file: Path) -> dict[str, Any]:
    """The parameters of one notebook at one scale; none, thus its defaults, where there is no file."""
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        return {}
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not YAML ({str(error).splitlines()[0]}).") from error
    require(isinstance(values, dict), f"{file} must be a mapping of parameters.")
    return values


def parse_overrides(pairs: Sequence[str]) -> dict[str, Any]:
    """`name=value` pairs as a mapping; values are read as Python literals, else as YAML."""
    overrides = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        named = all(word.isidentifier() for word in name.split("."))  # dotted: a setting within a setting
        require(bool(equals) and named, f"A parameter is given as name=value, not {pair!r}.")
        try:
            overrides[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # {[]: 1} is a TypeError
            try:
                overrides[name] = yaml.safe_load(text)
            except yaml.YAMLError:
                raise UserError(
                    f"The value of {pair!r} is neither a Python literal nor YAML; repair or quote it."
                ) from None
    return overrides


# ---- what the values must be


class Rule(NamedTuple):
    """What a value must be, in words, and whether it is."""

    words: str
    holds: Callable[[Any], bool]


def number(words: str, holds: Callable[[float], bool], types: tuple[type, ...] = (int, float)) -> Rule:
    """A finite number of one of the types, for which `holds` is true."""
    return Rule(words, lambda value: type(value) in types and math.isfinite(value) and holds(value))


def whole(words: str, least: int, below: float = math.inf) -> Rule:
    """A whole number from `least` on."""
    return number(words, lambda value: least <= value < below, (int,))


def one_of(names: Iterable[str]) -> Rule:
    """One of these texts."""
    return Rule(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


def several(rule: Rule, least: int = 1) -> Rule:
    """A list of at least `least` values that each follow the rule."""
    words = f"a list{'' if least == 0 else ' that is not empty'}, each value {rule.words}"
    return Rule(words, lambda v: isinstance(v, list | tuple) and len(v) >= least and all(map(rule.holds, v)))


COUNT, FROM_0 = whole("a positive whole number", 1), whole("a whole number from 0 on", 0)
SIZE, RECIPE, PRECISION = one_of(MODEL_SIZES), one_of(RECIPES), one_of(("fp32", "tf32", "bf16", "fp16"))
HANDOUTS = ("CS336 (2025)", "CS336 (2026)", "CSE599-O")
SIZES_BY_HANDOUT = Rule(
    f"a mapping from {', '.join(HANDOUTS)}, each of them, to lists of sizes, each {SIZE.words}",
    lambda v: isinstance(v, dict) and set(v) == set(HANDOUTS) and all(map(several(SIZE).holds, v.values())),
)
WARMUPS = Rule(
    f"a list of at least three numbers, each {FROM_0.words}, 0 among them",
    lambda v: several(FROM_0, 3).holds(v) and 0 in v,
)
TEMPERATURE = number("0 (greedy) or a positive number", lambda value: value >= 0)
TOP_P = number("a number in (0, 1]", lambda value: 0 < value <= 1)
TWO_VOCABULARIES = Rule(
    "a mapping from two corpora, or their files, to sizes of a vocabulary, each a whole number above 256",
    lambda v: len(v) == 2 and all(isinstance(k, str) and k for k in v) and all(map(whole("", 257).holds, v.values())),
)
TEXT = Rule("a text", lambda value: isinstance(value, str))
DEVICE = re.compile("auto|cpu|mps|cuda(:[0-9]+)?")
TOKENIZER = Rule(
    "gpt2, or bpe: and a size above 256",
    lambda v: isinstance(v, str) and (v == "gpt2" or (bool(re.fullmatch("bpe:[0-9]+", v)) and int(v[4:]) > 256)),
)
DIFFERENT_TOKENIZERS = Rule(
    f"a list of at least two that differ, each {TOKENIZER.words}",
    lambda v: several(TOKENIZER, 2).holds(v) and len(set(v)) == len(v),
)

ABLATIONS = ("no_norm", "post_norm", "nope", "silu")
"""Of the handout, with learning rates of their own."""
ADDITIONS = ("qk_norm", "tied", "z_loss", "parallel", "autograd")

POSITIVE = number("a positive number", lambda value: value > 0)
RATES_BY_ABLATION = Rule(
    f"a mapping from {', '.join(ABLATIONS)}, each of them, to lists of learning rates, each a positive number",
    lambda v: set(v) == set(ABLATIONS) and all(map(several(POSITIVE).holds, v.values())),
)
RULES: dict[str, Rule] = {
    name: rule
    for names, rule in {
        "warmup_steps batch_rounds": FROM_0,
        "sweep_steps batch_steps trial_steps corpus_characters": Rule(
            f"{COUNT.words}, or None", lambda value: value is None or COUNT.holds(value)
        ),
        "seed": whole("a whole number from 0 to 2**63 - 1", 0, 2**63),
        "01_build.vocab_size": whole("a whole number above 256, as all bytes and <|endoftext|> are tokens", 257),
        "02_train.num_documents 08_experiments.num_documents": whole("a whole number from 2 on", 2),
        "corpora": TWO_VOCABULARIES,
        "model_size answer_size timeline_size attention_size loss_size optimizer_size elementwise_size "
        "step_size decode_size leaderboard_size": SIZE,
        "sizes": several(SIZE),
        "09_distributed.sizes": Rule(
            f"a list that is not empty, of sizes that differ, each {SIZE.words}",
            lambda v: several(SIZE).holds(v) and len(set(v)) == len(v),
        ),
        "warmup_sizes context_sizes asked_sizes": several(SIZE),
        "handouts": SIZES_BY_HANDOUT,
        "compile_sizes": several(SIZE, 0),
        "batch_sizes contexts attention_contexts decode_batches": several(COUNT),
        "batch_context sweep_context": whole("a whole number from 128 on", 128),
        "sweep_head": whole("a whole number from 16 on", 16),
        "warmups": WARMUPS,
        "recipe": RECIPE,
        "leaderboard_recipe": RECIPE,
        "best_recipes": several(RECIPE, 0),
        "trial_recipes": several(RECIPE),
        "precision": PRECISION,
        "precisions sweep_precisions": several(PRECISION),
        "06_memory.precisions": Rule(
            f"a list that begins with fp32 and goes on with at least one more, each {PRECISION.words}",
            lambda v: several(PRECISION, 2).holds(v) and v[0] == "fp32",
        ),
        "extra_precisions": several(PRECISION, 0),
        "learning_rates repeated_rates norm_rates batch_factors trial_factors": several(POSITIVE),
        "best_rate learning_rate long_rate z_loss": POSITIVE,
        "tuned_rates": RATES_BY_ABLATION,
        "additions": several(one_of(ADDITIONS), 0),
        "web_tokenizers": DIFFERENT_TOKENIZERS,
        "world_sizes peak_ranks": several(whole("a whole number from 2 on", 2)),
        "gloo_ranks": several(whole("a whole number from 2 on", 2), 0),
        "message_sizes_mb bucket_sizes_mb": several(POSITIVE),
        "backend": one_of(("auto", "gloo", "nccl")),
        "seeds recipe_seeds": several(whole("a whole number from 0 on", least=0)),
        "ops": one_of(("plain", "fused")),
        "10_wikitext.models": Rule(
            "a mapping from names to sizes", lambda v: len(v) > 0 and all(isinstance(s, dict) for s in v.values())
        ),
        "temperatures": several(TEMPERATURE),
        "dump_temperature": TEMPERATURE,
        "top_ps": several(TOP_P),
        "dump_top_p": TOP_P,
        "prompts": Rule(
            "a list of at least two texts, each another one",
            lambda v: several(TEXT, 2).holds(v) and len(set(v)) == len(v),
        ),
        "device": Rule("auto, cpu, mps, cuda or cuda:N", lambda value: bool(DEVICE.fullmatch(str(value)))),
    }.items()
    for name in names.split()
}
"""By the parameter's name, after the notebook's where this one has another rule; a whole number without one is a COUNT.
The type is that of the default."""

ON_DEV = {"02_train": ("data",), "08_experiments": ("data", "web"), "10_wikitext": ("wikitext",)}
"""Parameters with a corpus on which a notebook chooses settings: on `dev`, the last of its training documents."""

SAME_TYPES = {float: (int, float), list: (list, tuple), tuple: (list, tuple)}
PLAIN = (str, int, float, list, tuple, dict, type(None))


def check_parameters(name: str, known: Mapping[str, Any], given: Mapping[str, Any], folder: Path) -> None:
    """Raises `UserError` if `given` has a parameter that the notebook does not declare, or a wrong value.

    `known` are the notebook's parameters with their defaults; relative paths start at `folder`.
    """
    values = {**known, **given}
    for key, value in given.items():
        require(key in known, f"Notebook {name} has no parameter {key!r}; its parameters are {', '.join(known)}.")
        default, must = known[key], f"Parameter {key!r} of notebook {name} must be"
        kind = type(default)
        typed = default is None or value is None or type(value) in SAME_TYPES.get(kind, (kind,))
        require(typed, f"{must} of type {kind.__name__}, not {value!r}.")
        rule = RULES.get(f"{name}.{key}", RULES.get(key, COUNT if kind is int else None))
        require(rule is None or rule.holds(value), f"{must} {rule.words if rule else ''}, not {value!r}.")
        if key.endswith("tokenizer"):
            trained = re.fullmatch("bpe:([0-9]+)", str(value))
            there = int(trained[1]) > 256 if trained else value == "gpt2" or (value and (folder / value).is_dir())
            require(bool(there), f"{must} gpt2, bpe: and a size above 256, or a tokenizer's folder, not {value!r}.")
        elif key == "timeline_context" and name == "06_memory":
            require(value in values["contexts"], f"{must} one of contexts, {values['contexts']}, not {value!r}.")
        elif key in ("corpora", "web"):
            check_texts([value] if key == "web" else list(value), folder, must)
        elif key == "records":
            require(not value or (folder / value).is_dir(), f"{must} empty, or a folder of tables, not {value!r}.")
        elif key in ("leaderboard_corpus", "wikitext"):
            check_source(value, folder, must)
        elif key == "models" and name == "10_wikitext":
            for model, sizes in value.items():
                try:
                    from_dict(ModelConfig, sizes)
                except UserError as error:
                    raise UserError(f"{must} sizes of models, and {model!r} is none: {error}") from None
        elif key == "context_model":
            models = values["models"]
            require(value in models, f"{must} one of models, {', '.join(models)}, not {value!r}.")
        elif key == "step_tokens":
            contexts = values["contexts"]
            even = all(value % context == 0 for context in contexts)
            require(even, f"{must} a multiple of each of contexts, {contexts}, not {value!r}.")
        elif key == "study":
            from lmcore.profiling.cases import StudyConfig  # which imports torch

            try:
                from_dict(StudyConfig, value).model(1)
            except UserError as error:
                raise UserError(f"Parameter {key!r} of notebook {name}: {error}") from None
    for key in () if values.get("records") else ON_DEV.get(name, ()):
        check_documents(values[key], folder, f"Parameter {key!r} of notebook {name} must be")


def check_documents(source: str, folder: Path, must: str) -> None:
    """Raises `UserError` unless there is a `dev` in the corpus: as few documents as that takes are read."""
    from lmcore.data.corpora import open_corpus, read_documents
    from lmcore.data.downloads import SOURCES
    from lmcore.data.prepared import is_prepared, open_data

    place = folder / source
    if source in ("embedded", *SOURCES):
        return
    if is_prepared(place):
        open_data(place).dev_start  # noqa: B018 raises it
        return
    corpus = open_corpus(place)
    least = 2 if corpus.valid_files else 3  # one of three is held out for validation
    ends = (piece for piece in read_documents(corpus.train_files) if piece.ends_document)
    found = len(list(islice(ends, least)))
    words = f"{must} a corpus of at least {least} documents, {END_OF_TEXT} between them, as settings are chosen on the"
    require(found == least, f"{words} last ones; {source} has {found}.")


def check_texts(sources: Sequence[str], folder: Path, must: str) -> None:
    """Raises `UserError` unless each source is a corpus or a place with text, as seen from `folder`, and all have
    names of their own."""
    from lmcore.data.corpora import open_corpus
    from lmcore.data.downloads import SOURCES

    names = ("embedded", *SOURCES)
    for source in (source for source in sources if source not in names):
        place = folder / source
        known = f"{must} of texts: {source} is not a file or folder; name one, or one of {', '.join(names)}."
        require(place.exists(), known)
        require(open_corpus(place).size("train") > 0, f"{must} of texts: {source} is empty.")
    called = [(folder / source).resolve().name for source in sources]
    require(len(set(called)) == len(called), f"{must} of texts with names of their own, not {', '.join(called)}.")


def check_source(source: str, folder: Path, must: str) -> None:
    """Raises `UserError` unless `source` is a corpus by name, a place with text or a prepared folder, as seen from
    `folder`."""
    from lmcore.data.corpora import open_corpus
    from lmcore.data.downloads import SOURCES
    from lmcore.data.prepared import is_prepared

    names = ("embedded", *SOURCES)
    if source not in names:
        known = f"{must} one of {', '.join(names)}, or a file or folder with text, not {source!r}."
        require(bool(source) and (folder / source).exists(), known)
        there = is_prepared(folder / source) or open_corpus(folder / source).size("train") > 0
        require(there, f"{must} a corpus with text, and {source} is empty.")


def locate(data: str) -> str:
    """`data` as the notebooks need it: a name as it is, a path in full. Raises `UserError` if it has no text."""
    from lmcore.data.corpora import open_corpus
    from lmcore.data.downloads import SOURCES
    from lmcore.data.prepared import is_prepared

    names = ("embedded", *SOURCES)
    require_path("data", data)
    if data in names:
        return data
    place = Path(data)
    require(place.exists(), f"There is no file or folder {data}; name one, or one of the corpora {', '.join(names)}.")
    require(is_prepared(place) or open_corpus(place).size("train") > 0, f"The data {data} are empty: there is no text.")
    return str(place.resolve())


# ---- in the notebook


def begin_notebook(name: str, variables: Mapping[str, Any]) -> None:
    """Refuses parameters that `lmcore workbook` would refuse, and goes to the folder of the notebook.

    Called in the cell after the parameters with the notebook's name and `globals()`; papermill itself takes unknown
    parameters for variables. Relative paths thus start at notebooks/, wherever papermill was started.
    """
    folder = project_of_notebook() / "notebooks"
    content = read_json(folder / f"{name}.ipynb")  # whole; nbformat would take a second to look into it
    known = literals("".join(next(c["source"] for c in content["cells"] if c["cell_type"] == "code")), name)
    cells = [cell for cell in variables.get("In", ()) if cell.startswith("# Parameters\n")]  # papermill's own
    injected = [line for line in ast.parse(cells[-1]).body if isinstance(line, ast.Assign)] if cells else []
    keys = [*known, *(target.id for line in injected for target in line.targets if isinstance(target, ast.Name))]
    given = {key: variables[key] for key in keys if isinstance(variables.get(key, ...), PLAIN)}  # else replaced by now
    os.chdir(folder)
    check_parameters(name, known, given, folder)
    locate(variables["data"])


def project_of_notebook() -> Path:
    """The project of the notebook that papermill, which started this kernel, was given; else `find_project`."""
    with suppress(psutil.Error, OSError):
        parent = psutil.Process().parent()
        for word in parent.cmdline() if parent else ():
            path = Path(parent.cwd(), word).resolve()
            if path.suffix == ".ipynb" and path.is_file() and is_project(path.parents[1]):
                return path.parents[1]
    return find_project()
