"""The training loop: a configuration in, a run folder out (CSE599-O A1 section 5.3)."""

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmcore.accounting import training_flops
from lmcore.checkpoint import read_checkpoint, restore, save_checkpoint, save_weights
from lmcore.config import TrainConfig, require
from lmcore.data import PreparedData, batch_at_step, open_data, require_context, validation_batches
from lmcore.device import autocast, device_name, forget_memory, out_of_memory_reason, peak_flops, select_device
from lmcore.errors import UserError
from lmcore.functional import cross_entropy
from lmcore.model import TransformerLM
from lmcore.optimizer import build_optimizer, get_lr_cosine_schedule, gradient_clipping
from lmcore.progress import Progress
from lmcore.provenance import environment
from lmcore.reproducibility import reproducible, rng_state, set_rng_state
from lmcore.run import RunFolder
from lmcore.tracking import open_trackers

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class RunResult:
    """How a run ended: complete, interrupted, diverged or out of memory, after `step` steps; nats per token."""

    state: str
    step: int
    valid_loss: float | None
    best_valid_loss: float | None


class Diverged(Exception):
    """A loss or a gradient norm was not finite."""

    def __init__(self, step: int, learning_rate: float, what: str):
        super().__init__(f"The {what} was not finite at step {step}, learning rate {learning_rate:.3g}.")
        self.step, self.learning_rate = step, learning_rate


def train(config: TrainConfig, folder: str | os.PathLike) -> RunResult:
    """Trains, or goes on training, the run in `folder`; returns how it ended.

    Resumes from the last good checkpoint; a complete run with the same configuration and data is returned as it is.
    SIGINT, SIGTERM and SIGUSR1 end the current step, save and return with state "interrupted". A loss that is not
    finite returns with state "diverged", the last good checkpoint kept; too large a model or batch for the device
    with "out of memory". Raises `UserError` for a folder of another configuration, a folder in use or without one
    readable checkpoint among those it has, data that does not fit the model, or a device that is not there.
    """
    device, _ = select_device(config.device)
    data = open_data(config.data)
    check_data(config, data)
    run = RunFolder(folder)
    with run.lock():
        run.begin(config, environment() | {"data_fingerprint": data.fingerprint, "data": data.manifest})
        if run.status()["state"] == "complete":
            return result_of(run)
        forget_memory(device)  # a sweep's runs share a process
        with reproducible(config, device):
            try:
                trainer = Trainer(config, data, run, device)
            except (RuntimeError, MemoryError) as error:
                if (reason := out_of_memory_reason(error)) is None:
                    raise
                run.write_status("out of memory", run.status()["step"], reason=reason)
                print(f"{run.name}: {reason}", flush=True)
                return result_of(run)
            return trainer.fit()


def check_data(config: TrainConfig, data: PreparedData) -> None:
    """Raises `UserError` if the corpus does not fit the model: more ids than the vocabulary, or too few tokens."""
    require(
        data.vocab_size <= config.model.vocab_size,
        f"The data in {config.data} has a vocabulary of {data.vocab_size}, the model one of {config.model.vocab_size}; "
        f"set model.vocab_size to at least {data.vocab_size}.",
    )
    require_context(data.train, config.model.context_length, f"{config.data} (training part)")
    require_context(data.valid, config.model.context_length, f"{config.data} (validation part)")


