"""Training: the loop, and a run folder that survives whatever happens (CSE599-O A1 section 5.3).

`Trainer.loop` is the loop: learning rate, batch, step, log, evaluate, save. `train` begins or resumes a run.
"""

import math
import os
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from lmcore.accounting import least_step_bytes, num_parameters
from lmcore.alone import ALONE, OneRank
from lmcore.checkpoint import SHARDED, read_checkpoint, save_checkpoint, save_weights
from lmcore.config import TrainConfig, named, replace, to_dict
from lmcore.data import PreparedData, open_data
from lmcore.data.batches import part_of_batch, prefetched, require_context
from lmcore.device import out_of_memory_reason, reproducible, reset_peak_memory, rng_state, set_rng_state, too_large
from lmcore.errors import NO_ROOM, OutOfMemory, UserError, require
from lmcore.evaluate import validation
from lmcore.files import remove
from lmcore.metrics import AsyncMetrics, Diverged, Meter
from lmcore.optimizer import get_lr_cosine_schedule
from lmcore.progress import Progress
from lmcore.provenance import environment, job_id
from lmcore.run import RunFolder, RunResult, flatten, initial_model, newest_checkpoint, require_other_runs
from lmcore.step import PlainStep, training_step
from lmcore.stopping import StopEvent, Stopped, stop_signals

__all__ = ["AsyncMetrics", "PlainStep", "Trainer", "train", "training_step"]

SECONDS_BETWEEN_BEST = 60.0
"""How often the best weights are written at once; else with the next checkpoint, or at the run's end."""

RANKS = "lmcore.distributed.world:joined"
"""Imported only by runs that several processes share."""


def train(config: TrainConfig, folder: str | os.PathLike) -> RunResult:
    """Trains, or resumes, the run in `folder`; returns how it ended.

    Resumes from the last good checkpoint; a complete run with the same configuration and data is returned as it is, its
    weights repaired if they are damaged. A stop signal ends the current step, saves and returns "interrupted"; before
    the first step it ends at once. A loss that is not finite returns "diverged"; too large a model or batch, "out of
    memory", where arithmetic says so before anything is built. Raises `UserError` for a folder of another
    configuration, in use, or damaged beyond repair, data that does not fit the model, a device that is not there, and a
    full disk; the same call then resumes from the last checkpoint.

    With `config.strategy`, in processes that a launcher started, each of them calls this. What one refuses ends the
    others by `SystemExit`; a process that waits for one that has died is ended as a whole (`lmcore.distributed.watch`).
    """
    run = RunFolder(folder)
    with stop_signals() as stop:
        try:
            with ExitStack() as held:
                with stop.raises():
                    ranks = held.enter_context(joined(config))
                    with ranks.checked():
                        device = ranks.device(config.device)
                        data = open_data(config.data).evaluated_on(config.evaluate_on)
                        check_data(config, data)
                        require_other_runs(config, run, data)
                    same = {"data": data.fingerprint, "the run folder": str(run.path)}
                    ranks.require_same(flatten(to_dict(config)) | same)
                with ranks.checked():
                    held.enter_context(run.lock() if ranks.is_first else nullcontext())
                return _train(config, data, run, device, stop, ranks)
        except OutOfMemory as error:
            return RunResult("out of memory", error.step, None, None)
        except Stopped:
            print(f"{run.name}: stopped; the same command resumes from the last checkpoint.", flush=True)
            return RunResult("interrupted", run.last_known()[1], None, None)


def joined(config: TrainConfig) -> AbstractContextManager[OneRank]:
    """The ranks of the run. A run that is not parallel looks at no launcher, but for torchrun's, which it refuses."""
    launched = config.strategy != "none" or "TORCHELASTIC_RUN_ID" in os.environ
    return named(RANKS)(config) if launched else nullcontext(ALONE)


def _train(
    config: TrainConfig, data: PreparedData, run: RunFolder, device: torch.device, stop: StopEvent, ranks: OneRank
) -> RunResult:
    """`train` in a folder that this process holds. Raises `Stopped` if a signal came before the first step."""
    trainer = None
    try:
        with stop.raises():
            lacking = lack_of_memory(config, device, ranks)
            notes = {"data_fingerprint": data.fingerprint, "data": data.manifest, "ranks": ranks.size}
            if (ended := ranks.of_first(lambda: run.begin(config, environment(device) | notes))) is not None:
                return ended
        if lacking is not None:
            ranks.of_first(lambda: note_out_of_memory(run, lacking))
            return RunResult("out of memory", 0, None, None)
        reset_peak_memory(device)  # a sweep's runs share a process
        with reproducible(config, device):
            with stop.raises(), ranks.checked():
                trainer = Trainer(config, data, run, device, ranks)
            trainer.state = trainer.resume()  # to its end: a read that a signal breaks off looks like a damaged file
            return trainer.fit(stop)
    except (RuntimeError, MemoryError) as error:
        if (reason := out_of_memory_reason(error)) is None:
            raise
        step = 0 if trainer is None else trainer.state.step
        note_out_of_memory(run, f"rank {ranks.rank}: {reason}" if ranks.size > 1 else reason, step, ranks.is_first)
        raise OutOfMemory(reason, step) from error  # the other ranks are not here


