"""Training: the loop, and a run folder that survives whatever happens (CSE599-O A1 section 5.3).

`Trainer.loop` is the loop: learning rate, batch, step, log, evaluate, save. `train` begins or resumes a run.
"""

import math
import os
import signal
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmcore.accounting import least_training_bytes, num_parameters, training_flops
from lmcore.alone import ALONE, OneRank
from lmcore.checkpoint import SHARDED, read_checkpoint, save_states, write_weights
from lmcore.config import TrainConfig, named, replace, to_dict
from lmcore.data import PreparedData, open_data, part_of_batch, prefetched, require_context
from lmcore.device import (
    device_name,
    fastest_threads,
    out_of_memory_reason,
    peak_flops,
    reproducible,
    reset_peak_memory,
    rng_state,
    set_rng_state,
    too_large,
)
from lmcore.errors import NO_ROOM, OutOfMemory, UserError, require
from lmcore.evaluate import over_windows, score
from lmcore.files import remove
from lmcore.metrics import AsyncMetrics, Diverged
from lmcore.model import TransformerBlock, TransformerLM
from lmcore.optimizer import get_lr_cosine_schedule
from lmcore.progress import Progress
from lmcore.provenance import environment, job_id
from lmcore.run import FollowedRun, RunFolder, RunResult, flatten, is_complete, newest_checkpoint
from lmcore.step import PlainStep, training_step
from lmcore.stopping import StopEvent, Stopped, stop_signals
from lmcore.trackers import open_trackers

__all__ = ["AsyncMetrics", "PlainStep", "Trainer", "train", "training_step"]

RANKS = "lmcore.distributed.world:joined"
"""Joins the ranks that a launcher has started; a run that none has started does not import it."""

BLOCK_FLOPS = 10**9
"""FLOPs of the short measurement that `choose_threads` makes, at most about so many."""


def train(config: TrainConfig, folder: str | os.PathLike) -> RunResult:
    """Trains, or resumes, the run in `folder`; returns how it ended.

    Resumes from the last good checkpoint; a complete run with the same configuration and data is returned as it is,
    or its weights are repaired if they are damaged. Ctrl-C and stop signals end the current step, save and return with
    state "interrupted"; before the first step they end at once. A loss that is not finite returns with state
    "diverged", the last good checkpoint kept; too large a model or batch for the device with "out of memory", before
    anything is built where the arithmetic of `lmcore.accounting` says so. Raises `UserError` for a folder of another
    configuration, a folder in use, one whose damage cannot be repaired, data that does not fit the model, a device that
    is not there, or a full disk; the same call then resumes from the last checkpoint.

    With `config.strategy`, in processes that a launcher started, each of them calls this. What one refuses ends the
    others by `SystemExit`; a process that waits in a collective for one that has died is ended as a whole
    (`lmcore.distributed.watch`).
    """
    with stop_signals(signal.SIGINT) as stop:
        try:
            with ExitStack() as held:
                with stop.raises():
                    ranks = held.enter_context(joined(config))
                    run = RunFolder(folder) if ranks.is_first else FollowedRun(folder)
                    with ranks.checked():
                        device = ranks.device(config.device)
                        data = open_data(config.data).evaluated_on(config.evaluate_on)
                        check_data(config, data)
                    same = {"data": data.fingerprint, "the run folder": str(run.path)}
                    ranks.require_same(flatten(to_dict(config)) | same)
                with ranks.checked():
                    held.enter_context(run.lock())
                return _train(config, data, run, device, stop, ranks)
        except OutOfMemory as error:
            return RunResult("out of memory", error.step, None, None)
        except Stopped as stopped:
            run = RunFolder(folder)
            step, unsaved = run.last_known()[1], stopped.__cause__ is not None
            done = f"; the same command resumes from step {step:,}" if unsaved else " before it began; nothing is lost"
            print(f"{run.name}: stopped{done}.", flush=True)
            return RunResult("interrupted", step, None, None)


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
            threads = choose_threads(config, device, run) if lacking is None and ranks.size == 1 else None
            with ranks.checked():
                run.remove_leftovers()
                noted = {"data_fingerprint": data.fingerprint, "data": data.manifest, "threads": threads}
                run.begin(config, environment() | noted | ({"ranks": ranks.size} if ranks.size > 1 else {}))
            if (ended := ranks.of_first(lambda: run.result() if is_complete(run) else None)) is not None:
                return ended
        if lacking is not None:
            return out_of_memory(run, lacking, ranks)
        if config.model.vocab_size > data.vocab_size and ranks.is_first:
            print(
                f"{run.name}: the model's vocabulary ({config.model.vocab_size:,}) is larger than that of the data "
                f"({data.vocab_size:,}): ids from {data.vocab_size:,} on never occur.",
                flush=True,
            )
        reset_peak_memory(device)  # a sweep's runs share a process
        with reproducible(config, device, threads):
            with stop.raises(), ranks.checked():
                trainer = Trainer(config, data, run, device, ranks)
            trainer.resume()  # to its end: a read that a signal breaks off looks like a damaged file
            return trainer.fit(stop)
    except Stopped:
        state, step = run.last_known()
        if run.config_file.exists() and state in ("new", "running", "failed"):  # else it says how the run ended before
            run.write_status("interrupted", step)
        raise
    except (RuntimeError, MemoryError) as error:
        if (reason := out_of_memory_reason(error)) is None:
            raise
        step = 0 if trainer is None else trainer.step
        out_of_memory(run, f"rank {ranks.rank}: {reason}" if ranks.size > 1 else reason, ALONE, step)
        raise OutOfMemory(reason, step) from error  # the other ranks are not here


