"""Training: one step, the loop around it, and a run folder that survives whatever happens (CSE599-O A1 section 5.3).

`PlainStep` is a training step: forward, backward, clip, update. `Trainer.loop` is the loop: learning rate, batch, step,
log, evaluate, save. `train` begins or resumes a run.
"""

import math
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace as replace_fields
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from lmcore.accounting import least_training_bytes, num_parameters, training_flops
from lmcore.checkpoint import read_checkpoint, save_states, write_weights
from lmcore.config import TrainConfig, replace, to_dict
from lmcore.data import PreparedData, open_data, part_of_batch, prefetched, require_context, validation_batches
from lmcore.device import (
    autocast,
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
from lmcore.distributed.sharded_checkpoint import load_sharded, load_whole, save_sharded, whole_states, whole_weights
from lmcore.distributed.strategies import STRATEGIES, Alone
from lmcore.distributed.world import World, joined
from lmcore.errors import EXIT_CODES, NO_ROOM, UserError, require
from lmcore.evaluate import score
from lmcore.files import remove
from lmcore.functional import cross_entropy
from lmcore.fused.step import FusedStep
from lmcore.fused.support import unsupported_reason
from lmcore.model import TransformerBlock, TransformerLM, evaluating
from lmcore.optimizer import get_lr_cosine_schedule, set_learning_rate
from lmcore.progress import Progress
from lmcore.provenance import environment, job_id
from lmcore.run import (
    FollowedRun,
    RunFolder,
    RunResult,
    flatten,
    is_complete,
    newest_checkpoint,
)
from lmcore.stopping import StopEvent, Stopped, stop_signals
from lmcore.trackers import open_trackers

BLOCK_FLOPS = 10**9
"""FLOPs of the short measurement that `choose_threads` makes, at most about so many."""


class PlainStep:
    """One batch, one update, with PyTorch's operations and autograd, compiled if so configured."""

    def __init__(self, model: TransformerLM, config: TrainConfig, device: torch.device, way: Alone | None = None):
        self.model, self.config, self.device = model, config, device
        self.way = way or Alone(model, config)  # how the ranks divide the work
        self.optimizer = self.way.optimizer()
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
        if config.compile:
            torch.compiler.reset()  # a sweep's runs share a process, and PyTorch limits recompilations of one function
        self.loss_function = torch.compile(self.loss, dynamic=False) if config.compile else self.loss

    def loss(self, inputs: Tensor, targets: Tensor, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy in nats per token of (batch, context) ids, and what is minimized; nothing is compiled."""
        with autocast(self.device, self.config.precision):
            logits = self.way.module(inputs)
            loss = cross_entropy(logits, targets)
        return loss, loss + z_loss * logits.float().logsumexp(-1).square().mean() if z_loss else loss

    def __call__(self, inputs: Tensor, targets: Tensor, lr: float | None = None) -> tuple[Tensor, Tensor]:
        """Updates the weights by one batch; loss and gradient norm before clipping stay on the device."""
        if lr is not None:
            set_learning_rate(self.optimizer, lr)
        self.optimizer.zero_grad(set_to_none=True)  # first: old gradients need no room beside activations
        loss, objective = self.loss_function(inputs, targets, self.config.z_loss)  # forward
        self.scaler.scale(objective).backward()  # backward
        self.way.finish()  # gradients: averages over the ranks
        self.scaler.unscale_(self.optimizer)
        norm = self.way.clip()  # clip
        self.scaler.step(self.optimizer)  # update
        self.scaler.update()
        return loss.detach(), norm

    def evaluation_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss alone; a smaller last batch is not compiled for."""
        usual = len(inputs) == self.config.eval_batch_size
        return (self.loss_function if usual else self.loss)(inputs, targets)[0]

    def current(self) -> tuple[TransformerLM, Optimizer]:
        """Model and optimizer as the last step leaves them; see `FusedStep.current`, where that takes work."""
        return self.model, self.optimizer

    def release(self) -> None:
        """Nothing to give up; see `FusedStep.release`."""


def training_step(
    model: TransformerLM, config: TrainConfig, device: torch.device, ranks: int = 0
) -> tuple[PlainStep | FusedStep, str | None]:
    """The configured step of `model`; and, if the fused one was asked for but does not cover it, the reason.

    With `ranks`, the number of processes of the group, it does this rank's part of the work.
    """
    parallel = config.parallel if ranks else "none"
    plain = partial(PlainStep, model, config, device)
    if config.ops == "plain":
        return plain(STRATEGIES[parallel](model, config)), None
    divided = ranks if parallel == "fsdp" else 0
    reason = f"z_loss={config.z_loss}" if config.z_loss else None
    reason = reason or unsupported_reason(config.model, config.precision, divided)
    covered = ("none", "ddp", "zero1", "fsdp") if config.optimizer.name == "adamw" else ("none", "ddp")
    if parallel not in covered and reason is None:
        reason = f"parallel={parallel}" + (f" with {config.optimizer.name}" if parallel in ("zero1", "fsdp") else "")
    if reason is not None:
        recomputes = parallel == "fsdp" and config.model.checkpoint_every is not None
        require(
            not recomputes,
            "With parallel=fsdp only the fused step recomputes (model.checkpoint_every), "
            f"and it does not cover {reason}.",
        )
        return plain(STRATEGIES[parallel](model, config)), reason
    return FusedStep.from_config(model, config, ranks), None


class AsyncMetrics:
    """Losses and gradient norms on their way from the device to the host.

    Reading a loss with `loss.item()` waits until the device has computed it; meanwhile no further step is queued, and
    the device idles. So `push` leaves a step's scalars where they are, `start` begins to copy them, and `read`, a step
    later, waits for that copy alone: the step in between keeps the device busy.
    """

    def __init__(self, mean: Callable[[Tensor], Tensor] = lambda values: values) -> None:
        self.mean = mean  # over the ranks
        self.pushed: list[tuple[int, float, Tensor, Tensor]] = []
        self.steps: list[tuple[int, float]] = []
        self.values: Tensor | None = None
        self.copied: torch.cuda.Event | None = None

    def push(self, step: int, lr: float, loss: Tensor, norm: Tensor) -> None:
        """Adds the scalars of a step; nothing is copied yet."""
        self.pushed.append((step, lr, loss, norm))

    def start(self) -> None:
        """Begins to copy everything pushed since the last start; an earlier copy must have been read."""
        if not self.pushed:
            return
        self.steps = [(step, lr) for step, lr, _, _ in self.pushed]
        values = torch.stack([torch.stack((loss.float(), norm.float())) for _, _, loss, norm in self.pushed])
        self.values = self.mean(values.double())  # exact: a sum depends neither on its order nor on how many go at once
        self.pushed = []
        if self.values.is_cuda:
            on_device, self.values = self.values, torch.empty(self.values.shape, dtype=torch.float64, pin_memory=True)
            self.values.copy_(on_device, non_blocking=True)
            self.copied = torch.cuda.current_stream(on_device.device).record_event()

    def read(self) -> list[tuple[int, float, float, float]]:
        """(step, lr, loss, norm) of the copy that was begun, once it has arrived; none if there is no copy."""
        if self.values is None:
            return []
        if self.copied is not None:
            self.copied.synchronize()
        pairs = zip(self.steps, self.values.tolist(), strict=True)
        self.values = self.copied = None
        return [(step, lr, loss, norm) for (step, lr), (loss, norm) in pairs]


class Diverged(Exception):
    """A loss or a gradient norm was not finite."""

    def __init__(self, step: int, learning_rate: float, what: str):
        super().__init__(f"The {what} was not finite at step {step}, learning rate {learning_rate:.3g}.")
        self.step, self.learning_rate = step, learning_rate


def train(config: TrainConfig, folder: str | os.PathLike) -> RunResult:
    """Trains, or resumes, the run in `folder`; returns how it ended.

    Resumes from the last good checkpoint; a complete run with the same configuration and data is returned as it is,
    or repaired if its results are damaged. Ctrl-C and stop signals end the current step, save and return with state
    "interrupted"; before the first step they end at once. A loss that is not finite returns with state "diverged", the
    last good checkpoint kept; too large a model or batch for the device with "out of memory", before anything is built
    where the arithmetic of `lmcore.accounting` says so. Raises `UserError` for a folder of another configuration, a
    folder in use, one whose damage cannot be repaired, data that does not fit the model, a device that is not there, or
    a full disk; the same call then resumes from the last checkpoint.

    With `config.parallel`, in processes that a launcher started, each of them calls this. What one refuses ends the
    others by `SystemExit`; a process that waits in a collective for one that has died is ended as a whole
    (`lmcore.distributed.watch`).
    """
    with stop_signals(signal.SIGINT) as stop:
        try:
            return _joined(config, folder, stop)
        except Stopped as stopped:
            run = RunFolder(folder)
            step, unsaved = run.last_known()[1], stopped.__cause__ is not None
            done = f"; the same command resumes from step {step:,}" if unsaved else " before it began; nothing is lost"
            print(f"{run.name}: stopped{done}.", flush=True)
            return RunResult("interrupted", step, None, None)


def _joined(config: TrainConfig, folder: str | os.PathLike, stop: StopEvent) -> RunResult:
    """`train` with the ranks that there are; a refusal of one ends all. Raises `Stopped` as `_train` does."""
    with ExitStack() as held:
        with stop.raises():
            world = held.enter_context(joined(config))
            run = RunFolder(folder) if world.is_first else FollowedRun(folder)
            with world.checked():
                device = world.device(config.device)
                data = open_data(config.data).evaluated_on(config.evaluate_on)
                check_data(config, data)
            world.require_same(flatten(to_dict(config)) | {"data": data.fingerprint, "the run folder": str(run.path)})
        with world.checked():
            held.enter_context(run.lock())
        return _train(config, data, run, device, stop, world)


def _train(
    config: TrainConfig, data: PreparedData, run: RunFolder, device: torch.device, stop: StopEvent, world: World
) -> RunResult:
    """`train` in a folder that this process holds. Raises `Stopped` if a signal came before the first step."""
    begun = False
    try:
        with stop.raises():
            reason = threads = None
            if config.parallel in ("none", "ddp", "torch-ddp") or world.size == 1:
                rows = config.batch_size // world.size
                needed, parameters = (
                    least_training_bytes(replace(config, batch_size=rows)),
                    num_parameters(config.model),
                )
                reason = too_large("Training", needed, parameters, rows, device)
            reason = next(filter(None, world.gather(reason)), None)
            with world.checked():
                run.remove_leftovers()
                if reason is None and world.size == 1:
                    threads = choose_threads(config, device, run)
                noted = {"data_fingerprint": data.fingerprint, "data": data.manifest, "threads": threads}
                run.begin(config, environment() | noted | ({"ranks": world.size} if world.size > 1 else {}))
            begun = True
            if (ended := world.of_first(lambda: run.result() if is_complete(run) else None)) is not None:
                return ended
        if config.model.vocab_size > data.vocab_size and world.is_first:
            print(
                f"{run.name}: the model's vocabulary ({config.model.vocab_size:,}) is larger than that of the data "
                f"({data.vocab_size:,}): ids from {data.vocab_size:,} on never occur.",
                flush=True,
            )
        reset_peak_memory(device)  # a sweep's runs share a process
        with reproducible(config, device, threads):
            try:
                if reason is None:
                    with stop.raises(), world.checked():
                        trainer = Trainer(config, data, run, device, world)
                    trainer.resume()  # to its end: a read that a signal breaks off looks like a damaged file
            except (RuntimeError, MemoryError) as error:
                if (reason := out_of_memory_reason(error)) is None:
                    raise
                if world.watch is not None:  # the others are not here
                    end_out_of_memory(run, world, 0, reason)
            if reason is None:
                return trainer.fit()
    except Stopped:
        state, step = run.last_known()
        if begun and state in ("new", "running", "failed"):  # else it says how the run ended before
            run.write_status("interrupted", step)
        raise
    run.write_status("out of memory", 0, reason=reason)
    if world.is_first:
        print(f"{run.name}: {reason}", flush=True)
    return world.of_first(run.result)


def end_out_of_memory(run: RunFolder, world: World, step: int, reason: str) -> NoReturn:
    """Ends all ranks where one of them, this one, lacks memory."""
    sentence, code = f"{run.name}: rank {world.rank}: {reason}", EXIT_CODES["out of memory"]
    print(sentence, flush=True)
    run.write_status("out of memory", step, reason=sentence)
    if world.watch is not None:
        world.watch.announce("out of memory", code, sentence)
    raise SystemExit(code)


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


class Trainer:
    """The state of one run in memory, and the loop that changes it."""

    def __init__(
        self, config: TrainConfig, data: PreparedData, run: RunFolder, device: torch.device, world: World | None = None
    ):
        self.config, self.data, self.run, self.device = config, data, run, device
        self.world = world or World()
        ranks = self.world.size if self.world.watch else 0
        self.update, reason = training_step(TransformerLM(config.model).to(device), config, device, ranks)
        self.way = self.update.way
        if self.world.rank:  # weights come from rank 0; dropout differs
            torch.manual_seed(config.seed + 7919 * self.world.rank)
        self.finish_saving: Callable[[bool], bool] | None = None
        if reason is not None and self.world.is_first:
            print(f"{run.name}: plain operations, as the fused step does not cover {reason}.", flush=True)
        self.step = self.saved_step = 0
        self.seconds = 0.0
        self.valid_loss: float | None = None
        self.best_valid_loss, self.best_step = math.inf, 0
        self.losses: list[float] = []  # since the last metrics line
        self.last_lr, self.last_norm = 0.0, 0.0
        self.peak_bytes: int | None = None  # of all steps so far: a CUDA graph's memory counts only when it is captured
        self.metrics, self.waits = (
            AsyncMetrics(self.world.mean),
            device.type != "cuda",
        )  # only a GPU computes on meanwhile
        self.line_step: int | None = None  # step of the metrics line whose numbers are on their way
        self.busy_seconds, self.busy_steps = 0.0, 0  # of training steps alone, since the last metrics line
        self.flops_per_step = training_flops(config.model, config.batch_size)
        self.peak_flops = peak_flops(device_name(device), config.precision)
        if self.peak_flops:
            self.peak_flops *= self.world.size

    def loop(self, stop: StopEvent) -> str:
        """Takes the steps that are left, with all that is due between them; returns complete or interrupted."""
        config = self.config
        o, last_step = config.optimizer, config.optimizer.cosine_steps or config.steps
        part, first = part_of_batch(config.batch_size, self.world.rank, self.world.size), self.step
        with prefetched(self.data.train, config, self.step, self.device, part) as batches:
            while self.step < config.steps and not self.world.stops(stop.is_set()):
                self.world.beat(self.step, patient=self.step < first + 3)  # the first ones compile
                started = time.perf_counter()
                inputs, targets = next(batches)
                self.step += 1
                lr = get_lr_cosine_schedule(self.step, o.learning_rate, o.min_learning_rate, o.warmup_steps, last_step)
                loss, norm = self.update(inputs, targets, lr)  # forward, backward, clip, update
                self.metrics.push(self.step, lr, loss, norm)
                self.busy_seconds += time.perf_counter() - started
                self.write_line()  # that of an earlier step, read while this one keeps the device busy
                last = self.step == config.steps
                evaluate = last or self.step % config.eval_interval == 0
                save = self.step % config.checkpoint_interval == 0 or (last and config.keep_weights)
                if evaluate or self.step % config.log_interval == 0:
                    self.line_step = self.step
                    self.metrics.start()
                    if self.waits or evaluate or save:
                        self.write_line(evaluate)
                if save:
                    self.save()
                elif self.step % config.log_interval == 0:
                    self.end_save(wait=False)
        self.world.decided()
        self.write_line()
        complete = self.step == config.steps
        if self.saved_step != self.step and (config.keep_weights or not complete):
            self.save()
        self.end_save()
        return "complete" if complete else "interrupted"

    def fit(self) -> RunResult:
        """Runs the loop to the last step, a stop signal, divergence or a lack of memory, and notes how it ended."""
        self.clock = time.perf_counter()
        first = self.world.is_first
        self.trackers = open_trackers(self.run, self.config, self.step) if first else []
        self.progress = Progress(self.config.steps, self.run.name, start=self.step) if first else None
        self.world.arm(lambda end: self.run.write_status(end.state, self.step, reason=end.sentence))
        self.run.write_status("running", self.step, pid=os.getpid(), job=job_id())
        try:
            with stop_signals(signal.SIGINT) as stop:
                return self._end(self.loop(stop))
        except Diverged as error:
            self.end_save()
            return self._end("diverged", reason=str(error), diverged_at_step=error.step, lr=error.learning_rate)
        except SystemExit:
            self.run.write_status("failed", self.step, reason="Another rank has failed.")
            raise
        except Exception as error:
            if (reason := out_of_memory_reason(error)) is not None:
                return self._end_out_of_memory(reason)
            full = error.strerror if isinstance(error, OSError) and error.errno in NO_ROOM else None
            if stop.is_set() and not (full or isinstance(error, UserError)):  # the signal ended the compiler first
                self.run.write_status("interrupted", self.saved_step)
                raise Stopped from error
            with suppress(UserError):
                self.run.write_status(
                    "failed", self.step, reason=(str(error).splitlines() or [type(error).__name__])[0]
                )
            if full:  # even a line of progress may find no room
                raise UserError(
                    f"{self.run.name}: {full}; the same command resumes from the last checkpoint."
                ) from error
            raise
        finally:
            if self.progress is not None:
                self.progress.close()
            with self.world.patience():
                for tracker in self.trackers:
                    tracker.close()
            self.update.release()

    def write_line(self, evaluate: bool = False) -> None:
        """Writes the metrics line that is due, if one is; with `evaluate`, with the loss over the validation set."""
        if self.line_step is None:
            return
        self._collect()
        if self.device.type == "cuda":
            self.peak_bytes = max(self.peak_bytes or 0, torch.cuda.max_memory_allocated(self.device))
        rate = self.busy_steps / self.busy_seconds if self.busy_steps else 0.0
        line: dict[str, Any] = {
            "step": self.line_step,
            "tokens": self.line_step * self.config.tokens_per_step,
            "train_loss": math.fsum(self.losses) / len(self.losses),
            "lr": self.last_lr,
            "grad_norm": self.last_norm if math.isfinite(self.last_norm) else None,
            "tokens_per_second": rate * self.config.tokens_per_step,
            "mfu": rate * self.flops_per_step / self.peak_flops if self.peak_flops else None,
            "peak_memory_bytes": self.peak_bytes,
        }
        self.losses, self.busy_seconds, self.busy_steps, self.line_step = [], 0.0, 0, None
        if evaluate:
            self.valid_loss = line["valid_loss"] = self.evaluate()
            if self.config.eval_details:
                line |= self.evaluation_details()
            if self.valid_loss < self.best_valid_loss:
                self.best_valid_loss, self.best_step = self.valid_loss, self.step
                self._save_best()
            reset_peak_memory(self.device)  # the peak in the lines is that of training steps alone
        line["seconds"] = self._elapsed()
        with self.world.checked():
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
            self.losses.append(loss)
            self.last_lr, self.last_norm = lr, norm

    def _elapsed(self) -> float:
        now = time.perf_counter()
        self.seconds, self.clock = self.seconds + now - self.clock, now
        return self.seconds

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss in nats per token over all non-overlapping windows of the validation set."""
        total, count = torch.zeros((), dtype=torch.float64), 0.0
        context, batch_size = self.config.model.context_length, self.config.eval_batch_size
        rank, size = self.world.rank, self.world.size
        with evaluating(self.update.current()[0]), self.world.patience():
            for inputs, targets in validation_batches(self.data.valid, context, batch_size, self.device, rank, size):
                tokens = targets.numel()
                if not tokens:  # the others may wait for this one in their forward pass
                    inputs, targets = (torch.zeros(1, context, dtype=torch.int64, device=self.device) for _ in range(2))
                total += self.update.evaluation_loss(inputs, targets).cpu().double() * tokens
                count += tokens
            total, counted = self.world.sum(torch.stack((total, torch.tensor(count, dtype=torch.float64)))).tolist()
        mean = total / counted
        if not math.isfinite(mean):
            raise Diverged(self.step, self.last_lr, "validation loss")
        return mean

    def evaluation_details(self) -> dict[str, Any]:
        """Share of the tokens that the model finds most probable, and mean loss by position in the window."""
        config, world, model = self.config, self.world, self.update.current()[0]
        found = score(model, self.data.valid, config.eval_batch_size, self.device, config.precision,
                      self.way.module, world.rank, world.size)  # fmt: skip
        losses, correct = world.sum(torch.stack((found.losses, found.correct.double())))
        found = replace_fields(found, losses=losses, correct=correct)
        by_position = [round(loss, 5) for loss in found.loss_by_position]
        return {"valid_accuracy": found.accuracy, "valid_loss_by_position": by_position}

    def save(self) -> None:
        """Saves everything that a resumed run needs, then removes checkpoints beyond the latest few."""
        model, optimizer = self.update.current()
        self.metrics.start()
        self._collect()
        extra = {
            "seconds": self._elapsed(),
            "losses": self.losses,
            "valid_loss": self.valid_loss,
            "best_valid_loss": self.best_valid_loss,
            "best_step": self.best_step,
            "metrics_bytes": self.run.metrics_bytes() if self.world.is_first else 0,
            "last": [self.last_lr, self.last_norm],
            "scaler": self.update.scaler.state_dict(),
            "rng": self.world.gather(rng_state(self.device)),
            "data_fingerprint": self.data.fingerprint,
        }
        sharded = self.config.checkpoints != "whole"
        path = self.run.checkpoint_file(self.step, sharded)
        with self.world.patience():
            self.end_save()
            if sharded:
                background = self.config.checkpoints == "async"
                self.finish_saving = save_sharded(self.way, optimizer, self.step, path, extra, self.world, background)
                if not background:
                    self.end_save()
            else:
                weights, moments = whole_states(self.way, optimizer, self.world)
                with self.world.checked():
                    if self.world.is_first:
                        save_states(model, weights, moments, self.step, path, extra)
        self.saved_step = self.step
        self._prune()

    def end_save(self, wait: bool = True) -> None:
        """Brings a checkpoint that is written in the background to its end; with `wait` False if it is so far."""
        with self.world.patience():
            if self.finish_saving is not None and self.finish_saving(wait):
                self.finish_saving = None
                self._prune()

    def _save_best(self) -> None:
        if self.config.keep_weights:
            self._save_weights(self.run.best_weights, step=self.best_step, valid_loss=self.best_valid_loss)

    def _save_weights(self, path: Path, **notes: Any) -> None:
        self.update.current()
        with self.world.patience():
            weights = whole_weights(self.way, self.world)
            with self.world.checked():
                if self.world.is_first:
                    write_weights(self.config.model, weights, path, **notes)

    def _prune(self, keep: int | None = None) -> None:
        for path in self.run.checkpoints()[self.config.keep_checkpoints if keep is None else keep :]:
            if self.world.is_first:
                remove(path)

    def resume(self) -> None:
        """Goes on from the newest checkpoint that is whole, if there is one."""
        content: dict[str, Any] | None = None

        def newest() -> Path | None:
            nonlocal content
            content, path = newest_checkpoint(self.run, self.config.keep_weights)
            return path

        path = self.world.of_first(newest)
        if path is not None:
            with self.world.checked():
                if content is None:
                    content = read_checkpoint(path)
            with self.world.checked():
                self._load(content, path)
            if self.world.is_first:
                print(f"{self.run.name}: resuming from step {self.step}.", flush=True)
        with self.world.checked():
            if self.world.is_first:
                self.run.cut_metrics(0 if content is None else content["extra"]["metrics_bytes"])
        if content is not None and self.best_step == self.step:
            self._save_best()

    def _load(self, content: dict[str, Any], path: Path) -> None:
        extra, (_, optimizer) = content["extra"], self.update.current()
        require(
            extra["data_fingerprint"] == self.data.fingerprint,
            f"{path} was made with other data; choose another run folder, or remove this one.",
        )
        if "model" in content:
            self.step = load_whole(self.way, optimizer, content, str(path))
        else:
            self.step = load_sharded(self.way, optimizer, path, self.world)
        self.saved_step = self.step
        self.seconds, self.losses = extra["seconds"], extra["losses"]
        self.valid_loss, self.best_valid_loss = extra["valid_loss"], extra["best_valid_loss"]
        self.best_step = extra["best_step"]
        self.last_lr, self.last_norm = extra["last"]
        self.update.scaler.load_state_dict(extra["scaler"])
        if self.world.rank < len(extra["rng"]):
            set_rng_state(self.device, extra["rng"][self.world.rank])

    def _end_out_of_memory(self, reason: str) -> RunResult:
        """A lack of memory on this rank: the others end, too."""
        if self.world.watch is None:
            return self._end("out of memory", reason=reason)
        end_out_of_memory(self.run, self.world, self.step, reason)

    def _end(self, state: str, **notes: Any) -> RunResult:
        best = self.best_valid_loss if math.isfinite(self.best_valid_loss) else None
        notes |= {"valid_loss": self.valid_loss, "best_valid_loss": best, "seconds": self._elapsed()}
        if state == "complete":
            with self.world.checked():
                if self.world.is_first:
                    self.run.metrics_bytes()
            if self.config.keep_weights:
                self._save_weights(self.run.last_weights, step=self.step)
            self._prune(None if self.config.keep_weights else 0)
        with self.world.checked():
            self.run.write_status(state, self.step, **notes)
        self.world.arm(lambda end: None)  # what ends the ranks from here on does not change how the run has ended
        if "reason" in notes and self.world.is_first:
            print(f"{self.run.name}: {notes['reason']}", flush=True)
        return self.world.of_first(self.run.result)


def describe(line: dict[str, Any]) -> str:
    """The losses of a metrics line, short."""
    text = f"loss {line['train_loss']:.3f}"
    return text + (f", validation {line['valid_loss']:.3f}" if "valid_loss" in line else "")