def check_data(config: TrainConfig, data: PreparedData) -> None:
    """Raises `UserError` if the corpus does not fit the model: more ids than the vocabulary, or too few tokens."""
    require(
        data.vocab_size <= config.model.vocab_size,
        f"The data in {config.data} has a vocabulary of {data.vocab_size}; set model.vocab_size to at least that.",
    )
    for name, tokens in (("training", data.train), (config.evaluate_on, data.valid)):
        require_context(tokens, config.model.context_length, f"{config.data} ({name} part)")


def lack_of_memory(config: TrainConfig, device: torch.device, ranks: OneRank) -> str | None:
    """Why a rank cannot have enough memory, where each has all weights; the same on all."""
    reason = None
    if ranks.size == 1 or config.strategy in ("ddp", "torch-ddp"):
        rows, parameters = config.batch_size // ranks.size, num_parameters(config.model)
        reason = too_large("Training", least_step_bytes(replace(config, batch_size=rows)), parameters, rows, device)
    return next(filter(None, ranks.gather(reason)), None)


def note_out_of_memory(run: RunFolder, reason: str, step: int = 0, is_first: bool = True) -> None:
    """Notes and says that a run lacks memory; on ranks other than the first it is only said."""
    if is_first:
        run.write_status("out of memory", step, reason=reason)
    print(f"{run.name}: {reason}", flush=True)


@dataclass
class State:
    """What a run knows of itself besides weights and moments; all of it is in a checkpoint."""

    step: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    """Since the last metrics line."""
    last: tuple[float, float] = (0.0, 0.0)
    """Learning rate and gradient norm of the last step."""
    valid_loss: float | None = None
    best_valid_loss: float = math.inf
    best_step: int = 0


