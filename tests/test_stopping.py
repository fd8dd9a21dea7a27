"""Stop signals: acknowledged even within a long call, obeyed at once while nothing is lost, enforced by a second."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from contextlib import suppress

import psutil
import pytest

from lmcore import cli, stopping
from lmcore.accounting import least_step_bytes, num_parameters
from lmcore.config import OptimizerConfig, TrainConfig, model_config, replace, to_dict
from lmcore.errors import EXIT_INTERRUPTED, EXIT_OUT_OF_MEMORY
from lmcore.files import write_json
from lmcore.profiling.timing import measure
from lmcore.profiling.workload import workload_config
from lmcore.run import RunFolder
from lmcore.stopping import SAME_SIGNAL, StopEvent, Stopped, stop_signals, stoppable

PATIENCE = 60
"""Seconds after which a condition that has not come true fails the test."""
AT_ONCE = 10
"""Seconds within which a stopped command ends on a busy machine; what it is stopped in takes minutes."""

TERM, INT, HUP, USR1, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGKILL

LONG_CALL = """
import hashlib, signal
from lmcore.stopping import stop_signals
with stop_signals(signal.SIGINT, exits=True):
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # minutes in C, where Python runs no handler
"""

WITH_WORKERS = """
import sys
from lmcore import cli
from lmcore.tokenizer import train
train.available_cores = lambda: 2
sys.exit(cli.main(sys.argv[1:]))
"""
"""lmcore on a machine with two cores, whatever this one has."""

FORK = """
import os, signal, time
from lmcore.stopping import stop_signals
with stop_signals() as stop:
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(stop.is_set())
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), stop.is_set())
"""


@pytest.fixture
def start():
    """Starts Python with these words; the sessions of such processes are killed after the test."""
    processes: list[subprocess.Popen] = []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}

    def start(*words: object) -> subprocess.Popen:
        processes.append(subprocess.Popen([sys.executable, *map(str, words)], **pipes))
        return processes[-1]

    yield start
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for(process: subprocess.Popen, condition) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("first", "second"), [(TERM, TERM), (INT, TERM), (TERM, INT), (HUP, TERM)])
def test_within_a_long_call_of_c(start, first, second):
    process = start("-c", LONG_CALL)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(first)
    said = process.stderr.readline()
    assert said == f"lmcore: {first.name}: stopping where nothing is lost; a second signal ends the process at once.\n"
    time.sleep(SAME_SIGNAL + 0.1)
    assert process.poll() is None
    process.send_signal(second)
    assert process.wait(AT_ONCE) == 128 + second
    assert process.stderr.read() == f"lmcore: {second.name} again: ended at once; what was saved stays.\n"


class Ended(BaseException):
    """What `os._exit` is in a test."""


@pytest.mark.parametrize(
    ("heard", "code"),
    [
        ([(0.0, TERM), (0.4, TERM)], None),
        ([(0.0, TERM), (0.4, INT)], None),
        ([(0.0, TERM), (0.6, TERM)], 143),
        ([(0.0, HUP), (0.4, TERM)], None),
        ([(0.0, TERM), (0.6, HUP)], 129),
        ([(0.0, USR1), (9.0, HUP), (9.4, TERM)], None),
        ([(0.0, INT), (0.4, INT), (0.6, INT)], 130),
        ([(0.0, USR1), (9.0, TERM)], None),
        ([(0.0, USR1), (9.0, TERM), (9.4, TERM)], None),
        ([(0.0, USR1), (9.0, TERM), (9.6, INT)], 130),
        ([(0.0, TERM), (9.0, USR1)], None),
        ([(0.0, USR1), (9.0, USR1)], None),
    ],
)
@pytest.mark.parametrize("exits", [True, False])
def test_which_second_signal_ends_the_process(monkeypatch, capsys, heard, code, exits):
    codes, before = [], []

    def leave(code):
        codes.append(code)
        raise Ended

    monkeypatch.setattr(stopping.os, "_exit", leave)
    event = StopEvent({TERM, INT, HUP, USR1}, exits, before_exit=lambda: before.append("called"))
    for now, number in heard:
        monkeypatch.setattr(stopping.time, "monotonic", lambda now=now: now)
        with suppress(Ended):
            event.hear(number)
    assert codes == ([code] if code and exits else [])
    assert before == ["called"] * len(codes)
    assert capsys.readouterr().err.count("stopping where nothing is lost") == 1


def test_a_nested_block_shares_the_event_and_all_is_put_back(capsys):
    def handlers() -> list:
        return [signal.getsignal(number) for number in (TERM, INT, HUP, USR1)]

    before, threads = handlers(), threading.active_count()
    with stop_signals() as outer:
        outside = handlers()
        with stop_signals(INT, exits=True) as inner:
            assert inner is outer
            assert outer.exits
            os.kill(os.getpid(), INT)
        assert not outer.exits
        assert outer.is_set()
        assert handlers() == outside
        with pytest.raises(Stopped) as stopped, outer.raises():
            pytest.fail("the block of a signal that has come is not begun")
        assert stopped.value.number == INT
    assert handlers() == before
    assert signal.set_wakeup_fd(-1) == -1
    assert threading.active_count() == threads
    assert capsys.readouterr().err.startswith("lmcore: SIGINT: stopping where nothing is lost")
    with stop_signals() as again:
        assert not again.is_set()


def test_somebody_else_s_wakeup_descriptor_is_put_back():
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    try:
        with pytest.raises(ZeroDivisionError), stop_signals():
            raise ZeroDivisionError
        assert signal.set_wakeup_fd(-1) == write
    finally:
        signal.set_wakeup_fd(-1)
        os.close(read)
        os.close(write)


@pytest.mark.parametrize("number", [TERM, INT, HUP, USR1])
def test_a_stoppable_block_ends_at_once(capsys, number):
    with pytest.raises(Stopped) as stopped, stoppable():
        signal.raise_signal(number)
    assert stopped.value.number == number
    assert capsys.readouterr().err.startswith(f"lmcore: {number.name}: stopping")


def test_a_block_inside_obeys_the_event_itself():
    """What it returns counts, although a signal ends the block around it at once otherwise."""
    with stoppable():
        with stop_signals() as stop:
            signal.raise_signal(HUP)
            assert stop.is_set()
            with pytest.raises(Stopped), stop.raises():
                pytest.fail("the block of a signal that has come is not begun")
        obeyed = True
    assert obeyed


def test_after_a_block_inside_a_signal_ends_the_block_around_it():
    def interrupted():
        with stoppable():
            with stop_signals():
                pass
            signal.raise_signal(TERM)
            pytest.fail("the signal ends the block at once again")

    with pytest.raises(Stopped):
        interrupted()


@pytest.mark.parametrize("number", [HUP, signal.SIGTERM])
def test_a_signal_that_is_ignored_stays_so(number):
    """As nohup starts a command."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with stoppable():
            signal.raise_signal(number)
            assert signal.getsignal(number) is signal.SIG_IGN
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_signal_at_any_line_of_the_beginning_ends_the_block():
    """Whichever line of `raises` it hits: a model that takes minutes must not be begun as if nothing had come."""

    def began_with_signal_at(count: int) -> bool:
        event, lines = StopEvent(), iter(range(count + 1))

        def at_line(frame, what, _):
            if what == "line" and next(lines, None) == count:
                event.handle(TERM)
            return at_line

        def trace(frame, *_):
            return at_line if frame.f_code is StopEvent.raises.__wrapped__.__code__ else None

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            with event.raises():
                sys.settrace(before)
                return event.is_set()
        except Stopped:
            return False
        finally:
            sys.settrace(before)

    assert [began_with_signal_at(count) for count in range(5)] == [False] * 5


