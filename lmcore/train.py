"""The training loop: a configuration in, a run folder out (CSE599-O A1 section 5.3)."""

import math
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from lmcore.accounting import training_flops
from lmcore.checkpoint import restore, save_checkpoint, save_weights
from lmcore.config import TrainConfig
from lmcore.data import PreparedData, open_data, require_context, validation_batches
from lmcore.data.prefetch import prefetched
from lmcore.device import device_name, forget_memory, out_of_memory_reason, peak_flops, select_device
from lmcore.errors import NO_ROOM, UserError, require
from lmcore.model import TransformerLM, evaluating
from lmcore.optimizer import get_lr_cosine_schedule
from lmcore.progress import Progress
from lmcore.provenance import environment, job_id
from lmcore.readback import Readback
from lmcore.reproducibility import reproducible, rng_state, set_rng_state
from lmcore.resume import is_complete, newest_state, require_same_data
from lmcore.run import RunFolder
from lmcore.stopping import stop_signals
from lmcore.tracking import open_trackers
from lmcore.training_step import training_step


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

    Resumes from the last good checkpoint; a complete run with the same configuration and data is returned as it is,
    or mended if its results are damaged. SIGTERM and SIGUSR1, and SIGINT once steps are taken, end the current step,
    save and return with state "interrupted". A loss that is not finite returns with state "diverged", the last good
    checkpoint kept; too large a model or batch for the device with "out of memory". Raises `UserError` for a folder of
    another configuration, a folder in use, one whose damage cannot be mended, data that does not fit the model, a
    device that is not there, or a full disk; the same call then goes on from the last checkpoint.
    """
    with stop_signals() as stop:
        device, _ = select_device(config.device)
        data = open_data(config.data)
        check_data(config, data)
        run = RunFolder(folder)
        if stop.is_set():
            print(f"{run.name}: stopped before it began; nothing is lost.", flush=True)
            return RunResult("interrupted", 0, None, None)
        with run.lock():
            run.remove_leftovers()
            require_same_data(run, data.fingerprint)
            run.begin(config, environment() | {"data_fingerprint": data.fingerprint, "data": data.manifest})
            if is_complete(run):
                return result_of(run)
            forget_memory(device)  # a sweep's runs share a process
            with reproducible(config, device):
                try:
                    trainer = Trainer(config, data, run, device)
                except (RuntimeError, MemoryError) as error:
                    if (reason := out_of_memory_reason(error)) is None:
                        raise
                    run.write_status("out of memory", 0, reason=reason)
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


class Trainer:
    """The state of one run in memory, and the steps that change it."""

    def __init__(self, config: TrainConfig, data: PreparedData, run: RunFolder, device: torch.device):
        self.config, self.data, self.run, self.device = config, data, run, device
        self.model = TransformerLM(config.model).to(device)
        self.update, reason = training_step(self.model, config, device)
        if reason is not None:
            print(f"{run.name}: plain operations, as the fused step does not cover {reason}.", flush=True)
        self.step = self.saved_step = 0
        self.seconds = 0.0
        self.valid_loss: float | None = None
        self.best_valid_loss, self.best_step = math.inf, 0
        self.losses: list[float] = []  # since the last metrics line
        self.readback = Readback()
        self.line_step: int | None = None  # step of the metrics line whose numbers are on their way
        self.last_lr, self.last_norm = 0.0, 0.0
        self._resume()
        self.clock = time.perf_counter()
        self.busy_seconds, self.busy_steps = 0.0, 0  # of training steps alone, since the last metrics line
        self.flops_per_step = training_flops(config.model, config.batch_size)
        self.peak_flops = peak_flops(device_name(device), config.precision)

    def fit(self) -> RunResult:
        """Runs to the last step, a stop signal or divergence."""
        self.trackers = open_trackers(self.run, self.config, self.step)
        self.progress = Progress(self.config.steps, self.run.name, start=self.step)
        self.run.write_status("running", self.step, pid=os.getpid(), job=job_id())
        try:
            return self._end(self._steps())
        except Diverged as error:
            return self._end("diverged", reason=str(error), diverged_at_step=error.step, lr=error.learning_rate)
        except (RuntimeError, MemoryError) as error:
            if (reason := out_of_memory_reason(error)) is None:
                self._note_failure(error)
                raise
            return self._end("out of memory", reason=reason)
        except Exception as error:
            self._note_failure(error)
            if isinstance(error, OSError) and error.errno in NO_ROOM:  # even a line of progress may find no room
                raise UserError(
                    f"{self.run.name}: {error.strerror}; the same command goes on from the last checkpoint."
                ) from error
            raise
        finally:
            self.progress.close()
            for tracker in self.trackers:
                tracker.close()

    def _steps(self) -> str:
        """Takes the steps that are left, with all that is due between them; returns complete or interrupted."""
        config, wait = self.config, self.device.type != "cuda"
        with (
            stop_signals(signal.SIGINT) as stop,
            prefetched(self.data.train, config, self.step, self.device) as self.batches,
        ):
            while self.step < config.steps and not stop.is_set():
                self.train_step()
                self._write_line()  # of the step before: this one keeps the device busy meanwhile
                last = self.step == config.steps
                evaluate = last or self.step % config.eval_interval == 0
                save = last or self.step % config.checkpoint_interval == 0
                if evaluate or self.step % config.log_interval == 0:
                    self.line_step = self.step
                    self.readback.start()
                    if wait or evaluate or save:
                        self._write_line(evaluate)
                if save:
                    self.checkpoint()
        self._write_line()
        if self.saved_step != self.step:
            self.checkpoint()
        return "complete" if self.step == config.steps else "interrupted"

    def train_step(self) -> None:
        """One batch, one update (section 5.3). Loss and gradient norm stay on the device until they are needed."""
        started = time.perf_counter()
        inputs, targets = next(self.batches)
        self.step += 1
        lr = self._learning_rate(self.step)
        for group in self.update.optimizer.param_groups:
            group["lr"] = lr
        self.readback.push(self.step, lr, *self.update(inputs, targets))
        self.busy_seconds += time.perf_counter() - started
        self.busy_steps += 1

    def _learning_rate(self, step: int) -> float:
        o = self.config.optimizer
        last = o.cosine_steps or self.config.steps
        return get_lr_cosine_schedule(step, o.learning_rate, o.min_learning_rate, o.warmup_steps, last)

    def _collect(self) -> None:
        """Takes over the losses whose copy has begun. Raises `Diverged` at the first that is not finite."""
        started = time.perf_counter()
        values = self.readback.read()
        self.busy_seconds += time.perf_counter() - started
        for v in values:
            if not math.isfinite(v.loss):
                raise Diverged(v.step, v.lr, "loss")
            if not math.isfinite(v.norm) and not self.update.scaler.is_enabled():  # loss scaling skips such steps
                raise Diverged(v.step, v.lr, "gradient norm")
            self.losses.append(v.loss)
            self.last_lr, self.last_norm = v.lr, v.norm

    def _write_line(self, evaluate: bool = False) -> None:
        """Writes the metrics line that is due, if one is."""
        if self.line_step is None:
            return
        line = self.metrics_line(evaluate)
        self.line_step = None
        self.run.append_metrics(line)
        for tracker in self.trackers:
            tracker.log(line)
        self.progress.update(line["step"], describe(line))

    def metrics_line(self, evaluate: bool) -> dict[str, Any]:
        """The line for the steps since the last one; with `evaluate` also the loss over the whole validation set."""
        self._collect()
        rate = self.busy_steps / self.busy_seconds if self.busy_steps else 0.0
        cuda = self.device.type == "cuda"
        line = {
            "step": self.line_step,
            "tokens": self.line_step * self.config.tokens_per_step,
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
                self.best_valid_loss, self.best_step = self.valid_loss, self.step
                self._save_best()
            forget_memory(self.device)  # the peak in the lines is that of training steps alone
        return line | {"seconds": self._elapsed()}

    def _save_best(self) -> None:
        save_weights(self.model, self.run.best_weights, step=self.best_step, valid_loss=self.best_valid_loss)

    def _elapsed(self) -> float:
        now = time.perf_counter()
        self.seconds, self.clock = self.seconds + now - self.clock, now
        return self.seconds

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss in nats per token over all non-overlapping windows of the validation set."""
        total, count = torch.zeros((), dtype=torch.float64), 0
        context, batch_size = self.config.model.context_length, self.config.eval_batch_size
        with evaluating(self.model):
            for inputs, targets in validation_batches(self.data.valid, context, batch_size, self.device):
                whole = inputs.shape[0] == batch_size  # a smaller last batch would be compiled again
                loss = self.update.evaluation_loss(inputs, targets, usual_shape=whole)
                total += loss.cpu().double() * targets.numel()
                count += targets.numel()
        mean = total.item() / count
        if not math.isfinite(mean):
            raise Diverged(self.step, self.last_lr, "validation loss")
        return mean

    def checkpoint(self) -> None:
        """Saves everything that a resumed run needs, then removes checkpoints beyond the latest few."""
        self.update.finish()
        self.readback.start()
        self._collect()
        extra = {
            "seconds": self._elapsed(),
            "losses": self.losses,
            "valid_loss": self.valid_loss,
            "best_valid_loss": self.best_valid_loss,
            "best_step": self.best_step,
            "metrics": self.run.metrics_log.text(),
            "last": [self.last_lr, self.last_norm],
            "scaler": self.update.scaler.state_dict(),
            "rng": rng_state(self.device),
            "data_fingerprint": self.data.fingerprint,
        }
        save_checkpoint(self.model, self.update.optimizer, self.step, self.run.checkpoint_file(self.step), extra)
        self.saved_step = self.step
        self._prune()

    def _prune(self) -> None:
        for path in self.run.checkpoints()[self.config.keep_checkpoints :]:
            path.unlink()

    def _resume(self) -> None:
        content, damaged = newest_state(self.run)
        if content is not None:
            self._load(content)
            print(f"{self.run.name}: goes on from step {self.step}.", flush=True)
        metrics = "" if content is None else content["extra"].get("metrics")
        if metrics is None:  # the checkpoint of an earlier version: the file is all there is
            self.run.metrics_log.keep_until(self.step)
        elif not self.run.metrics_log.restore(metrics):
            print(f"{self.run.metrics_file} was damaged: its lines come from the checkpoint.", flush=True)
        for path in damaged:
            path.rename(path.with_suffix(".damaged"))  # out of the way of the run, which will write that step again
        if content is not None and self.best_step == self.step:
            self._save_best()

    def _load(self, content: dict[str, Any]) -> None:
        extra = content["extra"]
        name = str(self.run.checkpoint_file(content["iteration"]))
        self.step = self.saved_step = restore(content, self.model, self.update.optimizer, name=name)
        self.seconds, self.losses = extra["seconds"], extra["losses"]
        self.valid_loss, self.best_valid_loss = extra["valid_loss"], extra["best_valid_loss"]
        self.best_step = extra.get("best_step", 0)
        self.last_lr, self.last_norm = extra["last"]
        self.update.scaler.load_state_dict(extra["scaler"])
        self.update.weights_changed()
        set_rng_state(self.device, extra["rng"])

    def _end(self, state: str, **notes: Any) -> RunResult:
        best = self.best_valid_loss if math.isfinite(self.best_valid_loss) else None
        notes |= {"valid_loss": self.valid_loss, "best_valid_loss": best, "seconds": self._elapsed()}
        if state == "complete":
            self._prune()
            self.run.metrics_log.flush()
            save_weights(self.model, self.run.last_weights, step=self.step)
        self.run.write_status(state, self.step, **notes)
        if "reason" in notes:
            print(f"{self.run.name}: {notes['reason']}", flush=True)
        return result_of(self.run)

    def _note_failure(self, error: Exception) -> None:
        with suppress(UserError):
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            self.run.write_status("failed", self.step, reason=reason)


def describe(line: dict[str, Any]) -> str:
    """The losses of a metrics line, short."""
    text = f"loss {line['train_loss']:.3f}"
    return text + (f", validation {line['valid_loss']:.3f}" if "valid_loss" in line else "")
