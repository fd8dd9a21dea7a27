"""Tables, figures and answers of notebook 07: other numbers, other sentences; counted bytes; tasks on a CPU."""

import json

import pandas as pd
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

from lmcore.config import TrainConfig, model_config, to_dict
from lmcore.errors import UserError
from lmcore.profiling.kernels import agreement, decoding, elementwise, interpreted, loss, optimizer, steps, traffic
from lmcore.profiling.kernels import attention as attention_cells
from lmcore.profiling.kernels.measuring import extra_bytes, measure_ceilings
from lmcore.profiling.workload import workload_config
from lmcore.report.figures import use_style
from lmcore.report.kernels import attention, figures, parts
from lmcore.report.kernels import steps as step_answers
from lmcore.report.kernels.speed import comparison, read_speed
from lmcore.report.kernels.speed_answers import misses, reference_answer, speed_block, speed_table
from lmcore.report.kernels.speed_figures import speed_figures
from lmcore.report.tables import write_results

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def style():
    use_style()


def drawn(figure):
    """Draws the figure and returns its texts; no annotation is cut off by the figure's edge."""
    FigureCanvasAgg(figure).draw()
    for text in (text for axes in figure.axes for text in axes.texts if text.get_text()):
        box = text.get_window_extent()
        assert box.x0 >= 0, text
        assert box.x1 <= figure.bbox.x1, text
    texts = [text for axes in figure.axes for text in (*axes.texts, *axes.get_xticklabels(), *axes.get_yticklabels())]
    return [text.get_text() for text in texts]


def record(name, config, result, outcome="complete", reason=None):
    return {
        "cell": name, "config": to_dict(config), "outcome": outcome, "reason": reason, "result": result,
        "environment": {"device": "CPU"},
    }  # fmt: skip


def written(table, folder):
    """The table as a notebook has it: from its results file."""
    return write_results(table, folder / "table.json", {})


# bytes


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


# attention


def attention_table(tmp_path, changes=None, **more):
    cells = attention_cells.attention_cells("smoke", [256, 512], batch_size=1, precision="bf16", **more)
    records = {}
    for name, config in cells.items():
        t, kind = config.model.context_length, config.model.attention
        extra = {"plain": 40 * t**2, "sdpa": 500 * t, "flash": 400 * t}[kind]
        one = {"seconds": {"plain": 4e-9, "sdpa": 1e-9, "flash": 2e-9}[kind] * t**2, "extra_bytes": extra}
        both = {"seconds": 3 * one["seconds"], "extra_bytes": 2 * extra}
        records[name] = record(name, config, {"device": "CPU", "forward": one, "both": both})
    for name, change in (changes or {}).items():
        records[name] |= change
    return written(attention_cells.attention_table(records), tmp_path)


def test_attention_by_length(tmp_path):
    table = attention_table(tmp_path)
    text = attention.attention_answer(table)
    assert "From 256 to 512 the definition's memory grows 4.0 times, ours 2.0 times" in text
    assert f"At 512 ours takes **{40 * 512 / 400:.2g} times less**" in text
    assert "ours is 2.00 times as fast as the definition and 0.500 times as fast as PyTorch's SDPA" in text
    assert "the kernels' speed is the GPU's matter" in text
    assert "Not measured" not in text
    assert {"256", "512"} <= set(drawn(figures.attention_figure(table)))


def test_attention_that_did_not_fit(tmp_path):
    lost = {"result": None, "outcome": "out of memory", "reason": "too large"}
    table = attention_table(tmp_path, {"smoke-512-bf16-plain": lost})
    text = attention.attention_answer(table)
    assert "Not measured (out of memory): definition at 512." in text
    assert "| out of memory" in text
    assert "memory grows" not in text
    assert "ours is 0.500 times as fast as PyTorch's SDPA" in text
    figure = figures.attention_figure(table)
    assert any(line.get_marker() == "X" for line in figure.axes[0].lines)
    everything = {name: lost for name in attention_cells.attention_cells("smoke", [256, 512], precision="bf16")}
    text = attention.attention_answer(attention_table(tmp_path, everything))
    assert "nan" not in text
    assert "times as fast" not in text