def result_of(run: RunFolder) -> RunResult:
    """The result noted in a run folder's status."""
    status = run.status()
    return RunResult(status["state"], status["step"], status.get("valid_loss"), status.get("best_valid_loss"))


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Turns the stop signals into an event for as long as the block lasts; only the main thread can."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = {number: signal.signal(number, lambda *_: event.set()) for number in STOP_SIGNALS}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Trainer:
    """The state of one run in memory, and the steps that change it."""

    def __init__(self, config: TrainConfig, data: PreparedData, run: RunFolder, device: torch.device):
        self.config, self.data, self.run, self.device = config, data, run, device
        self.model = TransformerLM(config.model).to(device)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
        if config.compile:
            torch.compiler.reset()  # a sweep's runs share a process, and PyTorch limits recompilations of one function
        self.loss_function = torch.compile(self._loss, dynamic=False) if config.compile else self._loss
        self.step = 0
        self.seconds = 0.0
        self.valid_loss: float | None = None
        self.best_valid_loss = math.inf
        self.losses: list[float] = []  # since the last metrics line
        self.pending: list[tuple[int, float, Tensor, Tensor]] = []  # step, lr, loss, gradient norm: still on the device
        self.last_lr, self.last_norm = 0.0, 0.0
        self._resume()
        self.clock = time.perf_counter()
        self.busy_seconds, self.busy_steps = 0.0, 0  # of training steps alone, since the last metrics line
        self.flops_per_step = training_flops(config.model, config.batch_size)
        self.peak_flops = peak_flops(device_name(device), config.precision)

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with autocast(self.device, self.config.precision):
            return cross_entropy(self.model(inputs), targets)

    def fit(self) -> RunResult:
        """Runs to the last step, a stop signal or divergence."""
        config, trackers = self.config, open_trackers(self.run, self.config, self.step)
        progress = Progress(config.steps, self.run.name, start=self.step)
        self.run.write_status("running", self.step, pid=os.getpid())
        try:
            with stop_signals() as stop:
                while self.step < config.steps:
                    self.train_step()
                    last = self.step == config.steps
                    evaluate = last or self.step % config.eval_interval == 0
                    if evaluate or self.step % config.log_interval == 0:
                        line = self.metrics_line(evaluate)
                        self.run.append_metrics(line)
                        for tracker in trackers:
                            tracker.log(line)
                        progress.update(self.step, describe(line))
                    if last or stop.is_set() or self.step % config.checkpoint_interval == 0:
                        self.checkpoint()
                    if stop.is_set() and not last:
                        return self._end("interrupted")
            return self._end("complete")
        except Diverged as error:
            return self._end("diverged", reason=str(error), diverged_at_step=error.step, lr=error.learning_rate)
        except (RuntimeError, MemoryError) as error:
            if (reason := out_of_memory_reason(error)) is None:
                raise
            return self._end("out of memory", reason=reason)
        finally:
            progress.close()
            for tracker in trackers:
                tracker.close()

    def train_step(self) -> None:
        """One batch, one update (section 5.3). Loss and gradient norm stay on the device until they are needed."""
        started = time.perf_counter()
        inputs, targets = batch_at_step(self.data.train, self.config, self.step, self.device)
        self.step += 1
        lr = self._learning_rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self.loss_function(inputs, targets)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = gradient_clipping(self.model.parameters(), self.config.optimizer.max_grad_norm or math.inf)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.pending.append((self.step, lr, loss.detach(), norm))
        self.busy_seconds += time.perf_counter() - started
        self.busy_steps += 1

    def _learning_rate(self, step: int) -> float:
        o = self.config.optimizer
        last = o.cosine_steps or self.config.steps
        return get_lr_cosine_schedule(step, o.learning_rate, o.min_learning_rate, o.warmup_steps, last)

    def collect(self) -> None:
        """Reads the pending losses back from the device. Raises `Diverged` at the first that is not finite."""
        if not self.pending:
            return
        started = time.perf_counter()
        values = torch.stack([torch.stack((loss.float(), norm.float())) for _, _, loss, norm in self.pending]).tolist()
        self.busy_seconds += time.perf_counter() - started
        for (step, lr, _, _), (loss, norm) in zip(self.pending, values, strict=True):
            if not math.isfinite(loss):
                raise Diverged(step, lr, "loss")
            if not math.isfinite(norm) and not self.scaler.is_enabled():  # loss scaling skips such steps by design
                raise Diverged(step, lr, "gradient norm")
            self.losses.append(loss)
            self.last_lr, self.last_norm = lr, norm
        self.pending.clear()

    def metrics_line(self, evaluate: bool) -> dict[str, Any]:
        """The line for the steps since the last one; with `evaluate` also the loss over the whole validation set."""
        self.collect()
        rate = self.busy_steps / self.busy_seconds if self.busy_steps else 0.0
        cuda = self.device.type == "cuda"
        line = {
            "step": self.step,
            "tokens": self.step * self.config.tokens_per_step,
            "train_loss": math.fsum(self.losses) / len(self.losses),
            "lr": self.last_lr,
            "grad_norm": self.last_norm if math.isfinite(self.last_norm) else None,
            "tokens_per_second": rate * self.config.tokens_per_step,
            "mfu": rate * self.flops_per_step / self.peak_flops if self.peak_flops else None,
            "peak_memory_bytes": torch.cuda.max_memory_allocated(self.device) if cuda else None,
        }
        self.losses, self.busy_seconds, self.busy_steps = [], 0.0, 0
        if evaluate:
            self.valid_loss = line["valid_loss"] = self.evaluate()
            if self.valid_loss < self.best_valid_loss:
                self.best_valid_loss = self.valid_loss
                save_weights(self.model, self.run.best_weights, step=self.step, valid_loss=self.valid_loss)
            forget_memory(self.device)  # the peak in the lines is that of training steps alone
        return line | {"seconds": self._elapsed()}

    def _elapsed(self) -> float:
        now = time.perf_counter()
        self.seconds, self.clock = self.seconds + now - self.clock, now
        return self.seconds

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss in nats per token over all non-overlapping windows of the validation set."""
        self.model.eval()
        total, count = torch.zeros((), dtype=torch.float64), 0
        context, batch_size = self.config.model.context_length, self.config.eval_batch_size
        for inputs, targets in validation_batches(self.data.valid, context, batch_size, self.device):
            whole = inputs.shape[0] == batch_size  # a smaller last batch would be compiled again
            loss = (self.loss_function if whole else self._loss)(inputs, targets)
            total += loss.cpu().double() * targets.numel()
            count += targets.numel()
        self.model.train()
        mean = total.item() / count
        if not math.isfinite(mean):
            raise Diverged(self.step, self.last_lr, "validation loss")
        return mean

    def checkpoint(self) -> None:
        """Saves everything that a resumed run needs, then removes checkpoints beyond the latest few."""
        self.collect()
        extra = {
            "seconds": self._elapsed(),
            "losses": self.losses,
            "valid_loss": self.valid_loss,
            "best_valid_loss": self.best_valid_loss,
            "last": [self.last_lr, self.last_norm],
            "scaler": self.scaler.state_dict(),
            "rng": rng_state(self.device),
        }
        save_checkpoint(self.model, self.optimizer, self.step, self.run.checkpoint_file(self.step), extra)
        for path in self.run.checkpoints()[self.config.keep_checkpoints :]:
            path.unlink()

    def _resume(self) -> None:
        unreadable = []
        for path in self.run.checkpoints():
            try:
                content = read_checkpoint(path)
            except UserError as error:
                print(f"{error} The checkpoint before it is tried.", flush=True)
                unreadable.append(path)
                continue
            self._load(content, path)
            print(f"{self.run.name}: goes on from step {self.step}.", flush=True)
            break
        else:  # beginning again would throw away what the folder still holds
            require(
                not unreadable,
                f"No checkpoint in {self.run.checkpoint_folder} can be read; put a whole one back, or choose another "
                "run folder.",
            )
        self.run.keep_metrics_until(self.step)
        for path in unreadable:
            path.rename(path.with_suffix(".damaged"))  # out of the way of the run, which will write that step again

    def _load(self, content: dict[str, Any], path: Path) -> None:
        extra = content["extra"]
        require("rng" in extra, f"{path} was not written by a training run, so none can go on from it; remove it.")
        self.step = restore(content, self.model, self.optimizer, name=str(path))
        self.seconds, self.losses = extra["seconds"], extra["losses"]
        self.valid_loss, self.best_valid_loss = extra["valid_loss"], extra["best_valid_loss"]
        self.last_lr, self.last_norm = extra["last"]
        self.scaler.load_state_dict(extra["scaler"])
        set_rng_state(self.device, extra["rng"])

    def _end(self, state: str, **notes: Any) -> RunResult:
        best = self.best_valid_loss if math.isfinite(self.best_valid_loss) else None
        notes |= {"valid_loss": self.valid_loss, "best_valid_loss": best, "seconds": self._elapsed()}
        if state == "complete":
            save_weights(self.model, self.run.checkpoint_folder / "last.safetensors", step=self.step)
        self.run.write_status(state, self.step, **notes)
        if "reason" in notes:
            print(f"{self.run.name}: {notes['reason']}", flush=True)
        return result_of(self.run)


def describe(line: dict[str, Any]) -> str:
    """The losses of a metrics line, short."""
    text = f"loss {line['train_loss']:.3f}"
    return text + (f", validation {line['valid_loss']:.3f}" if "valid_loss" in line else "")
