"""Training runs in turn, none by two processes, reused when finished: one that a notebook follows, or many workers."""

import base64
import io
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from lmcore.config import TrainConfig, from_dict, replace, to_dict
from lmcore.data import PreparedData, open_data
from lmcore.device import visible_gpus
from lmcore.errors import EXIT_CODES, EXIT_INTERRUPTED, EXIT_USER_ERROR, FINISHED, UserError, require
from lmcore.files import read_json, write_json
from lmcore.progress import Progress, in_jupyter, show_live
from lmcore.run import BUSY, RunBusy, RunFolder, damage
from lmcore.stopping import StopEvent, stop_signals
from lmcore.train import train

SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_BETWEEN_PICTURES = 2.0


def run_state(config: TrainConfig, run: RunFolder, data: PreparedData | None) -> tuple[str, str | None]:
    """State of a run with this configuration on these data, and why where there is something to say.

    Without the data, those that the run was made with are taken for the same. States: not run, running, stopped (begun,
    and neither ended nor in anyone's hands; it resumes), failed, and the `FINISHED`: complete, with undamaged results,
    diverged, out of memory.
    """
    try:
        if run.is_busy():
            return "running", None
        status = run.status()
        if run.config_file.exists():
            if data is None:
                config = replace(config, model__vocab_size=run.config().model.vocab_size)
            if differences := run.differences(config, data.fingerprint if data else run.data_fingerprint()):
                return "not run", f"The run folder was made with other settings: {', '.join(differences)}."
        elif status["state"] != "failed":
            return "not run", None
    except UserError as error:
        return "failed", str(error)
    state = status["state"]
    if state in FINISHED and not run.environment_file.exists():
        return "stopped", f"{run.environment_file} is gone; training again looks for what the data were."
    if state == "complete" and (reason := damage(run)):
        return "stopped", f"{reason} Training again repairs it."
    return (state if state in (*FINISHED, "failed") else "stopped"), status.get("reason")


def is_finished(config: TrainConfig, run: RunFolder) -> bool:
    """Whether `run` is `FINISHED`, undamaged, with this configuration and this data."""
    return run.last_known()[0] in FINISHED and run_state(config, run, open_data(config.data))[0] in FINISHED


def train_each(
    configs: Mapping[str, TrainConfig], folder: Path, stop: StopEvent, task: Callable[[TrainConfig, RunFolder], str]
) -> list[str]:
    """Trains the runs in turn, each in its subfolder; returns how they ended, `interrupted` last after a stop signal.

    Finished ones are skipped; those in other hands are left to them, and `running`.
    """
    ended: list[str] = []
    for name, config in configs.items():
        run = RunFolder(folder / name)
        if stop.is_set() or "interrupted" in ended:
            return [*ended, "interrupted"]
        if is_finished(config, run):
            print(f"{name}: skipped, it is finished: {run.last_known()[0]}.", flush=True)
            continue
        try:
            ended.append(task(config, run))
        except RunBusy:
            print(f"{name}: left to the process that is training it.", flush=True)
            ended.append("running")
    return ended


def work(folder: str | os.PathLike) -> None:
    """What one worker of `run_sweep` does: trains, in order, each run of sweep.json that is neither done nor taken.

    A stop signal, also one between two runs, ends it with the exit code EXIT_INTERRUPTED; a second one at once.
    """
    with stop_signals(exits=True) as stop:
        file = Path(folder) / "sweep.json"
        runs = read_json(file)
        require(isinstance(runs, dict), f"{file} must be a mapping of run names to settings.")
        configs = {name: from_dict(TrainConfig, values) for name, values in runs.items()}
        if "interrupted" in train_each(configs, Path(folder), stop, lambda config, run: train(config, run).state):
            raise SystemExit(EXIT_INTERRUPTED)


