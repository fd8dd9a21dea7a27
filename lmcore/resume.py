"""What a run goes on from: the newest checkpoint that is whole and leads to everything an undisturbed run has."""

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmcore.checkpoint import read_checkpoint, read_weights
from lmcore.errors import UserError, require
from lmcore.run import RunFolder


def damage(run: RunFolder) -> str | None:
    """What is wrong with the results of a complete run, in a sentence; None if everything is as it was written."""
    try:
        step = run.status()["step"]
        for path in (run.last_weights, run.best_weights):
            read_weights(path)
        lines = run.metrics_lines()
    except UserError as error:
        return str(error)
    if not lines or lines[-1]["step"] != step:
        return f"{run.metrics_file} is damaged: it does not reach step {step}, where the run ended."
    return None


def is_complete(run: RunFolder) -> bool:
    """Whether the run is complete and its results are undamaged; says what is damaged."""
    try:
        if run.status()["state"] != "complete":
            return False
    except UserError as error:
        print(f"{error}", flush=True)
        return False
    if (reason := damage(run)) is None:
        return True
    require(bool(run.checkpoints()), f"{reason} No checkpoint is left to mend it from; train in another folder.")
    print(f"{reason} It is mended from the last checkpoint.", flush=True)
    return False


def require_same_data(run: RunFolder, fingerprint: str) -> None:
    """Compares the data with those that the checkpoints note, where environment.json is gone.

    Says so where nothing tells. Raises `UserError` if the data are others.
    """
    if run.starts() or not run.checkpoints():
        return  # the start compares them, or there is nothing to go on with
    noted = None
    for path in run.checkpoints():
        with suppress(UserError):  # damaged: whoever goes on from it will say so
            noted = read_checkpoint(path)["extra"].get("data_fingerprint")
            break
    if noted is None:
        print(f"{run.environment_file} is gone: whether the data is the same was not checked.", flush=True)
        return
    require(
        noted == fingerprint,
        f"The checkpoints of {run.path} were made with other data (fingerprint {noted[:12]} there, {fingerprint[:12]} "
        "here); choose another folder, or remove this one.",
    )


def newest_state(run: RunFolder) -> tuple[dict[str, Any] | None, list[Path]]:
    """Content of the checkpoint to go on from, None for a run without any, and the checkpoints that are damaged.

    Says in a sentence what is damaged and which checkpoint is used instead. Raises `UserError` where going on would
    lose something: no checkpoint among those that are there can be read, or the best weights cannot be made again.
    """
    damaged, refused = [], None
    best = _best_of(run)
    for path in run.checkpoints():
        try:
            content = read_checkpoint(path)
        except UserError as error:
            print(f"{error} The checkpoint before it is tried.", flush=True)
            damaged.append(path)
            continue
        require(
            "rng" in content["extra"],
            f"{path} was not written by a training run, so none can go on from it; remove it.",
        )
        if _leads_to_best(content, best):
            return content, damaged
        print(f"{run.best_weights} is missing or damaged, so {path.name} is not enough to go on from.", flush=True)
        refused = refused or content
    # beginning again would throw away what the folder still holds
    require(
        not damaged or refused is not None,
        f"No checkpoint in {run.checkpoint_folder} can be read; put a whole one back, or choose another run folder.",
    )
    require(
        refused is None or not run.best_weights.exists(),
        f"{run.best_weights} is damaged, and no checkpoint from before it was written is left; put a whole one back, "
        "or remove it to go on without.",
    )
    require(
        refused is not None or not run.last_weights.exists(),
        f"{run.path} holds the weights of a run that ended, but no checkpoint; choose another run folder.",
    )
    if refused is not None:
        print("The run goes on without: the next evaluation that is better writes them.", flush=True)
    return refused, damaged


def _best_of(run: RunFolder) -> dict[str, Any] | None:
    try:
        return read_weights(run.best_weights)[1]
    except UserError:
        return None


def _leads_to_best(content: dict[str, Any], best: dict[str, Any] | None) -> bool:
    """Whether a run that goes on from this checkpoint has the best weights of an undisturbed one at its end.

    They are in their file, or are those of the checkpoint itself, or will be found after it.
    """
    extra, step = content["extra"], content["iteration"]
    if not math.isfinite(extra["best_valid_loss"]) or extra.get("best_step") == step:
        return True
    return best is not None and (best.get("valid_loss") == extra["best_valid_loss"] or best.get("step", 0) > step)