def test_attention_without_counted_memory(tmp_path):
    table = attention_table(tmp_path).assign(extra_bytes=None)
    assert "memory grows" not in attention.attention_answer(table)
    assert len(figures.attention_figure(table).axes) == 1


def test_flops_are_of_the_pairs_that_a_causal_mask_leaves():
    model = model_config("smoke", context_length=3, vocab_size=10)
    assert attention_cells.causal_flops(model, 2) == 2 * 2 * 2 * model.d_model * 6


@pytest.mark.parametrize("kind", ["plain", "sdpa", "flash"])
def test_attention_is_measured(kind):
    (cell,) = attention_cells.attention_cells("smoke", [32], [kind], batch_size=1).values()
    result = attention_cells.measure_attention(cell, None)
    assert result["forward"]["seconds"] > 0
    assert result["both"]["extra_bytes"] > 3 * 32 * 64 * 4  # three gradients are part of it


# agreement


def agreements(**changes):
    row = {
        "kernel": "attention", "shape": [1, 2, 3, 4], "causal": True, "precision": "fp32", "errors": {"O": 1e-7},
        "error": 1e-7, "worst": "O", "plain_error": 1e-7, "tolerance": 1e-5, "holds": True,
    }  # fmt: skip
    rows = [row, row | {"shape": [5, 6, 7, 8]} | changes]
    return agreement.agreement_table({"a": {"result": {"by": "Triton kernels", "device": "CPU", "rows": rows}}})


def test_agreement_in_words():
    text = attention.agreement_answer(agreements())
    assert "(batch, heads, positions, head size) are 1 × 2 × 3 × 4 and 5 × 6 × 7 × 8." in text
    assert "**All 2 comparisons hold.**" in text
    assert "Nowhere is ours more than twice as far off" in text
    text = attention.agreement_answer(agreements(error=1e-3, holds=False), "no Triton")
    assert "**Only 1 of 2 hold.**" in text
    assert "| **no**" in text
    assert "In 1 comparisons ours is more than twice as far off." in text
    assert "not interpreted here: no Triton." in text


def test_a_wrong_kernel_is_found():
    def wrong(q, k, v, causal):
        return attention_cells.attention_of("plain", q.shape[-2], CPU)(q, k, 1.001 * v)

    rows = agreement.attention_rows(wrong, CPU, [(1, 1, 9, 16)], ["fp32"])
    assert [row["holds"] for row in rows] == [False, False]
    assert agreement.relative_error(torch.zeros(3), torch.ones(3)) == 1
    assert agreement.relative_error(torch.zeros(3), torch.zeros(3)) == 0


def test_the_triton_code_is_interpreted():
    pytest.importorskip("triton")
    result = interpreted.measure_interpreted(workload_config("smoke", device="cpu"), None)
    assert [row["holds"] for row in result["rows"]] == [True] * 4
    assert result["by"] == "Triton kernels, interpreted"


def test_without_triton_nothing_is_interpreted(monkeypatch):
    monkeypatch.setattr(interpreted, "has_triton", lambda: False)
    result = interpreted.measure_interpreted(workload_config("smoke", device="cpu"), None)
    assert (result["rows"], "not installed" in result["reason"]) == ([], True)


def test_the_other_kernels_agree():
    rows = list(agreement.other_rows(CPU, ["fp32", "bf16"]))
    assert len(rows) == 6
    assert all(row["holds"] for row in rows), [row for row in rows if not row["holds"]]


# parts


