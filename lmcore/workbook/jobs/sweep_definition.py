"""Sweeps as YAML files: what is varied on which base, and the training runs or measurements that follow from it."""

import dataclasses
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lmcore.config import TrainConfig, from_dict, to_dict
from lmcore.errors import UserError, require, require_positive
from lmcore.files import atomic_write
from lmcore.profiling.cases import BenchmarkConfig, benchmark_cases
from lmcore.recipes import batch_size_runs, recipe
from lmcore.workbook.parameters import find_project, parse_overrides

if TYPE_CHECKING:  # PyTorch is imported when something is run
    from lmcore.data import PreparedData

CORPUS = {"data": "embedded", "tokenizer": "gpt2", "num_documents": 20_000}
"""Settings that all runs of a training sweep have in common, with their defaults: the corpus is prepared once."""

PREFIXES = {"optimizer.learning_rate": "lr", "batch_size": "batch"}
"""Names of settings in names of runs, as in `lmcore.recipes`; others have the last word of their own."""

LISTS = ("size", "context_length", "precision", "mode", "attention")
"""Options of a benchmark that take several values; they and the next are in the name that `benchmark_cases` gives."""

NAMED = (*LISTS, "batch_size", "ops", "compile")
VOCABULARY = 50_257
"""Stands for the vocabulary of a corpus that is not prepared yet."""


@dataclass(frozen=True)
class SweepDefinition:
    """A sweep: each combination of the values in `vary`, or each of the named `runs`, on the settings of `base`.

    Settings of a training sweep are `data`, `tokenizer` and `num_documents` (the corpus), `recipe`, `steps` (intervals
    and warm-up shrink with them), `tokens` (each run has as many steps as that takes, `batch_size_runs`) and any field
    of `TrainConfig`, dotted. Those of a benchmark are the fields of `BenchmarkConfig`, dotted where they are nested.
    """

    name: str = ""
    kind: str = ""
    about: str = ""
    base: dict[str, Any] = field(default_factory=dict)
    vary: dict[str, list[Any]] = field(default_factory=dict)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self):
        for name in (self.name, *self.runs):
            require(re.fullmatch(r"\w[\w.+-]*", name) is not None, f"a name must be a file name, not {name!r}")
        require(self.kind in ("train", "benchmark"), f"kind must be one of train, benchmark, not {self.kind!r}")
        require(bool(self.vary) != bool(self.runs), "give either vary or runs, and something in it")
        for key, values in self.vary.items():
            require(isinstance(values, list) and bool(values), f"vary.{key} needs a list of values")
        for name, settings in self.runs.items():
            require(isinstance(settings, dict), f"runs.{name} must be a mapping of settings, {{}} for none")
        if self.kind == "train":
            varied = {key for settings in (self.vary, *self.runs.values()) for key in settings}
            for key, value in self.corpus.items():
                require(key not in varied, f"{key} cannot be varied, as all runs of a sweep have one corpus")
                require(key == "num_documents" or isinstance(value, str), f"{key} must be a text, not {value!r}")
            require_positive("num_documents", self.corpus["num_documents"])

    @property
    def corpus(self) -> dict[str, Any]:
        """`data`, `tokenizer` and `num_documents` of a training sweep."""
        return {key: self.base.get(key, default) for key, default in CORPUS.items()}

    def varied(self) -> list[tuple[str | None, dict[str, Any]]]:
        """For each run, in order, its name if it has one, and the settings in which it differs from the base."""
        if self.runs:
            return list(self.runs.items())
        return [(None, dict(zip(self.vary, values, strict=True))) for values in itertools.product(*self.vary.values())]


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Puts the place, a file or a run, before the sentence of a `UserError`."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {str(error).rstrip('.')}.") from None


def load_definition(source: str | os.PathLike, overrides: Sequence[str] = ()) -> SweepDefinition:
    """The sweep in a YAML file, or the one of that name in papermill_jobs/sweeps/, with some settings replaced.

    `overrides` are name=value pairs as for `parameters.parse_overrides`. One of a setting that is varied
    replaces its values (by one or a list of them), any other goes to the base. Raises `UserError`, naming file and
    field, on a file that is not such a definition and on every value that a configuration refuses: all runs are made
    once, to see whether they can be.
    """
    path, replaced = Path(source), parse_overrides(overrides)
    if path.suffix not in (".yaml", ".yml"):
        folder = find_project() / "papermill_jobs" / "sweeps"
        names = sorted(file.stem for file in folder.glob("*.yaml"))
        sentence = f"There is no sweep {str(source)!r} in {folder}, which has {', '.join(names)}; name one of them"
        require(str(source) in names, f"{sentence}, or a .yaml file.")
        path = folder / f"{source}.yaml"
    require(path.is_file(), f"There is no sweep definition {path}; name a .yaml file, or a sweep's folder.")
    with naming(str(path)):
        values = read_yaml(path)
        for key in ("base", "vary", "runs"):
            settings = values[key] = {} if values.get(key) is None else values[key]
            require(isinstance(settings, dict), f"{key} must be a mapping of settings")
            others = [name for name in settings if not isinstance(name, str)]
            require(not others, f"{key}: the names {others} must be texts; quote them")
        for key, value in replaced.items():
            varied = key in values["vary"]
            if isinstance(value, str) and "," in value and (varied or key in LISTS):  # names: size=small,medium
                value = [parse_overrides([f"{key}={word.strip()}"])[key] for word in value.split(",")]
            value = list(value) if isinstance(value, tuple) else value
            values["vary" if varied else "base"][key] = [value] if varied and not isinstance(value, list) else value
        definition = from_dict(SweepDefinition, values)
        run_names(definition)
    return definition


