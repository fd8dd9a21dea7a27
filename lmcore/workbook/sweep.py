"""Runs in child processes: one that a notebook follows, or many, each kept apart, reused when they are done."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmcore.config import TrainConfig, from_dict, to_dict
from lmcore.data import open_data
from lmcore.device import visible_gpus
from lmcore.errors import EXIT_CODES, EXIT_INTERRUPTED, EXIT_USER_ERROR, FINISHED, UserError, require
from lmcore.files import read_json, write_json
from lmcore.progress import Progress
from lmcore.run import BUSY, RunBusy, RunFolder, damage
from lmcore.stopping import stop_signals

SECONDS_BETWEEN_LOOKS = 0.5


def run_state(config: TrainConfig, run: RunFolder, fingerprint: str | None) -> tuple[str, str | None]:
    """State of a run with this configuration on data of this fingerprint, and why where there is something to say.

    States: not run, running, stopped (begun, and neither ended nor in anyone's hands; it goes on), failed, and those
    that are `FINISHED`: complete, with undamaged results, diverged, out of memory.
    """
    try:
        if run.is_busy():
            return "running", None
        status = run.status()
        if run.config_file.exists():
            if differences := run.differences(config, fingerprint):
                return "not run", f"The run folder was made with other settings: {', '.join(differences)}."
        elif status["state"] != "failed":
            return "not run", None
    except UserError as error:
        return "failed", str(error)
    state = status["state"]
    if state == "complete" and (reason := damage(run)):
        return "stopped", f"{reason} Training again repairs it."
    return (state if state in (*FINISHED, "failed") else "stopped"), status.get("reason")


def is_finished(config: TrainConfig, run: RunFolder) -> bool:
    """Whether `run` is `FINISHED`, undamaged, with this configuration and this data."""
    if _status(run)["state"] not in FINISHED or not run.environment_file.exists():
        return False  # training again looks for what the data were
    return run_state(config, run, open_data(config.data).fingerprint)[0] in FINISHED


def run_or_reuse(config: TrainConfig, folder: str | os.PathLike) -> RunFolder:
    """Trains in a child process and follows its metrics; a finished run with the same config and data is reused.

    The child outlives this process: a lost notebook loses nothing, and calling again follows the run that is still
    going. Where the process that is followed ends before the run does, this one goes on with it. Output goes to
    log.txt in the run folder. Raises `UserError` with the child's last words if it fails.
    """
    run = RunFolder(folder)
    while not is_finished(config, run):
        if run.config_file.exists():
            run.require_same(config, open_data(config.data).fingerprint)
        if run.is_busy():
            print(f"{run.name}: another process trains it; this one follows.", flush=True)
            _follow(run, config.steps, None)
            continue
        said = run.log_file.stat().st_size if run.log_file.exists() else 0
        child = _start(["train", "--config", str(_request(config, run)), "--run", str(run.path)], run)
        _follow(run, config.steps, child)
        if child.returncode == EXIT_USER_ERROR and BUSY in run.log_file.read_bytes()[said:].decode(errors="replace"):
            continue  # another process was faster, and ours was refused
        _check(child.returncode, run)
        return run
    state = run.status()
    print(f"{run.name}: reused, {state['state']} at step {state['step']}.")
    return run


def run_sweep(runs: dict[str, TrainConfig], folder: str | os.PathLike, workers: int = 1) -> dict[str, RunFolder]:
    """Trains every run in its own subfolder of `folder`, `workers` at a time; finished runs are reused.

    Each worker is a process that takes the next run nobody else holds; with several GPUs they are dealt out in turn.
    A run that diverges is a result. Runs that another call had begun and did not end are gone on with. Raises
    `UserError` if a worker fails otherwise.
    """
    folder = Path(folder)
    write_json(folder / "sweep.json", {name: to_dict(config) for name, config in runs.items()})
    folders = {name: RunFolder(folder / name) for name in runs}
    reused = True
    while left := sum(not is_finished(config, folders[name]) for name, config in runs.items()):
        reused = False
        _train_all(folder, folders, min(workers, left), left)
    if reused:
        print(f"{folder.name}: all {len(runs)} runs reused.")
    return folders


def _train_all(folder: Path, folders: dict[str, RunFolder], workers: int, left: int) -> None:
    """Starts workers and waits for them, and for those of an earlier call that hold some of the runs."""
    logs = [RunFolder(folder / f".worker{index}") for index in range(workers)]
    children = [_start(["sweep", "work", str(folder)], log, gpu=index) for index, log in enumerate(logs)]
    progress = Progress(len(folders), folder.name, unit="run", start=len(folders) - left)
    while any(child.poll() is None for child in children) or any(run.is_busy() for run in folders.values()):
        time.sleep(SECONDS_BETWEEN_LOOKS)
        progress.update(sum(_status(run)["state"] in FINISHED for run in folders.values()))
    progress.close()
    for child, log in zip(children, logs, strict=True):
        _check(child.returncode, log)


def work(folder: str | os.PathLike) -> None:
    """What one worker of `run_sweep` does: trains, in order, each run of sweep.json that is neither done nor taken.

    A stop signal, also one between two runs, ends it with the exit code EXIT_INTERRUPTED; a second one at once.
    """
    with stop_signals(exits=True) as stop:
        from lmcore.train import train  # here, because only the worker needs the trainer

        folder = Path(folder)
        runs = read_json(folder / "sweep.json")
        require(isinstance(runs, dict), f"{folder / 'sweep.json'} must be a mapping of run names to settings.")
        for name, values in runs.items():
            if stop.is_set():
                raise SystemExit(EXIT_INTERRUPTED)
            config, run = from_dict(TrainConfig, values), RunFolder(folder / name)
            if is_finished(config, run):
                continue
            try:
                result = train(config, run)
            except RunBusy:
                continue
            if result.state == "interrupted":
                raise SystemExit(EXIT_INTERRUPTED)


def _request(config: TrainConfig, run: RunFolder) -> Path:
    path = run.path / "requested.json"
    write_json(path, to_dict(config))
    return path


def _start(arguments: list[str], run: RunFolder, gpu: int | None = None) -> subprocess.Popen:
    """Starts `lmcore` with these arguments in a session of its own, writing to the run's log."""
    variables = os.environ | {"PYTHONUNBUFFERED": "1"}
    gpus = visible_gpus()
    if gpu is not None and len(gpus) > 1:
        variables["CUDA_VISIBLE_DEVICES"] = gpus[gpu % len(gpus)]
    run.path.mkdir(parents=True, exist_ok=True)
    with open(run.log_file, "a", encoding="utf-8") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "lmcore", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )


