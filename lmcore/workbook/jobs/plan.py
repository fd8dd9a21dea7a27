"""Which jobs a workbook, a notebook or a sweep is made of, and which waits for which. All input is checked here."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lmcore.errors import require
from lmcore.workbook.jobs.ledger import Kind
from lmcore.workbook.notebook import declared_parameters, read_notebook
from lmcore.workbook.parameters import find_notebooks, parse_overrides, resolve_parameters

NEEDS = {"generate": "train"}
"""Notebooks that build on what another one made, by their names without the number; all others run side by side."""


@dataclass(frozen=True)
class Job:
    """One job to be: the plain script with its variables and arguments, and the jobs that it waits for by name."""

    name: str
    kind: Kind
    script: str
    """File in papermill_jobs/."""
    variables: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    after_ok: tuple[str, ...] = ()
    """Jobs that must have succeeded."""
    after_any: tuple[str, ...] = ()
    """Jobs that must have ended, however they did."""
    notebooks: tuple[str, ...] = ()
    tasks: tuple[int, ...] | None = None
    """Indices of an array."""
    concurrency: int | None = None
    """How many tasks of the array run at a time; None: as many as the cluster lets."""

    @property
    def array(self) -> str | None:
        """The indices as --array takes them: 0-3,7%4."""
        if self.tasks is None:
            return None
        return ranges(self.tasks) + (f"%{self.concurrency}" if self.concurrency else "")


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: 0-3,7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def plan_workbook(
    project: Path,
    scale: str,
    data: str,
    out: Path,
    notebooks: Sequence[str] = (),
    parameters: Sequence[str] = (),
    one_job: bool = False,
) -> list[Job]:
    """Jobs of a workbook: one for each notebook, and the writeup last, also when one failed; or all in one job.

    Raises `UserError` on unknown notebooks, scales and parameters, and on data that is not there.
    """
    paths, common = checked(project, scale, data, out, notebooks, parameters)
    names = tuple(path.stem for path in paths)
    if one_job:
        chosen = {"NOTEBOOKS": " ".join(names) if notebooks else ""}
        return [
            Job("workbook", "workbook", "workbook.sbatch", common | chosen, options(parameters), notebooks=names),
        ]
    jobs = [notebook_job(path, common, parameters, names) for path in paths]
    writeup = Job("writeup", "writeup", "writeup.sbatch", common, after_any=names, notebooks=names)
    return [*jobs, writeup]


def plan_notebook(
    project: Path, scale: str, data: str, out: Path, notebook: str, parameters: Sequence[str] = ()
) -> list[Job]:
    """The job of one notebook, without a writeup. Raises `UserError` as `plan_workbook` does."""
    paths, common = checked(project, scale, data, out, [notebook], parameters)
    require(len(paths) == 1, f"{notebook!r} names {len(paths)} notebooks: {', '.join(path.stem for path in paths)}.")
    return [notebook_job(paths[0], common, parameters)]


def checked(
    project: Path, scale: str, data: str, out: Path, notebooks: Sequence[str], parameters: Sequence[str]
) -> tuple[list[Path], dict[str, str]]:
    """The notebooks, and the variables that all their jobs have; raises `UserError` on anything that is wrong."""
    from lmcore.workbook.record import RECORD, read_plan
    from lmcore.workbook.run import locate

    if (out / RECORD).exists():
        read_plan(out)
    paths = find_notebooks(project, notebooks or None)
    located = locate(data)
    common = {"scale": scale, "data": located, "out": str(out)}
    resolve_parameters(project, paths, scale, parse_overrides(parameters), common)
    return paths, {"SCALE": scale, "DATA": located, "OUT": str(out)}


def notebook_job(path: Path, common: dict[str, str], parameters: Sequence[str], others: Sequence[str] = ()) -> Job:
    """The job of one notebook. It gets those of the parameters that it declares, and waits for what it needs."""
    declared = declared_parameters(read_notebook(path), path.stem)
    own = [pair for pair in parameters if pair.partition("=")[0] in declared]
    needed = NEEDS.get(title(path.stem))
    return Job(
        path.stem,
        "notebook",
        "notebook.sbatch",
        common | {"NOTEBOOKS": path.stem},
        options(own),
        after_ok=tuple(name for name in others if needed is not None and title(name) == needed),
        notebooks=(path.stem,),
    )


def title(stem: str) -> str:
    """A notebook's name without its number: train for 02_train."""
    return stem.partition("_")[2]


def options(parameters: Sequence[str]) -> tuple[str, ...]:
    """Arguments of `lmcore workbook` for these name=value pairs."""
    return ("--parameters", *parameters) if parameters else ()


def plan_sweep(
    name_or_file: str, out: Path, overrides: Sequence[str] = (), concurrency: int | None = None
) -> list[Job]:
    """An array over the cells of a sweep that are not finished, then the table of all; nothing if all are finished.

    The tasks follow `frozen_file`, not the definition, which may be edited before they start. Raises `UserError` on a
    definition that is wrong and on a concurrency below 1.
    """
    from lmcore.workbook.jobs.sweep_definition import frozen_file
    from lmcore.workbook.jobs.sweeps import load_definition, unfinished
    from lmcore.workbook.run import locate

    require(concurrency is None or concurrency >= 1, f"--concurrency must be at least 1, not {concurrency}.")
    definition = load_definition(name_or_file, overrides)
    if definition.kind == "train":
        locate(definition.corpus["data"])
    tasks = tuple(unfinished(definition, out))
    if not tasks:
        return []
    variables = {"OUT": str(out)}
    array = Job(
        definition.name,
        "sweep",
        "sweep.sbatch",
        variables | {"SWEEP": str(frozen_file(definition, out))},
        tasks=tasks,
        concurrency=concurrency,
    )
    table = f"{definition.name}-table"
    return [array, Job(table, "sweep-table", "sweep-table.sbatch", variables, after_any=(array.name,))]