def lack_of_memory(config: TrainConfig, device: torch.device, ranks: OneRank) -> str | None:
    """Why a rank cannot have enough memory, where each has all weights; the same on all."""
    if ranks.size > 1 and config.strategy not in ("ddp", "torch-ddp"):
        return next(filter(None, ranks.gather(None)), None)
    rows = config.batch_size // ranks.size
    needed, parameters = least_training_bytes(replace(config, batch_size=rows)), num_parameters(config.model)
    return next(filter(None, ranks.gather(too_large("Training", needed, parameters, rows, device))), None)


def out_of_memory(run: RunFolder, reason: str, ranks: OneRank, step: int = 0) -> RunResult:
    """Notes and says that a run lacks memory."""
    run.write_status("out of memory", step, reason=reason)
    if ranks.is_first:
        print(f"{run.name}: {reason}", flush=True)
    return ranks.of_first(run.result)


def check_data(config: TrainConfig, data: PreparedData) -> None:
    """Raises `UserError` if the corpus does not fit the model: more ids than the vocabulary, or too few tokens."""
    require(
        data.vocab_size <= config.model.vocab_size,
        f"The data in {config.data} has a vocabulary of {data.vocab_size}, the model one of {config.model.vocab_size}; "
        f"set model.vocab_size to at least {data.vocab_size}.",
    )
    require_context(data.train, config.model.context_length, f"{config.data} (training part)")
    part = {"valid": "validation", "dev": "dev"}[config.evaluate_on]
    require_context(data.valid, config.model.context_length, f"{config.data} ({part} part)")