def _follow(run: RunFolder, steps: int, child: subprocess.Popen | None) -> None:
    """Shows the run's progress until its process ends; `child` is None for a process started by someone else."""
    progress = Progress(steps, run.name, start=_status(run)["step"])
    done = False
    while not done:
        done = not run.is_busy() if child is None else child.poll() is not None
        lines = []
        with suppress(UserError):  # damaged: the process that trains repairs it, or says why not
            lines = run.metrics_lines()
        if lines:
            progress.update(lines[-1]["step"], f"loss {lines[-1]['train_loss']:.3f}")
        if not done:
            time.sleep(SECONDS_BETWEEN_LOOKS)
    progress.close()


def _status(run: RunFolder) -> dict[str, Any]:
    """The run's status; that of a new run where it cannot be read, since training goes by the checkpoints."""
    try:
        return run.status()
    except UserError:
        return {"state": "new", "step": 0}


def _check(code: int, run: RunFolder) -> None:
    if code in [EXIT_CODES[state] for state in FINISHED]:
        return
    if code == EXIT_INTERRUPTED:
        raise UserError(
            f"The run {run.path} was stopped by a signal; run this again to go on from where it saved itself."
        )
    words = run.log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    said = words[-1] if words else "it said nothing"
    if not said.startswith("lmcore: "):  # a log on a full disk lacks the last words
        said = _status(run).get("reason", said)
    raise UserError(f"The process of {run.path} ended with code {code}: {said}")