def run_or_reuse(config: TrainConfig, folder: str | os.PathLike) -> RunFolder:
    """Trains in a child process and follows its metrics; a finished run with the same config and data is reused.

    The child outlives this process: a lost notebook loses nothing, and calling again follows the run that is still
    going. Where the process that is followed ends before the run does, this one goes on with it. Output goes to
    log.txt in the run folder. An interrupt of the notebook's cell ends the child, too, which saves itself.
    Raises `UserError` with the child's last words if it fails.
    """
    run = RunFolder(folder)
    while not is_finished(config, run):
        if run.config_file.exists():
            run.require_same(config, open_data(config.data).fingerprint)
        said, children = run.log_file.stat().st_size if run.log_file.exists() else 0, []
        if run.is_busy():
            print(f"{run.name}: another process trains it; this one follows.", flush=True)
        else:
            request = run.path / "requested.json"
            write_json(request, to_dict(config))
            children = [_start(["train", "--config", str(request), "--run", str(run.path)], run)]
        progress = Progress(config.steps, run.name, start=run.last_known()[1])
        _follow(progress, partial(_latest, run), children, {run.name: run})
        for child in children:
            words = run.log_file.read_bytes()[said:].decode(errors="replace")
            if child.returncode != EXIT_USER_ERROR or BUSY not in words:  # else another process was faster
                _check(child.returncode, run)
                return run
    state, step = run.last_known()
    print(f"{run.name}: reused, {state} at step {step}.")
    return run


def run_sweep(runs: dict[str, TrainConfig], folder: str | os.PathLike, workers: int = 1) -> dict[str, RunFolder]:
    """Trains every run in its own subfolder of `folder`, `workers` at a time; finished runs are reused.

    Each worker is a process that takes the next run nobody else holds; with several GPUs they are dealt out in turn.
    A run that diverges is a result. Resumes runs that an earlier call left unfinished. Raises `UserError` if a worker
    fails otherwise.
    """
    folder, reused = Path(folder), True
    write_json(folder / "sweep.json", {name: to_dict(config) for name, config in runs.items()})
    folders = {name: RunFolder(folder / name) for name in runs}

    def done() -> tuple[int, str]:
        states = {name: run.last_known()[0] for name, run in folders.items()}
        latest = {name: _latest(folders[name]) for name, state in states.items() if state == "running"}
        note = "; ".join(
            f"{name}: step {step:,}/{runs[name].steps:,}{loss and f', {loss}'}" for name, (step, loss) in latest.items()
        )
        return sum(state in FINISHED for state in states.values()), note

    while left := sum(not is_finished(config, folders[name]) for name, config in runs.items()):
        reused = False
        logs = [RunFolder(folder / f".worker{index}") for index in range(min(workers, left))]
        children = [_start(["sweep", "work", str(folder)], log, gpu=index) for index, log in enumerate(logs)]
        _follow(Progress(len(runs), folder.name, "run", len(runs) - left), done, children, folders)
        for child, log in zip(children, logs, strict=True):
            _check(child.returncode, log)
    if reused:
        print(f"{folder.name}: all {len(runs)} runs reused.")
    return folders


def _start(arguments: list[str], run: RunFolder, gpu: int | None = None) -> subprocess.Popen:
    """Starts `lmcore` with these arguments in a session of its own, writing to the run's log."""
    variables, gpus = os.environ | {"PYTHONUNBUFFERED": "1"}, visible_gpus()
    if gpu is not None and len(gpus) > 1:
        variables["CUDA_VISIBLE_DEVICES"] = gpus[gpu % len(gpus)]
    run.path.mkdir(parents=True, exist_ok=True)
    command, nothing = [sys.executable, "-m", "lmcore", *arguments], subprocess.DEVNULL
    with open(run.log_file, "a", encoding="utf-8") as log:
        return subprocess.Popen(command, stdin=nothing, stdout=log, stderr=log, env=variables, start_new_session=True)