def choose_threads(config: TrainConfig, device: torch.device, run: RunFolder) -> int | None:
    """How many threads the CPU's operations get: the number that is fastest for one block's forward and backward pass.

    A resumed run keeps the number that it began with, since sums depend on it to the last bit. None leaves PyTorch's:
    where `fastest_threads` does, and for deterministic runs.
    """
    if starts := run.starts():
        return starts[0].get("threads")
    if config.deterministic:
        return None
    model = replace(config.model, num_layers=1, attention="plain")
    rows = max(1, BLOCK_FLOPS // (18 * model.d_model * (model.d_model + model.d_ff)))
    seq = min(model.context_length, rows)
    block, x = TransformerBlock(model), torch.randn(max(1, min(config.batch_size, rows // seq)), seq, model.d_model)
    return fastest_threads(device, lambda: block(x).sum().backward())


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
        self.update, reason = training_step(TransformerLM(config.model).to(device), config, ranks.size)
        if ranks.rank:  # weights come from rank 0; dropout differs
            torch.manual_seed(config.seed + 7919 * ranks.rank)
        if reason is not None and ranks.is_first:
            print(f"{run.name}: plain operations, as the fused step does not cover {reason}.", flush=True)
        self.state, self.saved_step = State(), 0
        self.peak_bytes: int | None = None  # of all steps so far: a CUDA graph's memory counts only when it is captured
        self.metrics, self.waits = AsyncMetrics(ranks.mean), device.type != "cuda"  # only a GPU computes on meanwhile
        self.line_step: int | None = None  # step of the metrics line whose numbers are on their way
        self.busy_seconds, self.busy_steps = 0.0, 0  # of training steps alone, since the last metrics line
        self.flops_per_step = training_flops(config.model, config.batch_size)
        self.peak_flops = peak_flops(device_name(device), config.precision)
        if self.peak_flops:
            self.peak_flops *= ranks.size

    @property
    def step(self) -> int:
        """How many steps have been taken."""
        return self.state.step

    def loop(self, stop: StopEvent) -> str:
        """Takes the steps that are left, with all that is due between them; returns complete or interrupted."""
        config, state, ranks = self.config, self.state, self.ranks
        o, last_step = config.optimizer, config.optimizer.cosine_steps or config.steps
        part = part_of_batch(config.batch_size, ranks.rank, ranks.size)
        with prefetched(self.data.train, config, state.step, self.device, part) as batches:
            while state.step < config.steps and not ranks.agree(stop.is_set()):
                started = time.perf_counter()
                inputs, targets = next(batches)
                state.step += 1
                lr = get_lr_cosine_schedule(state.step, o.learning_rate, o.min_learning_rate, o.warmup_steps, last_step)
                loss, norm = self.update(inputs, targets, lr)  # forward, backward, clip, update
                self.metrics.push(state.step, lr, loss, norm)
                self.busy_seconds += time.perf_counter() - started
                self.write_line()  # that of an earlier step, read while this one keeps the device busy
                last = state.step == config.steps
                evaluate = last or state.step % config.eval_interval == 0
                log = evaluate or state.step % config.log_interval == 0
                save = state.step % config.checkpoint_interval == 0 or (last and config.keep_weights)
                if log:
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

    def fit(self, stop: StopEvent) -> RunResult:
        """Runs the loop to the last step, a stop signal, divergence or an error, and notes how it ended."""
        self.clock = time.perf_counter()
        first = self.ranks.is_first
        self.trackers = open_trackers(self.run, self.config, self.step) if first else []
        self.progress = Progress(self.config.steps, self.run.name, start=self.step) if first else None
        self.ranks.before_exit(lambda end: self.run.write_status(end.state, self.step, reason=end.sentence))
        self.run.write_status("running", self.step, pid=os.getpid(), job=job_id())
        try:
            return self._end(self.loop(stop))
        except Diverged as error:
            return self._end("diverged", reason=str(error), diverged_at_step=error.step, lr=error.learning_rate)
        except SystemExit:
            self.run.write_status("failed", self.step, reason="Another rank has failed.")
            raise
        except Exception as error:
            self._failed(error, stop)
            raise
        finally:
            if self.progress is not None:
                self.progress.close()
            for tracker in self.trackers:
                tracker.close()
            self.update.release()

    def _failed(self, error: Exception, stop: StopEvent) -> None:
        """Notes that an error has ended the run, unless it is a lack of memory, which is a result."""
        if out_of_memory_reason(error) is not None:
            return
        full = error.strerror if isinstance(error, OSError) and error.errno in NO_ROOM else None
        if stop.is_set() and not (full or isinstance(error, UserError)):  # the signal ended the compiler first
            self.run.write_status("interrupted", self.saved_step)
            raise Stopped from error
        with suppress(UserError):
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            self.run.write_status("failed", self.step, reason=first_line)
        if full:  # even a line of progress may find no room
            raise UserError(f"{self.run.name}: {full}; the same command resumes from the last checkpoint.") from error

    def write_line(self, evaluate: bool = False) -> None:
        """Writes the metrics line that is due, if one is; with `evaluate`, with the loss over the validation set."""
        if self.line_step is None:
            return
        self._collect()
        if self.device.type == "cuda":
            self.peak_bytes = max(self.peak_bytes or 0, torch.cuda.max_memory_allocated(self.device))
        state, (lr, norm) = self.state, self.state.last
        rate = self.busy_steps / self.busy_seconds if self.busy_steps else 0.0
        line: dict[str, Any] = {
            "step": self.line_step,
            "tokens": self.line_step * self.config.tokens_per_step,
            "train_loss": math.fsum(state.losses) / len(state.losses),
            "lr": lr,
            "grad_norm": norm if math.isfinite(norm) else None,
            "tokens_per_second": rate * self.config.tokens_per_step,
            "mfu": rate * self.flops_per_step / self.peak_flops if self.peak_flops else None,
            "peak_memory_bytes": self.peak_bytes,
        }
        state.losses, self.busy_seconds, self.busy_steps, self.line_step = [], 0.0, 0, None
        if evaluate:
            state.valid_loss = line["valid_loss"] = self.evaluate()
            if self.config.eval_details:
                line |= self.evaluation_details()
            if state.valid_loss < state.best_valid_loss:
                state.best_valid_loss, state.best_step = state.valid_loss, state.step
                self._save_best()
            reset_peak_memory(self.device)  # the peak in the lines is that of training steps alone
        line["seconds"] = self._elapsed()
        with self.ranks.checked():
            self.run.append_metrics(line)
        for tracker in self.trackers:
            tracker.log(line)
        if self.progress is not None:
            self.progress.update(line["step"], describe(line))

    def _collect(self) -> None:
        """Takes over the losses whose copy has begun. Raises `Diverged` at the first that is not finite."""
        started = time.perf_counter()
        values = self.metrics.read()
        self.busy_seconds += time.perf_counter() - started
        self.busy_steps += len(values)  # those that are over: the next one may be under way
        for step, lr, loss, norm in values:
            if not math.isfinite(loss):
                raise Diverged(step, lr, "loss")
            if not math.isfinite(norm) and not self.update.scaler.is_enabled():  # loss scaling skips such steps
                raise Diverged(step, lr, "gradient norm")
            self.state.losses.append(loss)
            self.state.last = lr, norm

    def _elapsed(self) -> float:
        now = time.perf_counter()
        self.state.seconds, self.clock = self.state.seconds + now - self.clock, now
        return self.state.seconds

    def evaluate(self) -> float:
        """Mean loss in nats per token over all non-overlapping windows of the validation set."""

        def measure(inputs: Tensor, targets: Tensor) -> Tensor:
            loss, tokens = self.update.evaluation_loss(inputs, targets).cpu().double(), targets.numel()
            return torch.stack((loss * tokens, torch.tensor(tokens, dtype=torch.float64)))

        model = self.update.current()[0]
        total, tokens = over_windows(
            measure, model, self.data.valid, self.config.eval_batch_size, self.device, self.ranks
        ).tolist()
        mean = total / tokens
        if not math.isfinite(mean):
            raise Diverged(self.step, self.state.last[0], "validation loss")
        return mean

    def evaluation_details(self) -> dict[str, Any]:
        """Share of the tokens that the model finds most probable, and mean loss by position in the window."""
        model, module = self.update.current()[0], self.update.strategy.module
        batch_size, precision = self.config.eval_batch_size, self.config.precision
        found = score(model, self.data.valid, batch_size, self.device, precision, module, self.ranks)
        by_position = [round(loss, 5) for loss in found.loss_by_position]
        return {"valid_accuracy": found.accuracy, "valid_loss_by_position": by_position}

    def save(self) -> None:
        """Saves everything that a resumed run needs, then removes checkpoints beyond the latest few.

        Raises `UserError` if the data were overwritten in place since they were opened: what was learned is not known.
        """
        with self.ranks.checked():
            if self.ranks.is_first:
                self.data.require_unchanged()
        model, optimizer = self.update.current()
        strategy, form = self.update.strategy, self.config.checkpoints
        self.metrics.start()
        self._collect()
        self._elapsed()
        extra = asdict(self.state) | {
            "metrics_bytes": self.run.metrics_bytes() if self.ranks.is_first else 0,
            "scaler": self.update.scaler.state_dict(),
            "rng": self.ranks.gather(rng_state(self.device)),
            "data_fingerprint": self.data.fingerprint,
        }
        path = self.run.checkpoint_file(self.step, form != "whole")
        if form == "whole":
            weights, moments = strategy.weights(self.ranks), strategy.moments(optimizer, self.ranks)
            with self.ranks.checked():
                if self.ranks.is_first:
                    save_states(model, weights, moments, self.step, path, extra)
        else:
            import_module(SHARDED).save_sharded(strategy, optimizer, self.step, path, extra, self.ranks)
        self.saved_step = self.step
        self._prune(self.config.keep_checkpoints)

    def _save_best(self) -> None:
        if self.config.keep_weights:
            self._save_weights(self.run.best_weights, step=self.state.best_step, valid_loss=self.state.best_valid_loss)

    def _save_weights(self, path: Path, **notes: Any) -> None:
        self.update.current()
        weights = self.update.strategy.weights(self.ranks)
        with self.ranks.checked():
            if self.ranks.is_first:
                write_weights(self.config.model, weights, path, **notes)

    def _prune(self, keep: int) -> None:
        for path in self.run.checkpoints()[keep:]:
            if self.ranks.is_first:
                remove(path)

    def resume(self) -> None:
        """Continues from the newest checkpoint that can be resumed from, if there is one."""
        run, ranks = self.run, self.ranks
        path = ranks.of_first(lambda: newest_checkpoint(run, self.config.keep_weights))
        content = None
        if path is not None:
            with ranks.checked():
                content = read_checkpoint(path)
            with ranks.checked():
                self.state = self.loaded(content, path)
            self.saved_step = self.step
            if ranks.is_first:
                print(f"{run.name}: resuming from step {self.step}.", flush=True)
        with ranks.checked():
            if ranks.is_first:
                run.cut_metrics(0 if content is None else content["extra"]["metrics_bytes"])
        if content is not None and self.state.best_step == self.step:
            self._save_best()

    def loaded(self, content: dict[str, Any], path: Path) -> State:
        """Puts weights, moments and generators back as a checkpoint has them; returns the state that it notes."""
        extra, (_, optimizer), strategy = content["extra"], self.update.current(), self.update.strategy
        require(
            extra["data_fingerprint"] == self.data.fingerprint,
            f"{path} was made with other data; choose another run folder, or remove this one.",
        )
        if path.is_dir():
            import_module(SHARDED).load_sharded(strategy, optimizer, path, self.ranks)
        else:
            strategy.load(content, optimizer, str(path))
        self.update.scaler.load_state_dict(extra["scaler"])
        if self.ranks.rank < len(extra["rng"]):
            set_rng_state(self.device, extra["rng"][self.ranks.rank])
        return State(**{name: extra[name] for name in State.__dataclass_fields__})

    def _end(self, state: str, **notes: Any) -> RunResult:
        best = self.state.best_valid_loss if math.isfinite(self.state.best_valid_loss) else None
        notes |= {"valid_loss": self.state.valid_loss, "best_valid_loss": best, "seconds": self._elapsed()}
        if state == "complete":
            with self.ranks.checked():
                if self.ranks.is_first:
                    self.run.metrics_bytes()  # its lines are on the disk
            if self.config.keep_weights:
                self._save_weights(self.run.last_weights, step=self.step)
            self._prune(self.config.keep_checkpoints if self.config.keep_weights else 0)
        with self.ranks.checked():
            self.run.write_status(state, self.step, **notes)
        self.ranks.before_exit(lambda end: None)  # what ends the ranks from here on does not change how the run ended
        if "reason" in notes and self.ranks.is_first:
            print(f"{self.run.name}: {notes['reason']}", flush=True)
        return self.ranks.of_first(self.run.result)


def describe(line: dict[str, Any]) -> str:
    """The losses of a metrics line, short."""
    text = f"loss {line['train_loss']:.3f}"
    return text + (f", validation {line['valid_loss']:.3f}" if "valid_loss" in line else "")