@pytest.mark.parametrize("instead", [ValueError, None])
def test_a_library_that_swallows_the_exception_does_not_go_on(instead):
    """As `torch.asarray` does, which calls methods of Python and has its own error for whatever they raise."""

    def library() -> None:
        try:
            os.kill(os.getpid(), TERM)
            time.sleep(PATIENCE)
        except Stopped:
            if instead is not None:
                raise instead("could not determine the shape") from None

    with stop_signals() as stop, pytest.raises(Stopped) as stopped, stop.raises():
        library()
    assert stopped.value.number == TERM
    with pytest.raises(KeyError), StopEvent().raises():
        raise KeyError("without a signal")


def test_other_threads():
    def entered() -> StopEvent:
        found = []

        def enter():
            with stop_signals(INT) as stop:
                found.append(stop)

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        return found[0]

    handler = signal.getsignal(INT)
    assert not entered().is_set()
    with stop_signals() as stop:
        assert entered() is stop
        assert signal.getsignal(INT) is handler


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_signal_to_a_forked_process_is_its_own():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True)
    assert done.stdout == "1 False\n"
    assert "stopping" not in done.stderr


SIZES = {"d_model": 8, "num_heads": 2, "d_ff": 8, "context_length": 8}


@pytest.fixture
def config(embedded_data) -> TrainConfig:
    """A model whose building takes minutes."""
    return TrainConfig(
        model=model_config("smoke", num_layers=100_000, vocab_size=300, **SIZES),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0),
        data=str(embedded_data),
        batch_size=1,
        steps=2,
        device="cpu",
    )


