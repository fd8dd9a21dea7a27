"""Training runs, none by two processes, reused when finished; a notebook follows them in processes of their own."""

import os
import runpy
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import tyro

from lmcore.config import TrainConfig, from_dict, to_dict
from lmcore.data import open_data
from lmcore.errors import EXIT_INTERRUPTED, FINISHED, UserError, require
from lmcore.files import Busy, read_json, write_json
from lmcore.progress import Progress, in_jupyter
from lmcore.recipes import recipe
from lmcore.run import RunFolder, damage
from lmcore.stopping import stop_signals
from lmcore.train import train
from workbook.report.variations import with_steps

if TYPE_CHECKING:  # a worker shows nothing
    from IPython.display import Image

PLAN = "sweep.json"
"""In the folder of a sweep: its configurations by name."""


def is_finished(config: TrainConfig, run: RunFolder) -> bool:
    """Whether `run` is `FINISHED`, undamaged, with this configuration and this data."""
    try:
        state = run.status()["state"]
        if state not in FINISHED or not run.environment_file.exists() or run.is_busy():
            return False
        same = not run.differences(config, open_data(config.data).fingerprint)
        return same and (state != "complete" or damage(run) is None)
    except UserError:  # training repairs it, or says why not
        return False


def planned(file: Path, data: Path, recipe_name: str, steps: int | None) -> dict[str, TrainConfig]:
    """The configurations of a sweep by name: what `runs(base)` in the Python file returns for this recipe and data.

    `data` is a prepared corpus. Raises `UserError` where there is no such file, function, recipe or corpus.
    """
    require(file.is_file(), f"There is no sweep {file}.")
    functions, corpus = runpy.run_path(str(file)), open_data(data.resolve())
    require("runs" in functions, f"{file} must define runs(base), which returns configurations by name.")
    return functions["runs"](with_steps(recipe(recipe_name, str(corpus.folder), corpus.vocab_size), steps))


def write_plan(folder: Path, runs: Mapping[str, TrainConfig]) -> None:
    """Writes what `work` reads."""
    write_json(folder / PLAN, {name: to_dict(config) for name, config in runs.items()})


def work(folder: Annotated[Path, tyro.conf.Positional]) -> int:
    """What one worker of a sweep does: trains, in order, each run of sweep.json that is neither done nor taken.

    A stop signal, also one between two runs, ends it with the exit code EXIT_INTERRUPTED. Raises `UserError` if a run
    cannot be trained.
    """
    with stop_signals() as stop:
        values = read_json(folder / PLAN)
        require(isinstance(values, dict), f"{folder / PLAN} must be a mapping of run names to settings.")
        for name, config in [(name, from_dict(TrainConfig, each)) for name, each in values.items()]:
            run = RunFolder(folder / name)
            if stop.is_set():
                raise SystemExit(EXIT_INTERRUPTED)
            try:
                if is_finished(config, run):
                    print(f"{run.name}: skipped, it is finished: {run.last_known()[0]}.", flush=True)
                elif train(config, run).state == "interrupted":
                    raise SystemExit(EXIT_INTERRUPTED)
            except Busy:
                print(f"{run.name}: left to the process that is training it.", flush=True)
    return 0


def run_sweep(
    runs: dict[str, TrainConfig], folder: str | os.PathLike, workers: int = 1, records: str = ""
) -> dict[str, RunFolder]:
    """Trains every run in its own subfolder of `folder`, `workers` at a time; finished runs are reused.

    With `records`, another machine's tables, nothing is trained.

    Each worker is a process that takes the next run nobody else holds; with several GPUs they are dealt out in turn.
    Workers outlive this process: a lost notebook loses nothing, and calling again follows the runs that are still
    going. Runs that an earlier call, or a process that was followed, left unfinished are resumed. Output goes to
    worker<number>.log. An interrupt of the notebook's cell ends the workers, too, which save themselves. A run that
    diverges is a result. Raises `UserError` with a worker's last words if it fails.
    """
    folder, begun = Path(folder), False
    folders = {name: RunFolder(folder / name) for name in runs}
    if records:
        return folders
    while left := sum(not is_finished(config, folders[name]) for name, config in runs.items()):
        begun = True
        write_plan(folder, runs)
        logs = [folder / f"worker{index}.log" for index in range(min(workers, left))]
        gpus = visible_gpus() if len(logs) > 1 else []
        children = [_start(folder, log, gpus[index % len(gpus)] if gpus else None) for index, log in enumerate(logs)]
        _follow(folder.name, children, runs, folders)
        for child, log in zip(children, logs, strict=True):
            code, last = child.returncode, log.read_text(errors="replace").strip().rpartition("\n")[2]
            stopped = f"Training in {folder} was stopped by a signal; run this again to resume it."
            require(code != EXIT_INTERRUPTED, stopped)
            require(code == 0, f"The process that wrote {log} ended with code {code}: {last}")
    if not begun:
        print(f"{folder.name}: all {len(runs)} runs reused.")
    return folders


