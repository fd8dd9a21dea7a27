"""Components timed alone: FLOPs against accounting, bytes by hand, the roofline, the peak rates' order of magnitude."""

import pytest
import torch

from lmcore import accounting
from lmcore.config import ModelConfig, replace, to_dict
from lmcore.profiling import peak_rates, timing
from lmcore.profiling.cases import WorkloadConfig
from lmcore.profiling.components import components_table, measure_components

MODEL = ModelConfig(vocab_size=96, context_length=16, d_model=32, num_layers=3, num_heads=2, d_ff=64)
CONFIG = WorkloadConfig(model=MODEL, batch_size=2, device="cpu", size="own")


@pytest.fixture(scope="module", autouse=True)
def small_peak_rates():
    """Small matrices and copies: these tests are about numbers of operations, not about speed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peak_rates, "MATMUL_SIZE", {"cpu": 64, "cuda": 4096})
        patch.setattr(peak_rates, "COPY_BYTES", {"cpu": 1 << 16, "cuda": 1 << 28})
        patch.setattr(timing, "BUDGET", {"cpu": 0.001, "cuda": 0.05})
        yield


def measured(**changes):
    """Rows by component and direction, of a small model with these changes."""
    rows = measure_components(replace(CONFIG, **changes), None)["components"]
    return {(row["component"], row["direction"]): row for row in rows}


@pytest.fixture(scope="module")
def rows(small_peak_rates):
    return measured()


def test_matrix_products_are_those_of_the_accounting(rows):
    flops = {name: row["flops"] for (name, direction), row in rows.items() if direction == "forward"}
    both = {name: row["flops"] for (name, direction), row in rows.items() if direction == "forward + backward"}
    products = [row for row in rows.values() if row["kind"] == "matmul"]
    assert sum(row["flops"] * row["count"] for row in products) == accounting.forward_flops(MODEL, 2)
    attention = ("Q, K, V projections", "scores", "weighted sum", "output projection")
    assert flops["attention"] == sum(flops[name] for name in attention)
    assert flops["feed-forward network"] == flops["W1 and W3"] + flops["W2"]
    assert both == {name: 3 * flops[name] for name in ("attention", "feed-forward network")}


STREAM, HIDDEN, SCORES, BLOCK = 2 * 16 * 32, 2 * 16 * 64, 2 * 2 * 16 * 16, 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32
"""Elements of the residual stream, of the hidden layer, of the scores, and weights of a block."""

BYTES = {
    ("RMSNorm", "forward"): 4 * (2 * STREAM + 32),
    ("residual addition", "forward"): 4 * 3 * STREAM,
    ("Q, K, V projections", "forward"): 4 * (STREAM + 3 * 32 * 32 + 3 * STREAM),
    ("scores", "forward"): 4 * (2 * STREAM + SCORES),
    ("scale, mask, softmax", "forward"): 4 * 2 * SCORES + 16 * 16,
    ("SiLU and gate", "forward"): 4 * 3 * HIDDEN,
    ("attention", "forward"): 4 * (2 * STREAM + 4 * 32 * 32),
    ("attention", "forward + backward"): 4 * (3 * (STREAM + 4 * 32 * 32) + 2 * STREAM),
    ("cross-entropy", "forward"): 4 * 2 * 16 * 96 + 8 * 2 * 16 + 4,
    ("AdamW", "update"): 4 * 7 * BLOCK,
}
FLOPS = {"RMSNorm": 4 * STREAM, "RoPE": 3 * 2 * STREAM, "scale, mask, softmax": 7 * SCORES, "AdamW": 14 * BLOCK}
COUNTS = {"RMSNorm": 7, "residual addition": 6, "LM head": 1}


def test_bytes_elementwise_flops_and_counts_by_hand(rows):
    assert {key: rows[key]["bytes"] for key in BYTES} == BYTES
    once = {name: row for (name, direction), row in rows.items() if direction != "forward + backward"}
    assert {name: once[name]["flops"] for name in FLOPS} == FLOPS
    assert {name: once[name]["count"] for name in COUNTS} == COUNTS
    assert all(row["seconds"] > 0 for row in rows.values())


def test_half_precision_halves_activations_and_what_is_not_there_is_not_timed():
    switches = {"model__norm": "none", "model__position": "none", "model__ffn": "silu", "model__attention": "sdpa"}
    rows = measured(precision="bf16", **switches)
    assert rows["Q, K, V projections", "forward"]["bytes"] == 4 * STREAM + 4 * 3 * 32 * 32 + 2 * 3 * STREAM
    assert rows["scores", "forward"]["bytes"] == 2 * (2 * STREAM + SCORES)
    assert not {"RMSNorm", "RoPE", "SiLU and gate", "W2"} & {name for name, _ in rows}


def test_roofline_of_a_table():
    row = {"component": "x", "part_of": "block", "kind": "matmul", "count": 1, "direction": "forward", "bytes": 100}
    rows = row | {"flops": 100, "seconds": 2.0}, row | {"flops": 10_000, "seconds": 20.0}
    rates = {"peak_flops_per_second": 1000.0, "peak_bytes_per_second": 100.0}
    lost = {"case": "b", "config": to_dict(CONFIG), "result": None}
    found = lost | {"case": "a", "result": {"device": "CPU", "peak_rates": rates, "components": rows}}
    table = components_table({"a": found, "b": lost})
    columns = ["intensity", "bound", "attainable", "roofline_share"]
    assert table[columns].values.tolist() == [[1.0, "memory", 100.0, 0.5], [100.0, "compute", 1000.0, 0.5]]


def test_the_timer_takes_the_median(monkeypatch):
    """By a clock of the test's own: on a busy machine a pause takes longer than it should."""
    moments, pauses = [0.0], iter([0.0, 0.0, 0.02, 0.03, 5.0])  # one to warm up, one to see how long the host needs
    monkeypatch.setattr(timing, "default_timer", lambda: moments[-1])
    timer = timing.Timer(torch.device("cpu"))
    assert timer(lambda: moments.append(moments[-1] + next(pauses))) == pytest.approx(0.03)
    assert not list(pauses)


@pytest.mark.gpu
def test_the_timer_sees_the_gpu_alone():
    """A hundred tiny kernels take the host far longer to launch than the GPU to run."""
    device = torch.device("cuda")
    x = torch.zeros(16, device=device)
    timer, work = timing.Timer(device), lambda: [x.add_(1) for _ in range(100)]
    assert timer(work) < timer.once(work, 0)[1]
    assert measure_components(WorkloadConfig(model=MODEL, device="cuda"), None)["components"]