@pytest.mark.parametrize(("number", "starts"), [(TERM, 2), (INT, 1)])
def test_training_is_stopped_while_it_builds_the_model(start, tmp_path, config, number, starts):
    write_json(tmp_path / "config.json", to_dict(config))
    run = RunFolder(tmp_path / "run")
    for count in range(1, 1 + starts):  # the same command again is no mistake, and begins to build again
        process = start("-m", "lmcore", "train", "--config", tmp_path / "config.json", "--run", run.path)
        wait_for(process, lambda count=count: len(run.starts()) == count)
        time.sleep(0.2)
        process.send_signal(number)
        assert process.stderr.readline().startswith(f"lmcore: {number.name}: stopping where nothing is lost")
        assert process.wait(AT_ONCE) == EXIT_INTERRUPTED
        assert "stopped before it began; nothing is lost" in process.stdout.read()
        assert (run.status()["state"], run.status()["step"]) == ("interrupted", 0)


def test_a_signal_before_the_first_step_leaves_how_the_run_ended(tmp_path, config, monkeypatch):
    from lmcore.train import train

    small = replace(config, model__num_layers=1)
    run = RunFolder(tmp_path / "run")
    assert train(small, run.path).state == "complete"
    before = run.status()

    def stopped(*_):
        os.kill(os.getpid(), TERM)

    monkeypatch.setattr("lmcore.train.is_complete", stopped)
    assert train(small, run.path).state == "interrupted"
    assert run.status() == before
    monkeypatch.undo()
    assert train(small, run.path).state == "complete"


@pytest.fixture
def never_built(monkeypatch):
    def built(*_, **__):
        raise AssertionError("the model is built")

    for module in ("lmcore.train", "lmcore.profiling.workload"):
        monkeypatch.setattr(f"{module}.TransformerLM", built)


def test_a_model_that_cannot_fit_is_refused_before_it_is_built(tmp_path, config, never_built, capsys):
    write_json(tmp_path / "config.json", to_dict(config))
    options = ["--config", str(tmp_path / "config.json"), "--model.num-layers", "1000000000"]
    assert cli.main(["train", "--run", str(tmp_path / "run"), *options]) == EXIT_OUT_OF_MEMORY
    reason = RunFolder(tmp_path / "run").status()["reason"]
    assert reason in capsys.readouterr().out
    model = replace(config.model, num_layers=10**9)
    assert reason.startswith(f"Training needs at least {least_step_bytes(model, 1) / 1e9:,.1f} GB for ")
    assert f"GB for {num_parameters(model):,} parameters and 1 sequences a batch; CPU has" in reason


WORDS = {"forward": "forward pass", "forward_backward": "forward and backward pass", "train_step": "training step"}


@pytest.mark.parametrize("mode", WORDS)
def test_a_case_that_cannot_fit_is_refused_before_it_is_built(tmp_path, never_built, mode):
    config = workload_config("smoke", 8, vocab_size=32, device="cpu", mode=mode, num_layers=10**9)
    with pytest.raises(MemoryError, match=f"A {WORDS[mode]} needs at least"):
        measure(config, tmp_path)