def visible_gpus() -> list[str]:
    """The CUDA GPUs that this process may use, each as CUDA_VISIBLE_DEVICES names it alone."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named[:count] if named else [str(index) for index in range(count)]


def _start(folder: Path, log: Path, gpu: str | None) -> subprocess.Popen:
    """Starts a worker in a session of its own, writing to the log; on this GPU alone, if one is named."""
    variables = os.environ | {"PYTHONUNBUFFERED": "1"} | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
    command, nothing = [sys.executable, "-m", "workbook", "work", str(folder)], subprocess.DEVNULL
    with open(log, "a", encoding="utf-8") as file:
        return subprocess.Popen(command, stdin=nothing, stdout=file, stderr=file, env=variables, start_new_session=True)


def _how_far(configs: Mapping[str, TrainConfig], runs: Mapping[str, RunFolder]) -> tuple[int, str]:
    """The steps that all runs have made, those of a finished one in full; and the losses of those that go on."""
    steps, notes = 0, []
    for name, run in runs.items():
        if run.last_known()[0] in FINISHED:
            steps += configs[name].steps
            continue
        with suppress(UserError, LookupError):  # damaged: training repairs it, or says why not; none yet
            line = run.metrics_lines()[-1]
            steps += line["step"]
            notes.append(f"{run.name}: step {line['step']:,}, loss {line['train_loss']:.3f}")
    return steps, "; ".join(notes)


def curves(runs: Mapping[str, RunFolder]) -> "Image":
    """Training loss by step, a line of a color of its own for each run; the last runs that have begun are named."""
    import seaborn
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from workbook.knobs import DPI, as_png
    from workbook.report.figures import label_ends

    figure, ends = Figure((5.6, 3), layout="constrained", dpi=DPI), {}
    ax = figure.subplots()
    for (name, run), color in zip(runs.items(), seaborn.husl_palette(len(runs), l=0.5), strict=True):
        with suppress(UserError):  # damaged: training repairs it, or says why not
            if lines := [(line["step"], line["train_loss"]) for line in run.metrics_lines()]:
                ax.plot(*zip(*lines, strict=True), color=color)
                ends[name] = (lines[-1][1], color)
    ax.set(xlabel="step", ylabel="training loss (nats per token)", yscale="log")
    label_ends(ax, dict([*ends.items()][-8:]))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return as_png(canvas)


def _follow(
    name: str, children: list[subprocess.Popen], configs: Mapping[str, TrainConfig], runs: Mapping[str, RunFolder]
) -> None:
    """Shows how far the runs are, in JupyterLab also by curves, until the children have ended and nobody holds them.

    An interrupt of the notebook's cell ends the children, which save themselves, and raises `UserError`.
    """
    total, start = sum(config.steps for config in configs.values()), _how_far(configs, runs)[0]
    progress, over, shown = Progress(total, name, start=start), False, None
    if in_jupyter():
        from IPython.display import display

        shown = display(curves(runs), display_id=True)
    try:
        while not over:
            over = all([child.poll() is not None for child in children])
            over = over and not any(run.is_busy() for run in runs.values())
            progress.update(*_how_far(configs, runs))
            if shown and (over or time.monotonic() % 2 < 0.5):  # one poll in two seconds
                shown.update(curves(runs))
            time.sleep(0 if over else 0.5)
    except KeyboardInterrupt:
        for child in children:
            child.terminate()  # it saves itself
        for child in children:
            child.wait()
        words = "Interrupted: training has ended, too; run this again to resume it from what is saved."
        raise UserError(words) from None
    finally:
        progress.close()
