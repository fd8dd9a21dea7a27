"""Components timed alone: FLOPs against accounting, bytes by hand, the roofline, the ceilings' order of magnitude."""

import pytest
import torch

from lmcore import accounting
from lmcore.config import ModelConfig, to_dict
from lmcore.profiling import peak_rates, timing
from lmcore.profiling.cases import WorkloadConfig
from lmcore.profiling.components import components_table, measure_components

MODEL = ModelConfig(vocab_size=96, context_length=16, d_model=32, num_layers=3, num_heads=2, d_ff=64)
CONFIG = WorkloadConfig(model=MODEL, batch_size=2, device="cpu", size="own")


@pytest.fixture(scope="module", autouse=True)
def small_ceilings():
    """Small matrices and copies: these tests are about numbers of operations, not about speed."""
    patch = pytest.MonkeyPatch()
    patch.setattr(peak_rates, "MATMUL_SIZE", {"cpu": 64, "cuda": 4096})
    patch.setattr(peak_rates, "COPY_BYTES", {"cpu": 1 << 16, "cuda": 1 << 28})
    patch.setattr(timing, "BUDGET", {"cpu": 0.001, "cuda": 0.05})
    yield
    patch.undo()


@pytest.fixture(scope="module")
def result(tmp_path_factory, small_ceilings):
    return measure_components(CONFIG, tmp_path_factory.mktemp("cell"))


def rows_of(result, direction="forward"):
    return {row["component"]: row for row in result["components"] if row["direction"] == direction}


def test_matrix_products_are_those_of_the_accounting(result):
    rows, both = rows_of(result), rows_of(result, "forward + backward")
    products = [row for row in rows.values() if row["kind"] == "matmul"]
    assert sum(row["flops"] * row["count"] for row in products) == accounting.forward_flops(MODEL, 2)
    attention = ("Q, K, V projections", "scores", "weighted sum", "output projection")
    assert rows["attention"]["flops"] == sum(rows[name]["flops"] for name in attention)
    assert rows["feed-forward network"]["flops"] == rows["W1 and W3"]["flops"] + rows["W2"]["flops"]
    assert {name: row["flops"] for name, row in both.items()} == {
        name: 3 * rows[name]["flops"] for name in ("attention", "feed-forward network")
    }


STREAM, HIDDEN, SCORES, BLOCK = 2 * 16 * 32, 2 * 16 * 64, 2 * 2 * 16 * 16, 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32
"""Elements of the residual stream, of the hidden layer, of the scores, and weights of a block."""

BYTES = {
    ("RMSNorm", "forward"): 4 * (2 * STREAM + 32),
    ("residual sum", "forward"): 4 * 3 * STREAM,
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
COUNTS = {"RMSNorm": 7, "residual sum": 6, "output layer": 1}


def test_bytes_elementwise_flops_and_counts_by_hand(result):
    rows = {(row["component"], row["direction"]): row for row in result["components"]}
    assert {key: rows[key]["bytes"] for key in BYTES} == BYTES
    once = {name: row for (name, direction), row in rows.items() if direction != "forward + backward"}
    assert {name: once[name]["flops"] for name in FLOPS} == FLOPS
    assert {name: once[name]["count"] for name in COUNTS} == COUNTS
    assert all(row["seconds"] > 0 and row["issue_seconds"] is None for row in rows.values())


def test_half_precision_halves_activations_but_not_weights(tmp_path):
    config = WorkloadConfig(model=MODEL, batch_size=2, device="cpu", precision="bf16")
    rows = rows_of(measure_components(config, tmp_path))
    assert rows["Q, K, V projections"]["bytes"] == 4 * STREAM + 4 * 3 * 32 * 32 + 2 * 3 * STREAM
    assert rows["scores"]["bytes"] == 2 * (2 * STREAM + SCORES)


def test_without_norm_rope_and_gate(tmp_path):
    model = ModelConfig(**to_dict(MODEL) | {"norm": "none", "position": "none", "ffn": "silu", "attention": "sdpa"})
    rows = rows_of(measure_components(WorkloadConfig(model=model, batch_size=2, device="cpu"), tmp_path))
    assert not {"RMSNorm", "RoPE", "SiLU and gate", "W2"} & set(rows)
    assert {"attention", "feed-forward network", "scores"} <= set(rows)


def test_roofline_of_a_table():
    row = {"component": "x", "part_of": "block", "kind": "matmul", "count": 1, "direction": "forward"}
    measured = [
        row | {"flops": 100, "bytes": 100, "seconds": 2.0, "issue_seconds": None},
        row | {"flops": 10_000, "bytes": 100, "seconds": 20.0, "issue_seconds": 1.0},
    ]
    roofs = {"peak_flops_per_second": 1000.0, "peak_bytes_per_second": 100.0}
    result = {"device": "CPU", "ceilings": roofs, "components": measured}
    lost = {"cell": "b", "config": to_dict(CONFIG), "result": None}
    table = components_table({"a": {"cell": "a", "config": to_dict(CONFIG), "result": result}, "b": lost})
    assert table["intensity"].tolist() == [1.0, 100.0]
    assert table["bound"].tolist() == ["memory", "compute"]
    assert table["attainable"].tolist() == [100.0, 1000.0]
    assert table["roofline_share"].tolist() == [0.5, 0.5]
    assert list(components_table({"b": lost}).columns) == list(table.columns)


def test_ceilings_are_rates():
    found = peak_rates.peak_rates(torch.device("cpu"), "fp32")
    assert 1e6 < found["peak_flops_per_second"] < 1e15
    assert 1e6 < found["peak_bytes_per_second"] < 1e14


def test_the_timer_takes_the_median(monkeypatch):
    """By a clock of the test's own: on a busy machine a pause takes longer than it should."""
    moments = [0.0]
    monkeypatch.setattr(timing, "default_timer", lambda: moments[-1])
    pauses = iter([0.0, 0.0, 0.02, 0.03, 5.0])  # one to warm up, one to see how long the host needs
    timer = timing.Timer(torch.device("cpu"))
    seconds, issue = timer(lambda: moments.append(moments[-1] + next(pauses)))
    assert seconds == pytest.approx(0.03)
    assert issue is None
    assert not list(pauses)


@pytest.mark.gpu
def test_the_timer_sees_the_gpu_alone():
    """A hundred tiny kernels take the host far longer to launch than the GPU to run."""
    device = torch.device("cuda")
    x = torch.zeros(16, device=device)
    seconds, issue = timing.Timer(device)(lambda: [x.add_(1) for _ in range(100)])
    assert seconds < issue
    assert measure_components(WorkloadConfig(model=MODEL, device="cuda"), None)["components"]