def _follow(
    progress: Progress,
    look: Callable[[], tuple[int, str]],
    children: list[subprocess.Popen],
    runs: Mapping[str, RunFolder],
) -> None:
    """Shows how far it is, as `look` finds it, until the children have ended and nobody holds the runs.

    In JupyterLab the runs' training losses are drawn besides. An interrupt of the notebook's cell ends the children,
    which save themselves, and raises `UserError`.
    """
    over, curves = False, LiveCurves(runs) if in_jupyter() else None
    try:
        while not over:
            over = all([child.poll() is not None for child in children])
            over = over and not any(run.is_busy() for run in runs.values())
            progress.update(*look())
            if curves is not None:
                curves.update(now=over)
            time.sleep(0 if over else SECONDS_BETWEEN_LOOKS)
    except KeyboardInterrupt:
        raise UserError(_interrupted(children, runs)) from None
    finally:
        progress.close()


def _interrupted(children: list[subprocess.Popen], runs: Mapping[str, RunFolder]) -> str:
    """Has the children end, at once where another interrupt comes meanwhile; says so, and what still runs."""
    for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
        with suppress(KeyboardInterrupt):
            for child in children:
                end(child)  # does nothing where it has ended
            for child in children:
                child.wait()
            break
    going = {name: run.status().get("pid") for name, run in runs.items() if run.is_busy()}
    if going:
        others = ", ".join(f"{name} in process {pid}" for name, pid in going.items())
        return f"Interrupted. Still training: {others}; `kill` with that number stops one, which saves itself."
    return "Interrupted: training has ended, too; run this again to resume it from what is saved."


class LiveCurves:
    """A picture of the training losses so far, in the cell that runs; redrawn at most every two seconds."""

    def __init__(self, runs: Mapping[str, RunFolder]):
        self.runs, self.picture, self.drawn = runs, show_live(""), -math.inf

    def update(self, now: bool = False) -> None:
        """Draws the losses again if it is time, or if it has to be `now`."""
        if not now and time.monotonic() - self.drawn < SECONDS_BETWEEN_PICTURES:
            return
        self.picture.update({"text/html": self.html()}, raw=True)
        self.drawn = time.monotonic()

    def html(self) -> str:
        """The losses of the runs that have any, as a picture that a notebook shows which is not trusted, too."""
        from matplotlib.figure import Figure  # which takes a second
        from matplotlib.ticker import LogLocator

        figure = Figure(figsize=(6.6, 3), layout="constrained")
        ax = figure.subplots()
        for name, run in self.runs.items():
            lines: list[dict] = []
            with suppress(UserError):  # damaged: the process that trains repairs it, or says why not
                lines = run.metrics_lines()
            if lines:
                ax.plot([line["step"] for line in lines], [line["train_loss"] for line in lines], label=name)
        ax.set(xlabel="step", ylabel="training loss (nats per token)", yscale="log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("")
        if ax.lines:
            ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8)
        file = io.BytesIO()
        figure.savefig(file, format="svg")
        encoded = base64.b64encode(file.getvalue()).decode()
        return f'<img alt="training loss by step" src="data:image/svg+xml;base64,{encoded}">'


def _latest(run: RunFolder) -> tuple[int, str]:
    """Step and loss of the run's latest line."""
    with suppress(UserError):  # damaged: the process that trains repairs it, or says why not
        if lines := run.metrics_lines():
            return lines[-1]["step"], f"loss {lines[-1]['train_loss']:.3f}"
    return run.last_known()[1], ""


def _check(code: int, run: RunFolder) -> None:
    """Raises `UserError` with the last words of a process that ended otherwise than finished."""
    again = f"The run {run.path} was stopped by a signal; run this again to resume it."
    require(code != EXIT_INTERRUPTED, again)
    said = ["it said nothing", *run.log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()][-1]
    if not said.startswith("lmcore: "):  # a log on a full disk lacks the last words
        with suppress(UserError):
            said = run.status().get("reason", said)
    ended = [EXIT_CODES[state] for state in FINISHED]
    require(code in ended, f"The process of {run.path} ended with code {code}: {said}")
