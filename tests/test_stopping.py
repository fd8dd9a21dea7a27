"""Stop signals: acknowledged even within a long call, obeyed at once while nothing is lost, enforced by a second."""

import fcntl
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest

from lmcore import cli, stopping
from lmcore.accounting import least_step_bytes, num_parameters
from lmcore.config import TrainConfig, model_config, replace, to_dict
from lmcore.errors import EXIT_INTERRUPTED, EXIT_OUT_OF_MEMORY
from lmcore.files import write_json
from lmcore.profiling.cases import workload_config
from lmcore.profiling.timing import measure
from lmcore.run import RunFolder
from lmcore.stopping import SAME_SIGNAL, StopEvent, Stopped, stop_signals, stoppable

PATIENCE = 60
"""Seconds after which a condition that has not come true fails the test."""
AT_ONCE = 40
"""Seconds within which a stopped command ends on a busy machine; what it is stopped in takes minutes."""

TERM, INT, HUP, USR1, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGKILL

LONG_CALL = """
import hashlib
from lmcore.stopping import stoppable
with stoppable():
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


@pytest.fixture
def start():
    """Starts Python with these words; the sessions of such processes are killed after the test."""
    processes: list[subprocess.Popen] = []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}

    def start(*words: object, **options) -> subprocess.Popen:
        processes.append(subprocess.Popen([sys.executable, *map(str, words)], **pipes | options))
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


@pytest.mark.fault("command stopped, hung up or killed", "survived")
def test_within_a_long_call_of_c(start):
    first, second = HUP, INT
    process = start("-c", LONG_CALL)
    assert process.stdout.readline() == "ready\n"
    before = sum(psutil.Process(process.pid).cpu_times()[:2])
    wait_for(process, lambda: sum(psutil.Process(process.pid).cpu_times()[:2]) > before + 0.2)  # within the call
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
        ([(1.0, TERM), (1.4, INT)], None),  # one signal by two ways
        ([(1.0, TERM), (1.6, TERM)], 143),
        ([(1.0, TERM), (1.6, HUP)], 129),
        ([(1.0, USR1), (9.0, TERM), (9.4, TERM)], None),  # the warning of a scheduler is not the first
        ([(1.0, USR1), (9.0, TERM), (9.6, INT)], 130),
        ([(1.0, TERM), (9.0, USR1)], None),
    ],
)
def test_which_second_signal_ends_the_process(monkeypatch, capsys, heard, code):
    codes, before = [], []

    def leave(code):
        codes.append(code)
        raise Ended

    monkeypatch.setattr(stopping.os, "_exit", leave)
    event = StopEvent()
    event.exits = True
    event.before_exit = lambda: before.append("called")
    for now, number in heard:
        monkeypatch.setattr(stopping.time, "monotonic", lambda now=now: now)
        with suppress(Ended):
            event.hear(number)
    assert codes == ([code] if code else [])
    assert before == ["called"] * len(codes)
    assert capsys.readouterr().err.count("stopping where nothing is lost") == 1


def handlers() -> list:
    return [signal.getsignal(number) for number in (TERM, INT, HUP, USR1)]


def test_a_nested_block_shares_the_event_and_all_is_put_back(capsys):
    before, threads = handlers(), threading.active_count()
    read, write = os.pipe()  # somebody else's wakeup descriptor
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    with stop_signals() as outer:
        outside = handlers()
        with stop_signals() as inner:
            assert inner is outer
            os.kill(os.getpid(), INT)
            while not capsys.readouterr().err.startswith("lmcore: SIGINT: stopping where nothing is lost"):
                time.sleep(0.01)
        assert outer.first == INT
        assert handlers() == outside
        with pytest.raises(Stopped) as stopped, outer.raises():
            pytest.fail("the block of a signal that has come is not begun")
        assert stopped.value.number == INT
    assert handlers() == before
    assert signal.set_wakeup_fd(-1) == write
    os.close(read)
    os.close(write)
    assert threading.active_count() == threads
    with stop_signals() as again:
        assert not again.is_set()


@pytest.mark.parametrize("number", [TERM, INT, HUP, USR1])
def test_a_stoppable_block_ends_at_once(number):
    """A block inside it obeys the event itself, and what that returns counts; after it all is as before."""
    with stoppable():
        with stop_signals() as stop:
            signal.raise_signal(number)
            assert stop.is_set()
        obeyed = True
    assert obeyed

    def interrupted() -> None:
        with stoppable():
            with stop_signals():
                pass
            signal.raise_signal(number)

    with pytest.raises(Stopped) as stopped:
        interrupted()
    assert stopped.value.number == number


@pytest.mark.parametrize("number", [HUP, TERM])
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


def test_another_thread_gets_the_event_that_is_there():
    def enter() -> StopEvent:
        with stop_signals() as stop:
            return stop

    def entered() -> StopEvent:
        with ThreadPoolExecutor() as pool:
            return pool.submit(enter).result()

    before = handlers()
    assert not entered().is_set()
    assert handlers() == before
    with stop_signals() as stop:
        assert entered() is stop


def test_a_signal_is_acknowledged_although_the_block_ends_before_the_thread_has_run(capsys):
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # the thread runs when this one waits for it
    try:
        with stop_signals() as stop:
            os.kill(os.getpid(), USR1)
    finally:
        sys.setswitchinterval(interval)
    assert stop.first == USR1
    assert capsys.readouterr().err.startswith("lmcore: SIGUSR1: stopping where nothing is lost")


SIZES = {"d_model": 8, "num_heads": 2, "d_ff": 8, "context_length": 8}


@pytest.fixture
def config(tiny_run) -> TrainConfig:
    """A model whose building takes minutes."""
    model = model_config("smoke", num_layers=100_000, vocab_size=300, **SIZES)
    return replace(tiny_run, model=model, batch_size=1, steps=2)


@pytest.mark.fault("command stopped, hung up or killed", "survived")
def test_training_is_stopped_while_it_builds_the_model(start, tmp_path, config):
    write_json(tmp_path / "config.json", to_dict(config))
    run = RunFolder(tmp_path / "run")
    for count, number in enumerate((USR1, INT), 1):  # the same command starts again and builds again
        process = start("-m", "lmcore", "train", "--config", tmp_path / "config.json", "--run", run.path)
        wait_for(process, lambda count=count: len(run.starts()) == count)
        time.sleep(0.2)
        process.send_signal(number)
        assert process.stderr.readline().startswith(f"lmcore: {number.name}: stopping where nothing is lost")
        assert process.wait(AT_ONCE) == EXIT_INTERRUPTED
        assert "stopped; the same command resumes" in process.stdout.read()


def test_what_cannot_fit_is_refused_before_it_is_built(tmp_path, config, monkeypatch, capsys):
    def built(*_, **__):
        raise AssertionError("the model is built")

    for module in ("lmcore.model", "lmcore.profiling.workload"):
        monkeypatch.setattr(f"{module}.TransformerLM", built)
    write_json(tmp_path / "config.json", to_dict(config))
    options = ["--config", str(tmp_path / "config.json"), "--model.num-layers", "1000000000"]
    assert cli.main(["train", "--run", str(tmp_path / "run"), *options]) == EXIT_OUT_OF_MEMORY
    reason = RunFolder(tmp_path / "run").status()["reason"]
    assert reason in capsys.readouterr().out
    large = replace(config, model__num_layers=10**9)
    assert reason.startswith(f"Training needs at least {least_step_bytes(large) / 1e9:,.1f} GB for ")
    assert f"GB for {num_parameters(large.model):,} parameters and 1 sequences a batch; CPU has" in reason
    for mode, words in (("forward", "forward pass"), ("train_step", "training step")):
        case = workload_config("smoke", 8, vocab_size=32, device="cpu", mode=mode, num_layers=10**9)
        with pytest.raises(MemoryError, match=f"A {words} needs at least"):
            measure(case, tmp_path)


@pytest.mark.fault("command stopped, hung up or killed", "survived")
def test_training_saves_itself_when_its_terminal_is_closed(start, tmp_path, config):
    """The kernel sends SIGHUP, and what is printed from then on fails."""
    steps = {"steps": 10**9, "eval_interval": 10**9, "checkpoint_interval": 10**9, "log_interval": 50}
    write_json(tmp_path / "config.json", to_dict(replace(config, model__num_layers=1, **steps)))
    run, (master, terminal) = RunFolder(tmp_path / "run"), os.openpty()
    process = start(
        "-m", "lmcore", "train", "--config", tmp_path / "config.json", "--run", run.path, stdin=terminal,
        stdout=terminal, stderr=terminal, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
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


def family_of(process: subprocess.Popen, busy: int, seconds: float) -> list[psutil.Process]:
    """Waits until so many descendants of a process have used so much time of a processor; all of them, once seen."""
    family: dict[int, psutil.Process] = {}

    def works() -> bool:
        family.update({child.pid: child for child in psutil.Process(process.pid).children(recursive=True)})
        times = []
        for child in family.values():
            with suppress(psutil.NoSuchProcess):
                times.append(sum(child.cpu_times()[:2]))
        return sum(time > seconds for time in times) >= busy

    wait_for(process, works)
    return list(family.values())


@pytest.mark.fault("command stopped, hung up or killed", "survived")
@pytest.mark.parametrize(
    ("command", "number", "code"),
    [(command, *end) for command in ("tokenizer", "data") for end in ((TERM, 143), (KILL, -KILL))]
    + [("tokenizer", INT, 130), ("data", HUP, 129)],
)
def test_no_worker_goes_on_without_its_command(start, tmp_path, command, number, code):
    text = tmp_path / "text.txt"
    with open(text, "w") as file:  # many words, none of which occurs twice: minutes of work
        file.writelines(f"a{i:x} b{i * i:x}\n" for i in range(600_000))
    words = {"tokenizer": ["tokenizer", "train", text], "data": ["data", "prepare", text, "--tokenizer", "bpe:9000"]}
    process = start("-c", WITH_WORKERS, *words[command], "--out", tmp_path / "out")
    family = family_of(process, 2, 0.1)
    process.send_signal(number)
    assert process.wait(PATIENCE) == code
    assert psutil.wait_procs(family, timeout=AT_ONCE)[1] == []
    if number != KILL:
        said = process.stderr.read()
        assert said.endswith("lmcore: stopped.\n")
        assert "Traceback" not in said


@pytest.mark.fault("command stopped, hung up or killed", "survived")
@pytest.mark.parametrize(("number", "code"), [(TERM, 143), (KILL, -KILL)])
def test_no_case_goes_on_without_its_command(start, tmp_path, number, code):
    sizes = (f"--model.{key.replace('_', '-')}={value}" for key, value in SIZES.items())
    options = ("--model.num-layers=100000", *sizes, "--device", "cpu", "--out", tmp_path)
    process = start("-m", "lmcore", "benchmark", *options)
    wait_for(process, (tmp_path / "cases" / ".lock").exists)
    family = family_of(process, 1, 4.0)  # beyond its imports
    process.send_signal(number)
    assert process.wait(AT_ONCE) == code
    assert psutil.wait_procs(family, timeout=AT_ONCE)[1] == []
    assert not list((tmp_path / "cases").glob("*.json"))
