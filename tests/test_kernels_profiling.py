"""What notebook 07 counts and measures: bytes that move, agreement with the definitions, and its tasks on a CPU."""

import pytest
import torch
from kernel_reports import record

from lmcore.config import TrainConfig, model_config, to_dict
from lmcore.profiling.kernels import agreement, elementwise, interpreted, loss, optimizer, steps, traffic
from lmcore.profiling.kernels import attention as attention_cells
from lmcore.profiling.kernels.measuring import extra_bytes, measure_ceilings
from lmcore.profiling.workload import workload_config
from lmcore.workbook.report.kernels import attention
from lmcore.workbook.report.kernels import steps as step_answers

CPU = torch.device("cpu")


def test_operations_are_counted_once_for_each_tensor():
    a, b = traffic.meta(10, 10), traffic.meta(10, 10, dtype=torch.bfloat16)
    moved = traffic.traffic_of(lambda: (a + a, a.t(), b.float(), a.mul_(2), torch.empty_like(a), a.zero_(), a.copy_(b)))
    assert [(one.operation, one.read, one.written) for one in moved.moved] == [
        ("add", 400, 400),
        ("_to_copy", 200, 400),
        ("mul_", 400, 400),
        ("zero_", 0, 400),
        ("copy_", 200, 400),
    ]
    assert moved.total == 400 + 400 + 200 + 400 + 400 + 400 + 400 + 200 + 400
    assert traffic.bytes_of(traffic.meta(1, 10).expand(50, 10)) == 40


def test_the_plain_update_moves_what_the_handouts_algorithm_says():
    table = traffic.traffic_table(optimizer.plain_update_traffic()).set_index("operation")
    each = (table[["read", "written"]] / optimizer.COUNTED).round(3)
    assert each.loc["addcmul_"].tolist() == [8, 4]
    assert each.loc["linalg_vector_norm"].tolist() == [4, 0]
    assert optimizer.bytes_each(optimizer.plain_update_traffic()) == 92
    assert list(traffic.lines(table.reset_index(), optimizer.COUNTED, "parameter"))[-1] == (
        "together 92.00 bytes per parameter"
    )


def test_eager_attention_moves_the_score_matrix_many_times():
    model = model_config("small", context_length=512, vocab_size=10)
    scores = 2 * model.num_heads * 512**2
    forward = attention_cells.eager_traffic(model, 2, torch.float32).total
    both = attention_cells.eager_traffic(model, 2, torch.float32, backward=True).total
    assert both > 2 * forward > 2 * 40 * scores
    assert attention_cells.least_bytes(model, 2, 4) == 4 * 2 * 512 * 768 * 4
    roofs = {"peak_flops_per_second": 3e13, "peak_bytes_per_second": 1e12}
    text = attention.eager_answer(model, 2, "fp32", roofs)
    assert f"{forward / scores:.3g} bytes for each score" in text
    assert "eager attention is bound by memory, the other bound by arithmetic" in text
    slow = attention.eager_answer(model, 2, "fp32", roofs | {"peak_flops_per_second": 1e11})
    assert "ridge is at 0.100 FLOPs per byte" in slow
    assert "eager attention is bound by arithmetic" in slow


def test_the_memory_of_a_call_is_counted():
    x = torch.zeros(1000, 1000)
    assert 4_000_000 <= extra_bytes(lambda: x + 1, CPU) < 4_000_100  # and scalars
    assert extra_bytes(lambda: ((x + 1) + (x + 2)).sum(), CPU) >= 8_000_000
    assert extra_bytes(lambda: x.t(), CPU) == 0


@pytest.mark.parametrize("kind", ["plain", "sdpa", "flash"])
def test_attention_is_measured(kind):
    (cell,) = attention_cells.attention_cells("smoke", [32], [kind], batch_size=1).values()
    result = attention_cells.measure_attention(cell, None)
    assert result["forward"]["seconds"] > 0
    assert result["both"]["extra_bytes"] > 3 * 32 * 64 * 4  # three gradients are part of it