def test_training_saves_itself_when_its_terminal_is_closed(tmp_path, config):
    """The kernel sends SIGHUP, and what is printed from then on fails."""
    steps = {"steps": 10**9, "eval_interval": 10**9, "checkpoint_interval": 10**9, "log_interval": 50}
    write_json(tmp_path / "config.json", to_dict(replace(config, model__num_layers=1, **steps)))
    run, (master, terminal) = RunFolder(tmp_path / "run"), os.openpty()
    words = [sys.executable, "-m", "lmcore", "train", "--config", tmp_path / "config.json", "--run", run.path]
    process = subprocess.Popen(
        list(map(str, words)), stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    try:
        os.close(terminal)
        os.set_blocking(master, False)

        def trains() -> bool:
            with suppress(OSError):
                os.read(master, 1 << 16)  # a full terminal would hold it up
            return run.metrics_file.exists() and len(run.metrics_file.read_text().splitlines()) > 2

        wait_for(process, trains)
        os.close(master)
        assert process.wait(PATIENCE) == EXIT_INTERRUPTED
        assert run.status()["state"] == "interrupted"
        assert [path.name for path in run.checkpoints()] == [f"step_{run.status()['step']:08}.pt"]
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [("tokenizer", TERM, 143), ("tokenizer", INT, 130), ("tokenizer", KILL, -KILL), ("data", HUP, 129)],
)
def test_no_worker_goes_on_without_its_command(start, tmp_path, command, number, code):
    text = tmp_path / "text.txt"
    with open(text, "w") as file:  # many words, none of which occurs twice: minutes of work
        file.writelines(f"a{i:x} b{i * i:x}\n" for i in range(600_000))
    words = {"tokenizer": ["tokenizer", "train", text], "data": ["data", "prepare", text, "--tokenizer", "bpe:9000"]}
    process = start("-c", WITH_WORKERS, *words[command], "--out", tmp_path / "out")
    family: dict[int, psutil.Process] = {}

    def counts() -> bool:
        for worker in psutil.Process(process.pid).children():
            family[worker.pid] = worker
        return sum(sum(worker.cpu_times()[:2]) > 0.1 for worker in family.values() if worker.is_running()) >= 2

    wait_for(process, counts)
    process.send_signal(number)
    assert process.wait(PATIENCE) == code
    _, alive = psutil.wait_procs(family.values(), timeout=AT_ONCE)
    assert alive == []
    if number != KILL:
        said = process.stderr.read()
        assert said.endswith("lmcore: stopped.\n")
        assert "Traceback" not in said


@pytest.mark.parametrize(("number", "code"), [(TERM, 143), (INT, 130), (KILL, -KILL)])
def test_no_case_goes_on_without_its_command(start, tmp_path, number, code):
    sizes = (f"--model.{key.replace('_', '-')}={value}" for key, value in SIZES.items())
    options = ("--model.num-layers=100000", *sizes, "--device", "cpu", "--out", tmp_path)
    process = start("-m", "lmcore", "benchmark", *options)
    family: dict[int, psutil.Process] = {}

    def is_building() -> bool:
        begun = (tmp_path / "cases" / ".lock").exists() and not any((tmp_path / "cases").glob("*.json"))
        for server in psutil.Process(process.pid).children():
            family[server.pid] = server
            for cell in server.children():
                family[cell.pid] = cell
                with suppress(psutil.NoSuchProcess):
                    if begun and sum(cell.cpu_times()[:2]) > 1:
                        return True
        return False

    wait_for(process, is_building)
    process.send_signal(number)
    if number != KILL:
        assert process.stderr.readline().startswith(f"lmcore: {number.name}: stopping where nothing is lost")
    assert process.wait(AT_ONCE) == code
    _, alive = psutil.wait_procs(family.values(), timeout=AT_ONCE)
    assert alive == []
    assert not list((tmp_path / "cases").glob("*.json"))


def test_a_benchmark_of_a_model_that_cannot_fit_answers(tmp_path, capsys):
    options = ["--model.num-layers", "1000000000", "--device", "cpu", "--out", str(tmp_path)]
    assert cli.main(["benchmark", *options]) == 0
    records = [json.loads(path.read_text()) for path in (tmp_path / "cases").glob("*.json")]
    assert [record["outcome"] for record in records] == ["out of memory"] * 2
    said = capsys.readouterr().out
    assert all(record["reason"].rstrip(".") in said for record in records)