class StrictLoader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, and no key may be there twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        """The mapping. Raises `yaml.YAMLError` at the second of two equal keys."""
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(problem=f"{key} is there twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
StrictLoader.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("-+.0123456789"))


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises `UserError` if it cannot be read, or is none."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), StrictLoader)
    except yaml.MarkedYAMLError as error:
        raise UserError(f"line {error.problem_mark.line + 1}: not YAML ({error.problem})") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"it cannot be read ({str(error).splitlines()[0]})") from error
    require(isinstance(values, dict), "it must be a mapping with name, kind, base, and vary or runs")
    return values


def write_definition(definition: SweepDefinition, path: str | os.PathLike) -> None:
    """Writes the definition with its overrides as a YAML file that `load_definition` takes, atomically."""
    values = {key: value for key, value in dataclasses.asdict(definition).items() if value}
    with atomic_write(path, "w") as file:
        yaml.safe_dump(values, file, sort_keys=False, allow_unicode=True, width=120)


def frozen_file(definition: SweepDefinition, out: Path) -> Path:
    """Where the definition is kept as it was submitted; another one has another name, as tasks may wait."""
    values = json.dumps(dataclasses.asdict(definition), default=str)
    return out / "jobs" / f"{definition.name}-{hashlib.sha256(values.encode()).hexdigest()[:8]}.yaml"


def run_names(definition: SweepDefinition) -> list[str]:
    """Names of the runs or measurements, in order: the index in this list is the index of the array task."""
    return list(runs_of(definition))


def runs_of(definition: SweepDefinition, data: "PreparedData | None" = None) -> dict[str, Any]:
    """The `TrainConfig` or `WorkloadConfig` of each run or measurement by name, in order.

    Training runs are on `data`; without it, on a corpus to come. Raises `UserError`, naming the run, on a setting that
    there is not, a value that is refused, or a name that is there twice.
    """
    found: dict[str, Any] = {}
    for given, settings in definition.varied():
        with naming(f"runs.{given}" if given else ", ".join(f"{key} {value}" for key, value in settings.items())):
            if definition.kind == "train":
                config = train_config(definition.base | settings, data)
                made = {"_".join(label(*setting) for setting in settings.items()): config}
            else:
                options = definition.base | settings
                options |= {key: [options[key]] for key in {*LISTS} & {*options} if not isinstance(options[key], list)}
                more = [label(key, value) for key, value in settings.items() if key not in NAMED]
                cases = benchmark_cases(from_dict(BenchmarkConfig, merged({}, options)))
                made = {"-".join([own, *more]): config for own, config in cases.items()}
            require(not given or len(made) == 1, f"it is {len(made)} runs; give one value of {', '.join(LISTS)}")
            for own, config in made.items():
                name = given or own
                require(name not in found, f"two runs are named {name}; remove the value that is there twice")
                found[name] = config
    return found


def train_config(settings: Mapping[str, Any], data: "PreparedData | None") -> TrainConfig:
    """One run of a training sweep. Raises `UserError` on a setting that there is not, or a value that is refused."""
    require(isinstance(settings.get("recipe"), str), "the base needs a recipe, by its name")
    place, vocabulary = (str(data.folder), data.vocab_size) if data else ("data", VOCABULARY)
    base, tokens = recipe(settings["recipe"], place, vocabulary, settings.get("steps")), settings.get("tokens")
    others = (*CORPUS, "recipe", "steps", "tokens", *(["batch_size"] if tokens is not None else []))
    fields = {key: value for key, value in settings.items() if key not in others}
    config = from_dict(TrainConfig, merged(to_dict(base), fields))
    if tokens is None:
        return config
    batch_size = settings.get("batch_size", base.batch_size)
    require(settings.get("steps") is None, "steps and tokens say the same twice: give one of them")
    require_positive("tokens", tokens)
    require_positive("batch_size", batch_size)
    return batch_size_runs(config, [batch_size], tokens)[f"batch_{batch_size}"]


def label(key: str, value: Any) -> str:
    """A setting as part of a name: lr_0.001, batch_64, norm_post."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{PREFIXES.get(key, key.rsplit('.')[-1])}_{re.sub(r'[^0-9A-Za-z.+-]+', '-', text).strip('-')}"


def merged(values: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested `values` with dotted `settings` in them. Raises `UserError` where one is a value and a mapping."""
    for key, value in settings.items():
        section, dot, rest = key.partition(".")
        place = values.get(section, {})
        if dot or (isinstance(value, Mapping) and isinstance(place, dict)):
            require(isinstance(place, dict), f"{key} is a setting within {section}, which is given a value of its own")
            value = merged({**place}, {rest: value} if dot else value)
        values[section] = value
    return values