def loss_table(tmp_path, **changes):
    cells = loss.variant_cells("smoke", 128, True, batch_size=8, vocab_size=8192)
    assert [loss.variant_of(cell) for cell in cells.values()] == ["plain", "compiled", "fused"]
    logits = 8 * 128 * 8192 * 4
    results = {"plain": (0.2, 3 * logits), "compiled": (0.1, 2 * logits), "fused": (0.1, logits // 2)}
    records = {}
    for name, cell in cells.items():
        seconds, extra = results[loss.variant_of(cell)]
        result = {"device": "CPU", "chunk_rows": 128, "seconds": seconds, "extra_bytes": extra}
        records[name] = record(name, cell, result | changes)
    return written(loss.loss_table(records), tmp_path)


def test_the_loss_in_words(tmp_path):
    text = parts.loss_answer(loss_table(tmp_path))
    assert "1,024 positions over a vocabulary of 8,192 are 33.6 MB of logits" in text
    assert "the room of 3.0 logit matrices" in text
    assert "128 rows at a time" in text
    assert "**6.0 times less**, in 0.50 times the time." in text
    assert "takes a chunk of rows at a time" in parts.loss_answer(loss_table(tmp_path, chunk_rows=None))
    assert "logit matrices" not in parts.loss_answer(loss_table(tmp_path, extra_bytes=None))


def test_the_loss_is_measured_with_and_without_logits():
    results = {
        loss.variant_of(cell): loss.measure_loss(cell, None)
        for cell in loss.variant_cells("smoke", 64, False, batch_size=4, vocab_size=1024).values()
    }
    assert results["fused"]["extra_bytes"] < results["plain"]["extra_bytes"] / 2
    assert results["fused"]["chunk_rows"] == 32


def optimizer_rows(ours="ours, in one pass", seconds=(0.4, 0.1, 0.05)):
    names = ("plain, operation by operation", "torch.optim.AdamW(fused=True)", ours)
    rows = [
        {"contestant": name, "bytes_per_parameter": moved, "seconds": time, "reason": None if time else "not here"}
        for name, moved, time in zip(names, (92, 40, 32), seconds, strict=True)
    ]
    result = {"device": "GPU", "parameters": 10**9, "copy_bytes_per_second": 1e12, "rows": rows}
    return optimizer.optimizer_table({"a": record("a", workload_config("smoke"), result)})


def test_the_optimizer_in_words(tmp_path):
    text = parts.optimizer_answer(written(optimizer_rows(), tmp_path))
    assert "| 640 GB/s" in text
    assert "| 64%" in text
    assert "32 bytes take 32.0 ms here" in text
    assert "Ours takes 0.12 times the time of the plain one." in text
    assert "stays in the cache" not in text
    text = parts.optimizer_answer(written(optimizer_rows("ours, as plain operations", (0.4, None, 0.01)), tmp_path))
    assert "absent (not here)" in text
    assert "gains nothing" in text
    assert "Where it is above 100%, a part stays in the cache, or more is read than written" in text


def test_the_optimizer_is_measured():
    config = workload_config("smoke", vocab_size=16)
    table = optimizer.optimizer_table({"a": record("a", config, optimizer.measure_optimizer(config, None))})
    assert table["contestant"].str.startswith("ours").sum() == 1
    assert (table.loc[table["outcome"] == "complete", "bytes_per_second"] > 0).all()


def test_elementwise_work_is_measured_and_told(tmp_path):
    cells = loss.variant_cells("smoke", 16, False, batch_size=2, vocab_size=16)
    records = {name: record(name, cell, elementwise.measure_elementwise(cell, None)) for name, cell in cells.items()}
    table = written(elementwise.elementwise_table(records), tmp_path)
    assert len(table) == 6
    assert (table["eager_bytes"] > table["least_bytes"]).all()
    table["seconds"] = table["variant"].map({"plain": 4.0, "fused": 2.0})
    text = parts.elementwise_answer(table)
    assert "Ours are 2.0 times as fast as operation by operation." in text
    assert "On a CPU they are the same operations" in text


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


# the step, the curve, decoding


def ladder(tmp_path, times, absent=None):
    cells = steps.rung_cells("smoke", 16, batch_size=2)
    samples = {rung: [{"wall": seconds, "cuda": None, "forward": None, "loss": None, "backward": None,
                       "optimizer": None, "warmup": False}] for rung, seconds in times.items()}  # fmt: skip
    records = {
        rung: record(rung, cells[rung], {"device": "CPU", "samples": samples[rung]}) | {"cell": rung} for rung in times
    }
    return written(steps.ladder_table(records, absent or {}), tmp_path)


def test_the_ladder_in_words(tmp_path):
    absent = steps.absent_rungs(compiled=False, device=CPU)
    assert set(absent) == {"compiled", "graph"}
    assert steps.absent_rungs(compiled=True, device=torch.device("cuda")) == {}
    table = ladder(tmp_path, {"eager": 0.8, "sdpa": 0.4, "flash": 0.5, "fused": 0.2}, absent)
    assert table["rung"].tolist() == list(steps.RUNGS)
    text = step_answers.ladder_answer(table)
    assert "From `eager` to `fused` a step becomes **4.00 times as fast**" in text
    assert "The largest gain is that of `fused` (2.50 times" in text
    assert "`flash` is slower than the rung before (0.80)" in text
    assert text.count("**absent**") == 2
    assert "Not measured, `graph`: A CUDA graph needs a CUDA GPU" in text
    assert "peak memory" not in text
    texts = drawn(step_answers.rungs_figure(table))
    assert "absent" in texts
    assert any("4.00 ×" in text for text in texts)
    assert "nan" not in text


def test_a_ladder_without_steps(tmp_path):
    assert step_answers.ladder_answer(ladder(tmp_path, {}, {"graph": "no GPU"})) == "No step was measured."


def test_the_explicit_step_is_measured_without_a_graph():
    cell = steps.rung_cells("smoke", 16, batch_size=2, vocab_size=32, warmup_steps=1, steps=2)["fused"]
    assert steps.task_of("fused") is steps.measure_ungraphed
    samples = steps.measure_ungraphed(cell, None)["samples"]
    assert [sample["warmup"] for sample in samples] == [True, False, False]
    assert all(sample["wall"] > 0 for sample in samples)


def curves(factor=1.0, steps_taken=40, end=(2.0, 2.0), precision="bf16"):
    table = pd.DataFrame({"step": range(1, steps_taken + 1)})
    table["train_loss"] = 2 + 4 / table["step"]
    other = table.assign(train_loss=table["train_loss"] * factor)
    return step_answers.Curves(table, other, end, (100.0, 250.0), precision, steps_taken)


def test_curves_that_agree_and_curves_that_do_not():
    same = curves(1.001)
    assert same.largest_difference == pytest.approx(1e-3)
    text = step_answers.curves_answer(same)
    assert "Over 40 steps in bf16 the two have **the same learning curve**" in text
    assert "differ by at most 0.10%" in text
    assert "2.50 times as many tokens per second" in text
    assert "**another learning curve**" in step_answers.curves_answer(curves(1.03))
    assert not curves(end=(2.0, 2.1)).agree
    assert not curves(1.004, precision="fp32").agree
    assert curves(1.0, steps_taken=3).agree
    drawn(figures.curves_figure(same.tables(), same.tolerance))


def test_losses_are_compared_in_windows():
    noisy = curves()
    noisy.fast["train_loss"] *= [1.05, 0.95] * 20  # as if batches were another, evenly
    assert noisy.largest_difference < 0.02
    assert list(step_answers.windowed(noisy.plain)["step"]) == list(range(4, 41, 4))


def test_the_two_runs_differ_in_nothing_but_how_they_compute():
    runs = step_answers.curve_runs(TrainConfig(compile=True))
    plain, fast = (to_dict(runs[name]) for name in ("plain", "fast"))
    assert (plain["ops"], fast["ops"]) == ("plain", "fused")
    assert (plain["model"].pop("attention"), fast["model"].pop("attention")) == ("plain", "flash")
    plain.pop("ops"), fast.pop("ops")
    assert plain == fast


def test_decoding_is_measured_and_told(tmp_path):
    cell = workload_config("smoke", 24, vocab_size=32, batch_size=2, steps=1)
    result = decoding.measure_decoding(cell, None)
    assert [row["way"] for row in result["rows"]] == ["plain", "cached", "fused"]
    assert result["rows"][1]["same_tokens"] > 0.5
    for row, seconds in zip(result["rows"], (4.0, 2.0, 0.5), strict=True):
        row |= {"seconds": [seconds], "same_tokens": 1.0}
    records = {"a": record("a", cell, result)}
    text = parts.decoding_answer(written(decoding.decoding_table(records), tmp_path))
    assert "The cache decodes 2.0 times as fast as the window, our kernels 4.0 times as fast as the cache" in text
    assert "All ways decode the same tokens." in text
    result["rows"][2]["same_tokens"] = 0.5
    assert "At least 50% of the tokens are the same" in parts.decoding_answer(decoding.decoding_table(records))


def test_ceilings_are_a_task():
    assert set(measure_ceilings(workload_config("smoke"), None)) == {"peak_flops_per_second", "peak_bytes_per_second"}


def test_nothing_measured_claims_nothing():
    nothing = pd.DataFrame()
    for answer in (parts.loss_answer, parts.optimizer_answer, parts.elementwise_answer, parts.decoding_answer):
        assert len(answer(nothing)) < 60
    assert attention.attention_answer(nothing) == "No attention was measured."


# the reference machine


def speed_row(row, group, contestant, ours, median, **more):
    head = {"row": row, "group": group, "work": f"work of {row}", "settings": more.pop("settings", {})}
    return head | {
        "contestant": contestant, "ours": ours, "unit": "ms", "median": median, "low": median, "high": median,
        "repeats": 9, "peak_bytes": None, "rate": None, "rate_unit": None, "share": None, "share_of": None,
        "outcome": "complete" if median else "out of memory", "reason": None, "notes": {},
    } | more  # fmt: skip


def speed_file(folder, step=2.0, changes=()):
    rows = [
        speed_row("step-a", "step", "HF eager", False, 9.0, rate=1000.0, rate_unit="tok/s"),
        speed_row("step-a", "step", "HF compiled", False, 4.0),
        speed_row("step-a", "step", "lmcore plain", False, 1.0),
        speed_row("step-a", "step", "lmcore fused", True, step, share=0.4, share_of="peak"),
        speed_row("study", "study", "plain, eager", False, 8.0),
        speed_row("study", "study", "+ one CUDA graph", True, 2.0),
        speed_row("study", "study", "+ broken", False, None),
    ]
    for length in (512, 1024, 16384):
        for kind, passes in ((64, "forward"), (128, "both")):
            settings = {"head_size": kind, "context_length": length, "passes": passes, "causal": True}
            rates = {"SDPA cuDNN": 500.0, "SDPA FlashAttention": 300.0, "lmcore flash": 550.0}
            rows += [
                speed_row(
                    f"attention-{kind}-{length}-{passes}",
                    "attention",
                    name,
                    name.startswith("lmcore"),
                    1 / rate,
                    rate=rate,
                    rate_unit="TFLOP/s",
                    settings=settings,
                )
                for name, rate in rates.items()
            ]
        for kind, name, lost in (("attention", "plain", length > 9000), ("step", "lmcore fused", False)):
            rows.append(
                speed_row(
                    f"memory-{kind}-{length}",
                    "memory",
                    name,
                    False,
                    None if lost else 1.0,
                    peak_bytes=None if lost else length**2 * 100,
                    settings={"context_length": length},
                )
            )
    targets = [
        {"row": "step-a", "measure": "median", "at_most": 2.5, "text": "≤ 2.5 ms"},
        {"row": "step-a", "measure": "share", "at_least": 0.5, "text": "≥ 50 % MFU"},
        {"row": "attention-128-1024-both", "measure": "rate over SDPA cuDNN", "at_least": 1.0, "text": "≥ cuDNN"},
        {"row": "decode", "measure": "rate", "at_least": 1.0, "text": "≥ 1"},
    ]
    content = {
        "provenance": {"device": "NVIDIA H200", "torch": "2.11", "packages": {"triton": "3.6.0"}},
        "ceilings": {"copy_bytes_per_second": 4e12, "bf16_flops_per_second": 8e14},
        "rows": [*rows, *changes], "targets": targets,
    }  # fmt: skip
    (folder / "speed.json").write_text(json.dumps(content))
    return folder


def test_ours_beside_the_best_peer(tmp_path):
    speed = read_speed(speed_file(tmp_path))
    row = comparison(speed).set_index("row").loc["step-a"]
    assert row["faster"] == 2  # HF compiled; our own plain way is no peer
    assert row["peer"]["contestant"] == "HF compiled"
    assert [target["reached"] for target in row["targets"]] == [True, False]
    table = speed_table(speed)
    assert "| 4.00 ms (HF compiled)" in table
    assert "≤ 2.5 ms: yes; ≥ 50 % MFU: **no**, 40.0%" in table
    assert "1.10 times" not in table
    assert "≥ cuDNN: yes" in table
    assert "attention-64-512" not in speed_table(speed, only_targets=True)
    text = reference_answer(speed)
    assert "NVIDIA H200 with PyTorch 2.11 and triton 3.6.0" in text
    assert "a training step 2.00 and attention 1.10" in text
    assert "4.00 TB/s" in text
    assert "nan" not in text


def test_misses_are_named_with_what_limits_them(tmp_path):
    text = misses(read_speed(speed_file(tmp_path, step=3.0)))
    assert text.startswith("1 of 3 targets are reached.")
    line = "- work of step-a: 3.00 ms (target ≤ 2.5 ms) and 40.0% (target ≥ 50 % MFU); it runs at 40% of the peak."
    assert line in text


def test_rows_that_did_not_fit(tmp_path):
    lost = [
        speed_row("step-b", "step", "HF eager", False, 5.0),
        speed_row("step-b", "step", "lmcore fused", True, None),
        speed_row("step-c", "step", "lmcore fused", True, 5.0),
    ]
    speed = read_speed(speed_file(tmp_path, changes=lost))
    table = speed_table(speed)
    assert "| out of memory" in table
    assert comparison(speed).set_index("row").loc["step-c", "peer"] is None
    assert "lmcore fused: out of memory" in drawn(speed_figures(speed)["speed_steps"])


def test_figures_of_the_reference_machine(tmp_path):
    found = speed_figures(read_speed(speed_file(tmp_path)))
    assert set(found) == {"speed_attention", "speed_steps", "speed_memory", "speed_ladder"}
    for figure in found.values():
        drawn(figure)
    panels = found["speed_attention"].axes
    assert max(line.get_ydata().max() for axes in panels for line in axes.lines if len(line.get_ydata())) == 550
    assert all(axes.get_ylim()[1] > 550 for axes in panels)
    assert "out of memory" in drawn(found["speed_ladder"])
    assert any(line.get_marker() == "X" for line in found["speed_memory"].axes[0].lines)


def test_without_a_file_there_is_a_sentence(tmp_path):
    assert read_speed(tmp_path) is None
    assert reference_answer(None).startswith("The kernels have not been measured beside their peers")
    assert speed_block(tmp_path).startswith("The kernels have not been measured")
    assert speed_figures(None) == {}
    (tmp_path / "speed.json").write_text('{"rows": []}')
    with pytest.raises(UserError, match="holds no speed measurements"):
        read_speed(tmp_path)


def test_the_readme_block_has_the_rows_with_targets(tmp_path):
    text = speed_block(speed_file(tmp_path))
    assert "work of step-a" in text
    assert "work of attention-64-512-forward" not in text
    assert "Not measured" not in text
    assert text.endswith("\n")