class Trainer:
    """The run in memory: its step, its state, and the loop that changes them."""

    def __init__(
        self, config: TrainConfig, data: PreparedData, run: RunFolder, device: torch.device, ranks: OneRank = ALONE
    ):
        self.config, self.data, self.run, self.device, self.ranks = config, data, run, device, ranks
        self.update, reason = training_step(initial_model(config, run).to(device), config, ranks.size)
        if ranks.rank:  # weights come from rank 0; dropout differs
            torch.manual_seed(config.seed + 7919 * ranks.rank)
        if reason is not None and ranks.is_first:
            print(f"{run.name}: plain operations, as the fused step does not cover {reason}.", flush=True)
        self.state, self.saved_step = State(), 0
        self.best: dict[str, Any] = {}  # the best weights, as long as they are not written
        self.best_written = time.perf_counter()
        self.metrics = AsyncMetrics(ranks.mean, skips=self.update.scaler.is_enabled())
        self.meter = Meter(config, device, ranks.size)
        self.waits = device.type != "cuda"  # only a GPU computes on while the host reads a loss
        self.line_step: int | None = None  # step of the metrics line whose numbers are on their way
        self.progress: Progress | None = None  # on the first rank
        self.listeners: list[Progress | Tracker] = []  # to the metrics lines, there
        self.clock = time.perf_counter()

    def loop(self, stop: StopEvent) -> str:
        """Takes the steps that are left, with all that is due between them; returns complete or interrupted."""
        config, state, ranks = self.config, self.state, self.ranks
        o = config.optimizer
        schedule = o.learning_rate, o.min_learning_rate, o.warmup_steps, o.cosine_steps or config.steps
        part = part_of_batch(config.batch_size, ranks.rank, ranks.size)
        with prefetched(self.data.train, config, state.step, self.device, part) as batches:
            while state.step < config.steps and not ranks.agree(stop.is_set()):
                with self.meter.busy():
                    inputs, targets = next(batches)
                    state.step += 1
                    lr = get_lr_cosine_schedule(state.step, *schedule)
                    loss, norm = self.update(inputs, targets, lr)  # forward, backward, clip, update
                    self.metrics.push(state.step, lr, loss, norm)
                if self.progress is not None:
                    self.progress.move(state.step)
                self.write_line()  # that of an earlier step, read while this one keeps the device busy
                last = state.step == config.steps
                evaluate = last or state.step % config.eval_interval == 0
                save = state.step % config.checkpoint_interval == 0 or (last and config.keep_weights)
                if evaluate or state.step % config.log_interval == 0:
                    self.line_step = state.step
                    self.metrics.start()
                    if self.waits or evaluate or save:
                        self.write_line(evaluate)
                if save:
                    self.save()
        self.write_line()
        complete = state.step == config.steps
        if self.saved_step != state.step and (config.keep_weights or not complete):
            self.save()
        return "complete" if complete else "interrupted"

    def write_line(self, evaluate: bool = False) -> None:
        """Writes the metrics line that is due, if one is; with `evaluate`, with the loss over the validation set."""
        if self.line_step is None:
            return
        self._collect()
        state = self.state
        line = self.meter.line(self.line_step, state.losses, *state.last)
        state.losses, self.line_step = [], None
        if evaluate:
            line |= self.evaluate()
        line["seconds"] = self._elapsed()
        self.ranks.of_first(lambda: self._publish(line))

    def _publish(self, line: dict[str, Any]) -> None:
        self.run.append_metrics(line)
        for listener in self.listeners:
            listener.log(line)

    def _collect(self) -> None:
        """Takes over the losses whose copy has begun."""
        with self.meter.busy():
            values = self.metrics.read()
        self.meter.steps += len(values)  # those that are over: the next one may be under way
        for _, lr, loss, norm in values:
            self.state.losses.append(loss)
            self.state.last = lr, norm

    def _elapsed(self) -> float:
        now = time.perf_counter()
        self.state.seconds, self.clock = self.state.seconds + now - self.clock, now
        return self.state.seconds

    def evaluate(self) -> dict[str, Any]:
        """What a metrics line says of the validation set, whose loss is in nats per token; keeps the best weights."""
        state, found = self.state, validation(self.update, self.data.valid, self.config, self.device, self.ranks)
        if not math.isfinite(found["valid_loss"]):
            raise Diverged(state.step, state.last[0], "validation loss")
        state.valid_loss = found["valid_loss"]
        if state.valid_loss < state.best_valid_loss:
            state.best_valid_loss, state.best_step = state.valid_loss, state.step
            self.best = self._copied_weights()
            self.ranks.of_first(lambda: self._write_best(SECONDS_BETWEEN_BEST))
        if self.device.type == "cuda":  # the peak in the lines is that of training steps alone
            torch.cuda.reset_peak_memory_stats(self.device)
        return found

    def save(self) -> None:
        """Saves everything that a resumed run needs, then removes checkpoints beyond the latest few."""
        config, ranks, strategy, optimizer = self.config, self.ranks, self.update.strategy, self.update.current()[1]
        ranks.of_first(self._write_best)
        self.metrics.start()
        self._collect()
        self._elapsed()
        extra = asdict(self.state) | {
            "metrics_bytes": ranks.of_first(self.run.metrics_bytes),
            "scaler": self.update.scaler.state_dict(),
            "rng": ranks.gather(rng_state(self.device)),
            "data_fingerprint": self.data.fingerprint,
        }
        step, sharded = self.state.step, config.checkpoints == "sharded"
        path = self.run.checkpoint_file(step, sharded)
        if sharded:
            named(f"{SHARDED}:save_sharded")(strategy, optimizer, step, path, extra, ranks)
        else:
            weights, moments = strategy.weights(ranks), strategy.moments(optimizer, ranks)
            ranks.of_first(lambda: save_checkpoint(strategy.model, moments, step, path, extra, weights))
        self.saved_step = step
        self._prune(config.keep_checkpoints)

    def _prune(self, keep: int) -> None:
        for path in self.run.checkpoints()[keep:]:
            if self.ranks.is_first:
                remove(path)

    def _copied_weights(self) -> dict[str, Any]:
        """The weights on the first rank's CPU, if they are to be kept. Every rank calls it."""
        if not self.config.keep_weights:
            return {}
        self.update.current()
        held = self.update.strategy.weights(self.ranks).items()
        return {name: tensor.to("cpu", copy=True) for name, tensor in held if tensor is not None}

    def _write_best(self, patience: float = 0.0) -> None:
        """On the first rank: writes the best weights, if they are new and the last time was so many seconds ago."""
        if self.best and time.perf_counter() - self.best_written >= patience:
            notes = {"step": self.state.best_step, "valid_loss": self.state.best_valid_loss}
            save_weights(self.update.strategy.model, self.run.best_weights, self.best, **notes)
            self.best, self.best_written = {}, time.perf_counter()

    def resume(self) -> State:
        """The state at the newest good checkpoint, with everything put back as it was then; a new one without any."""
        run, ranks = self.run, self.ranks
        path = ranks.of_first(lambda: newest_checkpoint(run, self.config.keep_weights))
        if path is None:
            ranks.of_first(lambda: run.cut_metrics(0))
            return State()
        with ranks.checked():
            content = read_checkpoint(path)
        with ranks.checked():
            self._load(content, path)
        extra = content["extra"]
        state = State(**{name: extra[name] for name in State.__dataclass_fields__})
        self.saved_step = state.step
        if ranks.is_first:
            print(f"{run.name}: resuming from step {state.step}.", flush=True)
        ranks.of_first(lambda: run.cut_metrics(extra["metrics_bytes"]))
        if state.best_step == state.step:  # the checkpoint has them, and their own file may be lost
            self.best = self._copied_weights()
        return state

    def _load(self, content: dict[str, Any], path: Path) -> None:
        extra, (_, optimizer), strategy = content["extra"], self.update.current(), self.update.strategy
        remedy = "choose another run folder, or remove this one."
        require(extra["data_fingerprint"] == self.data.fingerprint, f"{path} was made with other data; {remedy}")
        if path.is_dir():
            named(f"{SHARDED}:load_sharded")(strategy, optimizer, path, self.ranks)
        else:
            strategy.load(content, optimizer, str(path))
        self.update.scaler.load_state_dict(extra["scaler"])
        if self.ranks.rank < len(extra["rng"]):
            set_rng_state(self.device, extra["rng"][self.ranks.rank])

    def fit(self, stop: StopEvent) -> RunResult:
        """Runs the loop to the last step, a stop signal, divergence or an error, and notes how it ended."""
        if self.ranks.is_first:
            self.progress = Progress(self.config.steps, self.run.name, start=self.state.step)
            self.listeners = [self.progress]
            if self.config.tracker != "none":
                from lmcore.tracker import Tracker

                self.listeners.append(Tracker(self.run, self.config, self.state.step))
        self.clock = time.perf_counter()
        self.ranks.before_exit(lambda end: self._note(end.state, reason=end.sentence))
        self._note("running", pid=os.getpid(), job=job_id())
        try:
            return self._end(self.loop(stop))
        except Diverged as error:
            return self._end("diverged", reason=str(error), diverged_at_step=error.step, lr=error.learning_rate)
        except (Exception, SystemExit) as error:
            self._fail(error, stop)
            raise
        finally:
            for listener in self.listeners:
                listener.close()
            self.update.release()

    def _note(self, state: str, **notes: Any) -> None:
        if self.ranks.is_first:
            self.run.write_status(state, self.state.step, **notes)

    def _end(self, state: str, **notes: Any) -> RunResult:
        """Notes how the run ended; a complete one gets its last weights."""
        config, valid_loss = self.config, self.state.valid_loss
        best = self.state.best_valid_loss if math.isfinite(self.state.best_valid_loss) else None
        notes |= {"valid_loss": valid_loss, "best_valid_loss": best, "seconds": self._elapsed()}
        if state == "complete":
            self.ranks.of_first(self.run.metrics_bytes)  # its lines are on the disk
            if config.keep_weights:
                last, model, step = self._copied_weights(), self.update.strategy.model, self.state.step
                self.ranks.of_first(lambda: save_weights(model, self.run.last_weights, last, step=step))
            self._prune(config.keep_checkpoints if config.keep_weights else 0)
        self.ranks.of_first(lambda: self._note(state, **notes))
        self.ranks.of_first(self._write_best)
        self.ranks.before_exit(lambda end: None)  # what ends the ranks from here on does not change how the run ended
        if "reason" in notes and self.ranks.is_first:
            print(f"{self.run.name}: {notes['reason']}", flush=True)
        return RunResult(state, self.state.step, valid_loss, best)

    def _fail(self, error: Exception | SystemExit, stop: StopEvent) -> None:
        """Notes that an error has ended the run, unless it is a lack of memory, which is a result."""
        with suppress(Exception):
            self._write_best()
        if isinstance(error, Exception) and out_of_memory_reason(error) is not None:
            return
        full = error.strerror if isinstance(error, OSError) and error.errno in NO_ROOM else None
        if stop.is_set() and not (full or isinstance(error, UserError | SystemExit)):  # it ended the compiler first
            self.state.step = self.saved_step
            self._note("interrupted")
            raise Stopped from error
        said = "Another rank has failed." if isinstance(error, SystemExit) else str(error).partition("\n")[0]
        with suppress(UserError):
            self._note("failed", reason=said or type(error).__name__)
        if full:  # even a line of progress may find no room
            said = f"{self.run.name}: {full}; the same command resumes from the last checkpoint."
            raise UserError(said) from error
