"""Fixtures shared by all tests."""

import gc
import os
import signal
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, also in the processes that tests start
os.environ["MKL_NUM_THREADS"] = "1"
if hasattr(signal, "SIGHUP"):  # ignored under nohup, also by the processes that tests start and hang up
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: its kernels then run on the CPU

settings.register_profile("lmcore", deadline=None)  # how long an example takes depends on what else the machine does
settings.load_profile("lmcore")

LONG_SUITES = ("slurm", "faults")
"""Markers of the suites that take minutes: they run only where the marker is asked for (`pytest -m slurm`)."""

MOST_WORKERS = 8
"""Each holds PyTorch and its own fixtures."""


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist nobody asks
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: a worker for each core, each with one thread; one process alone where tests share and time a GPU.

    Models as small as these are slower with two threads, and many times so beside a process that keeps a core busy.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 0 if torch.cuda.is_available() else min(cores, MOST_WORKERS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the long suites that `-m` does not name; skips what needs a GPU where there is none."""
    unasked = [name for name in LONG_SUITES if name not in config.getoption("markexpr")]
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in unasked)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


OUTCOMES = pytest.StashKey[list[str]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    """A test marked `fault(kind, outcome)` is counted by tests/faults: as lost if it, or what it left, is wrong."""
    report = yield
    outcomes = item.stash.setdefault(OUTCOMES, [])
    outcomes.append(report.outcome)
    mark = item.get_closest_marker("fault")
    if mark and report.when == "teardown" and "skipped" not in outcomes:
        kind, outcome = mark.args
        report.user_properties.append(("fault", [kind, "lost" if "failed" in outcomes else outcome]))
    return report


@pytest.fixture(autouse=True)
def own_gpu_memory(request):
    """A test on a GPU begins without the tensors of those before it: what is in a cycle waits for the collector."""
    if request.node.get_closest_marker("gpu"):
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels are tested: the GPU, or the CPU with Triton's interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["plain", "triton"])
def kernels(request, monkeypatch) -> str:
    """Which code of `lmcore.fast.kernels` runs; Triton's in the interpreter where there is no GPU."""
    if request.param == "triton":
        pytest.importorskip("triton")
    monkeypatch.setattr("lmcore.fast.kernels.dispatch.runs_triton", lambda device: request.param == "triton")
    return request.param


@pytest.fixture
def deterministic(monkeypatch):
    """PyTorch's switch: what has no fixed order of its sums is an error, or another kernel."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real corpora and tokenizer files (tinystories/, gpt2/, …); the test is skipped where there is none."""
    folder = Path(os.environ.get("LMCORE_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("no real corpora here: set LMCORE_TEST_DATA to a folder with tinystories/ and gpt2/")
    return folder


@pytest.fixture(scope="session")
def embedded_data(tmp_path_factory) -> Path:
    """A small prepared corpus of the embedded stories with a vocabulary of at most 300."""
    from lmcore.data import CorpusConfig, prepare

    folder = tmp_path_factory.mktemp("embedded")
    return prepare("embedded", "bpe:300", folder, CorpusConfig(num_documents=200), progress=False).folder


@pytest.fixture(scope="session")
def tiny_run(embedded_data):
    """The settings of a training run of seconds on a CPU, on that corpus."""
    from lmcore.config import OptimizerConfig, TrainConfig, model_config

    return TrainConfig(
        model=model_config("smoke", vocab_size=300, context_length=16, d_model=16, num_heads=2, d_ff=24),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0), data=str(embedded_data), batch_size=4, steps=6,
        log_interval=1, eval_interval=6, checkpoint_interval=6, device="cpu",
    )  # fmt: skip
