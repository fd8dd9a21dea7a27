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

if TYPE_CHECKING:  # PyTorch is imported when the measurements are made
    from lmcore.profiling.workload import WorkloadConfig

CORPUS = {"data": "embedded", "tokenizer": "gpt2", "num_documents": 20_000}
"""Settings of a training sweep that all its runs have in common, with their defaults: the corpus is prepared once."""

OF_A_RUN = ("recipe", "steps", "tokens")
"""Settings of a training run that are not fields of its configuration, or more than a field."""

PREFIXES = {"optimizer.learning_rate": "lr", "batch_size": "batch"}
"""Names of settings in names of runs, as in `lmcore.recipes`; others have the last word of their own."""

LISTS = ("size", "context_length", "precision", "passes", "attention")
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

    name: str
    kind: str
    about: str = ""
    base: dict[str, Any] = field(default_factory=dict)
    vary: dict[str, list[Any]] = field(default_factory=dict)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    file: str = field(default="", compare=False)

    def __post_init__(self):
        with self.naming():
            require(is_file_name(self.name), f"name must be a file name, not {self.name!r}")
            require(self.kind in ("train", "benchmark"), f"kind must be one of train, benchmark, not {self.kind!r}")
            require(bool(self.vary) != bool(self.runs), "give either vary or runs, and something in it")
            for key, values in self.vary.items():
                require(isinstance(values, list) and bool(values), f"vary.{key} needs a list of values")
            for name, settings in self.runs.items():
                require(is_file_name(name), f"the name of runs.{name} must be a file name")
                require(isinstance(settings, dict), f"runs.{name} must be a mapping of settings, {{}} for none")
            for key, value in self.corpus.items() if self.kind == "train" else ():
                varied = key in self.vary or any(key in settings for settings in self.runs.values())
                require(not varied, f"{key} cannot be varied, as all runs of a sweep have one corpus; set it in base")
                if key == "num_documents":
                    require_positive(key, value)
                else:
                    require(isinstance(value, str), f"{key} must be a text, not {value!r}")

    @property
    def corpus(self) -> dict[str, Any]:
        """`data`, `tokenizer` and `num_documents` of a training sweep."""
        return CORPUS | {key: value for key, value in self.base.items() if key in CORPUS}

    def varied(self) -> list[tuple[str | None, dict[str, Any]]]:
        """For each run, in order, its name if it has one, and the settings in which it differs from the base."""
        if self.runs:
            return list(self.runs.items())
        return [(None, dict(zip(self.vary, values, strict=True))) for values in itertools.product(*self.vary.values())]

    @contextmanager
    def naming(self, name: str | None = None, settings: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Adds file and run, or the values that are combined, to a `UserError`."""
        try:
            yield
        except UserError as error:
            words = [f"runs.{name}"] if name else [f"{key} {value}" for key, value in (settings or {}).items()]
            raise UserError(f"{', '.join([self.file or str(self.name), *words])}: {str(error).rstrip('.')}.") from None


def is_file_name(name: Any) -> bool:
    """Whether this is a text that names a file everywhere: letters, digits, _ . + -, none of the last three first."""
    return isinstance(name, str) and re.fullmatch(r"\w[\w.+-]*", name) is not None


def load_definition(source: str | os.PathLike, overrides: Sequence[str] = ()) -> SweepDefinition:
    """The sweep in a YAML file, or the one of that name in papermill_jobs/sweeps/, with some settings replaced.

    `overrides` are name=value pairs as for `parameters.parse_overrides`. One of a setting that is varied
    replaces its values (by one or a list of them), any other goes to the base. Raises `UserError`, naming file and
    field, on a file that is not such a definition and on every value that a configuration refuses: all runs are made
    once, to see whether they can be.
    """
    path = Path(source)
    if path.suffix in (".yaml", ".yml"):
        require(path.is_file(), f"There is no sweep definition {path}.")
    else:
        folder = find_project() / "papermill_jobs" / "sweeps"
        path = folder / f"{source}.yaml"
        known = ", ".join(sorted(file.stem for file in folder.glob("*.yaml")))
        sentence = (
            f"There is no sweep {str(source)!r} in {folder}, which has {known}; name one of them, or a .yaml file."
        )
        require(is_file_name(str(source)) and path.is_file(), sentence)
    values = read_yaml(path)
    fields = [f.name for f in dataclasses.fields(SweepDefinition) if f.name != "file"]
    unknown = [str(key) for key in values if key not in fields]
    require(not unknown, f"{path}: there is no field {', '.join(unknown)}; the fields are {', '.join(fields)}.")
    for key in ("name", "kind"):
        require(key in values, f"{path}: the field {key} is missing.")
    for key in ("base", "vary", "runs"):
        values[key] = {} if values.get(key) is None else values[key]
        require(isinstance(values[key], dict), f"{path}: {key} must be a mapping of settings.")
        texts = all(isinstance(setting, str) for setting in values[key])
        require(texts, f"{path}: every name in {key} must be a text; quote those that YAML reads otherwise.")
    base, vary = dict(values["base"]), dict(values["vary"])
    for key, value in parse_overrides(overrides).items():
        if isinstance(value, str) and "," in value and (key in vary or key in LISTS):  # names: size=small,medium
            value = [parse_overrides([f"{key}={word.strip()}"])[key] for word in value.split(",")]
        value = list(value) if isinstance(value, tuple) else value
        if key in vary:
            vary[key] = value if isinstance(value, list) else [value]
        else:
            base[key] = value
    definition = SweepDefinition(**values | {"base": base, "vary": vary, "file": str(path)})
    cell_names(definition)
    return definition


class StrictLoader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, and no key may be there twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        """The mapping. Raises `yaml.YAMLError` at the second of two equal keys."""
        keys = [key.value for key, _ in node.value]
        double = [key for key in keys if keys.count(key) > 1]
        if double:
            raise yaml.constructor.ConstructorError(problem=f"{double[0]} is there twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises `UserError` if it cannot be read, or is none."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), StrictLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}).") from error
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None)
        line = f", line {place.line + 1}" if place else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"{path}{line}: not YAML ({problem}).") from None
    require(isinstance(values, dict), f"{path} must be a mapping with name, kind, base, and vary or runs.")
    return values


def write_definition(definition: SweepDefinition, path: str | os.PathLike) -> None:
    """Writes the definition with its overrides as a YAML file that `load_definition` takes, atomically."""
    values = {key: value for key, value in dataclasses.asdict(definition).items() if key != "file" and value}
    with atomic_write(path, "w") as file:
        yaml.safe_dump(values, file, sort_keys=False, allow_unicode=True, width=120)


def frozen_file(definition: SweepDefinition, out: Path) -> Path:
    """Where the definition is kept as it was submitted; another one has another name, as tasks may wait."""
    values = json.dumps(dataclasses.asdict(dataclasses.replace(definition, file="")), default=str)
    return out / "jobs" / f"{definition.name}-{hashlib.sha256(values.encode()).hexdigest()[:8]}.yaml"


def cell_names(definition: SweepDefinition) -> list[str]:
    """Names of the runs or measurements, in order: the index in this list is the index of the array task."""
    return list(train_cells(definition) if definition.kind == "train" else measured_cells(definition))


def train_cells(
    definition: SweepDefinition, data: str = "data", vocab_size: int = VOCABULARY
) -> dict[str, TrainConfig]:
    """The runs of a training sweep by name, on a prepared corpus of this vocabulary. Raises `UserError`."""
    cells: dict[str, TrainConfig] = {}
    for name, settings in definition.varied():
        with definition.naming(name, settings):
            config = train_config(definition.base | settings, data, vocab_size)
            add(cells, name or "_".join(label(*setting) for setting in settings.items()), config)
    return cells


def train_config(settings: Mapping[str, Any], data: str, vocab_size: int) -> TrainConfig:
    """One run of a training sweep. Raises `UserError` on a setting that there is not, or a value that is refused."""
    require(isinstance(settings.get("recipe"), str), "the base needs a recipe, by its name")
    base = recipe(settings["recipe"], data, vocab_size, settings.get("steps"))
    fields = {key: value for key, value in settings.items() if key not in (*CORPUS, *OF_A_RUN)}
    tokens = settings.get("tokens")
    batch_size = fields.pop("batch_size", base.batch_size) if tokens is not None else None
    config = from_dict(TrainConfig, assigned(to_dict(base), fields))
    if tokens is None:
        return config
    require(settings.get("steps") is None, "steps and tokens say the same twice: give one of them")
    require_positive("tokens", tokens)
    require_positive("batch_size", batch_size)
    return next(iter(batch_size_runs(config, [batch_size], tokens).values()))


def measured_cells(definition: SweepDefinition) -> "dict[str, WorkloadConfig]":
    """The measurements of a benchmark sweep by name. Raises `UserError`."""
    cells: dict[str, WorkloadConfig] = {}
    for name, settings in definition.varied():
        with definition.naming(name, settings):
            options = definition.base | settings
            lists = {key: [options[key]] for key in LISTS if key in options and not isinstance(options[key], list)}
            found = benchmark_cases(from_dict(BenchmarkConfig, assigned({}, options | lists)))
            require(name is None or len(found) == 1, f"it is {len(found)} cells; give one value of {', '.join(LISTS)}")
            more = [label(key, value) for key, value in settings.items() if key not in NAMED]
            for own, config in found.items():
                add(cells, name or "-".join([own, *more]), config)
    return cells


def add(cells: dict[str, Any], name: str, config: Any) -> None:
    """Adds a run or measurement. Raises `UserError` if the name is taken."""
    require(name not in cells, f"two cells are named {name}; remove the value that is there twice")
    cells[name] = config


def label(key: str, value: Any) -> str:
    """A setting as part of a name: lr_0.001, batch_64, norm_post."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{PREFIXES.get(key, key.rsplit('.')[-1])}_{re.sub(r'[^0-9A-Za-z.+-]+', '-', text).strip('-')}"


def assigned(values: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested `values` with dotted `settings` put into them. Raises `UserError` where one is a value and a mapping."""
    for key, value in settings.items():
        section, dot, rest = key.partition(".")
        if dot or (isinstance(value, Mapping) and isinstance(values.get(key), Mapping)):
            place = values.setdefault(section, {})
            whole = isinstance(place, dict)
            require(whole, f"{key} is a setting within {section}, which is given a value of its own")
            assigned(place, {rest: value} if dot else value)
        else:
            values[key] = value
    return values