def test_the_loss_is_measured_with_and_without_logits():
    results = {
        loss.variant_of(cell): loss.measure_loss(cell, None)
        for cell in loss.variant_cells("smoke", 64, False, batch_size=4, vocab_size=1024).values()
    }
    assert results["fused"]["extra_bytes"] < results["plain"]["extra_bytes"] / 2
    assert results["fused"]["chunk_rows"] == 32


def test_the_optimizer_is_measured():
    config = workload_config("smoke", vocab_size=16)
    table = optimizer.optimizer_table({"a": record("a", config, optimizer.measure_optimizer(config, None))})
    assert table["contestant"].str.startswith("ours").sum() == 1
    assert (table.loc[table["outcome"] == "complete", "bytes_per_second"] > 0).all()


@pytest.mark.parametrize("operation", range(3))
def test_both_ways_of_an_elementwise_operation_do_the_same(operation):
    one = list(elementwise.operations(workload_config("smoke", 16, batch_size=2), CPU))[operation]
    theirs = one.plain(one.definition)[0]
    if operation == 1:  # in place, there and back
        assert one.ours().shape[1] == theirs.shape[1] * 3 // 2
        return
    ours = one.ours()
    ours = ours[0] if isinstance(ours, tuple) else ours
    torch.testing.assert_close(ours, theirs)


def test_the_explicit_step_is_measured_without_a_graph():
    cell = steps.rung_cells("smoke", 16, batch_size=2, vocab_size=32, warmup_steps=1, steps=2)["fused"]
    assert steps.task_of("fused") is steps.measure_ungraphed
    samples = steps.measure_ungraphed(cell, None)["samples"]
    assert [sample["warmup"] for sample in samples] == [True, False, False]
    assert all(sample["wall"] > 0 for sample in samples)


def test_the_triton_code_is_interpreted():
    pytest.importorskip("triton")
    result = interpreted.measure_interpreted(workload_config("smoke", device="cpu"), None)
    assert [row["holds"] for row in result["rows"]] == [True] * 4
    assert result["by"] == "Triton kernels, interpreted"


def test_without_triton_nothing_is_interpreted(monkeypatch):
    monkeypatch.setattr(interpreted, "has_triton", lambda: False)
    result = interpreted.measure_interpreted(workload_config("smoke", device="cpu"), None)
    assert (result["rows"], "not installed" in result["reason"]) == ([], True)


def test_shapes_side_by_side_are_those_one_after_the_other():
    shapes, keys = [(1, 2, 5, 16), (2, 1, 9, 16)], ("kernel", "shape", "causal", "precision", "holds")
    rows = agreement.side_by_side(CPU, shapes, ["fp32"])
    expected = agreement.attention_rows(agreement.flash_attention, CPU, shapes, ["fp32"])
    assert [[row[key] for key in keys] for row in rows] == [[row[key] for key in keys] for row in expected]
    with pytest.raises(RuntimeError, match="fp99"):
        agreement.side_by_side(CPU, shapes[:1], ["fp99"])


def test_the_other_kernels_agree():
    rows = list(agreement.other_rows(CPU, ["fp32", "bf16"]))
    assert len(rows) == 6
    assert all(row["holds"] for row in rows), [row for row in rows if not row["holds"]]


def test_the_two_runs_differ_in_nothing_but_how_they_compute():
    runs = step_answers.curve_runs(TrainConfig(compile=True))
    plain, fast = (to_dict(runs[name]) for name in ("plain", "fast"))
    assert (plain["ops"], fast["ops"]) == ("plain", "fused")
    assert (plain["model"].pop("attention"), fast["model"].pop("attention")) == ("plain", "flash")
    plain.pop("ops"), fast.pop("ops")
    assert plain == fast


def test_ceilings_are_a_task():
    assert set(measure_ceilings(workload_config("smoke"), None)) == {"peak_flops_per_second", "peak_bytes_per_second"}
