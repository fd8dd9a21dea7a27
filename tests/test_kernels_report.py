"""Tables, figures and answers of notebook 07: other numbers, other sentences."""

import pandas as pd
import pytest
import torch
from kernel_reports import drawn, record

from lmcore.config import model_config, replace
from lmcore.errors import UserError
from lmcore.functional import scaled_dot_product_attention
from lmcore.model import causal_mask
from lmcore.profiling.kernels import cases, decoding, parity, steps
from lmcore.profiling.kernels.tables import results_table
from lmcore.profiling.workload import workload_config
from lmcore.recipes import recipe
from lmcore.run import RunFolder
from lmcore.train import train
from lmcore.workbook.report.figures import use_style
from lmcore.workbook.report.kernels import attention, figures, parts
from lmcore.workbook.report.kernels import steps as step_answers
from lmcore.workbook.report.tables import write_results

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def style():
    use_style()


def written(table, folder):
    """The table as a notebook has it: from its results file."""
    return write_results(table, folder / "table.json", {})


# attention


def attention_table(tmp_path, changes=None, **more):
    found = cases.attention_cases("smoke", [256, 512], batch_size=1, precision="bf16", **more)
    records = {}
    for name, config in found.items():
        t, kind = config.model.context_length, config.model.attention
        extra = {"plain": 40 * t**2, "sdpa": 500 * t, "flash": 400 * t}[kind]
        one = {"seconds": {"plain": 4e-9, "sdpa": 1e-9, "flash": 2e-9}[kind] * t**2, "extra_bytes": extra}
        both = {"seconds": 3 * one["seconds"], "extra_bytes": 2 * extra}
        records[name] = record(name, config, {"device": "CPU", "forward": one, "both": both})
    for name, change in (changes or {}).items():
        records[name] |= change
    return written(results_table("attention", records), tmp_path)


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
    everything = {name: lost for name in cases.attention_cases("smoke", [256, 512], precision="bf16")}
    text = attention.attention_answer(attention_table(tmp_path, everything))
    assert "nan" not in text
    assert "times as fast" not in text


def test_attention_without_counted_memory(tmp_path):
    table = attention_table(tmp_path).assign(extra_bytes=None)
    assert "memory grows" not in attention.attention_answer(table)
    assert len(figures.attention_figure(table).axes) == 1


def test_flops_are_of_the_pairs_that_a_causal_mask_leaves():
    model = model_config("smoke", context_length=3, vocab_size=10)
    assert cases.attention_layer(model, 2, torch.float32).flops == 2 * 2 * 2 * model.d_model * 6


# agreement


def agreements(**changes):
    row = {
        "kernel": "attention", "shape": [1, 2, 3, 4], "causal": True, "precision": "fp32", "errors": {"O": 1e-7},
        "error": 1e-7, "worst": "O", "plain_error": 1e-7, "tolerance": 1e-5, "holds": True,
    }  # fmt: skip
    rows = [row, row | {"shape": [5, 6, 7, 8]} | changes]
    result = {"by": "Triton kernels", "device": "CPU", "rows": rows}
    return results_table("agreement", {"a": record("a", workload_config("smoke"), result)})


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
        return scaled_dot_product_attention(q, k, 1.001 * v, causal_mask(9, 9, CPU) if causal else None)

    rows = parity.attention_rows(wrong, CPU, [(1, 1, 9, 16)], ["fp32"])
    assert [row["holds"] for row in rows] == [False, False]
    assert parity.relative_error(torch.zeros(3), torch.ones(3)) == 1
    assert parity.relative_error(torch.zeros(3), torch.zeros(3)) == 0


# parts


def loss_table(tmp_path, **changes):
    variants = cases.variant_cases("smoke", 128, True, batch_size=8, vocab_size=8192)
    logits = 8 * 128 * 8192 * 4
    results = {"plain": (0.2, 3 * logits), "compiled": (0.1, 2 * logits), "fused": (0.1, logits // 2)}
    records = {}
    for name, cell in variants.items():
        seconds, extra = results[name.rpartition("-")[2]]
        result = {"device": "CPU", "chunk_rows": 128, "seconds": seconds, "extra_bytes": extra}
        records[name] = record(name, cell, result | changes)
    table = written(results_table("loss", records), tmp_path)
    assert list(table["variant"]) == ["plain", "compiled", "fused"]
    return table


def test_the_loss_in_words(tmp_path):
    text = parts.loss_answer(loss_table(tmp_path))
    assert "1,024 positions over a vocabulary of 8,192 are 33.6 MB of logits" in text
    assert "the room of 3.0 logit matrices" in text
    assert "128 rows at a time" in text
    assert "**6.0 times less**, in 0.50 times the time." in text
    assert "takes a chunk of rows at a time" in parts.loss_answer(loss_table(tmp_path, chunk_rows=None))
    assert "logit matrices" not in parts.loss_answer(loss_table(tmp_path, extra_bytes=None))


def optimizer_rows(ours="ours, in one pass", seconds=(0.4, 0.1, 0.05)):
    names = ("plain, operation by operation", "torch.optim.AdamW(fused=True)", ours)
    rows = [
        {"contestant": name, "bytes_per_parameter": moved, "seconds": time, "reason": None if time else "not here"}
        for name, moved, time in zip(names, (92, 40, 32), seconds, strict=True)
    ]
    result = {"device": "GPU", "parameters": 10**9, "copy_bytes_per_second": 1e12, "rows": rows}
    return results_table("optimizer", {"a": record("a", workload_config("smoke"), result)})


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


def test_elementwise_work_is_measured_and_told(tmp_path):
    variants = cases.variant_cases("smoke", 16, False, batch_size=2, vocab_size=16)
    records = {name: record(name, cell, cases.measure_elementwise(cell, None)) for name, cell in variants.items()}
    table = written(results_table("elementwise", records), tmp_path)
    assert len(table) == 6
    assert (table["eager_bytes"] > table["least_bytes"]).all()
    table["seconds"] = table["variant"].map({"plain": 4.0, "fused": 2.0})
    text = parts.elementwise_answer(table)
    assert "Ours are 2.0 times as fast as operation by operation." in text
    assert "On a CPU they are the same operations" in text


# the step, the curve, decoding


def ladder(tmp_path, times, absent=None):
    cells = steps.rung_cases("smoke", 16, batch_size=2)
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


def curves(factor=1.0, steps_taken=40, end=(2.0, 2.0), precision="bf16"):
    table = pd.DataFrame({"step": range(1, steps_taken + 1)})
    table["train_loss"] = 2 + 4 / table["step"]
    other = table.assign(train_loss=table["train_loss"] * factor)
    return step_answers.Curves(table, other, end, (100.0, 250.0), precision, steps_taken)


def test_curves_are_written_and_read(tmp_path, embedded_data):
    config = replace(recipe("smoke", str(embedded_data), 300, steps=4), log_interval=1, eval_interval=2)
    runs = {name: RunFolder(tmp_path / name) for name in step_answers.curve_runs(config)}
    for name, settings in step_answers.curve_runs(config).items():
        train(settings, runs[name])
    assert step_answers.curves_in(tmp_path) is None
    stopped = replace(config, steps=5)
    cut = RunFolder(tmp_path / "cut")
    cut.begin(stopped, {})
    cut.write_status("diverged", 3)
    with pytest.raises(UserError, match=r"The fast run in .*cut is diverged at step 3: there is no whole curve"):
        step_answers.write_curves(runs | {"fast": cut}, tmp_path)
    assert step_answers.curves_in(tmp_path) is None
    found = step_answers.write_curves(runs, tmp_path)
    assert found.valid_losses == pytest.approx([run.status()["valid_loss"] for run in runs.values()])
    assert (found.precision, found.steps) == ("fp32", 4)
    assert list(found.fast["train_loss"]) == pytest.approx(list(runs["fast"].metrics()["train_loss"]))
    assert found.agree
    again = step_answers.curves_in(tmp_path)
    assert step_answers.curves_answer(again) == step_answers.curves_answer(found)
    assert "a model has **the same learning curve**" in step_answers.curves_sentences(again)


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


def test_decoding_is_measured_and_told(tmp_path):
    cell = workload_config("smoke", 24, vocab_size=32, batch_size=2, steps=1)
    result = decoding.measure_decoding(cell, None)
    assert [row["way"] for row in result["rows"]] == ["plain", "cached", "fused"]
    assert result["rows"][1]["same_tokens"] > 0.5
    for row, seconds in zip(result["rows"], (4.0, 2.0, 0.5), strict=True):
        row |= {"seconds": [seconds], "same_tokens": 1.0}
    records = {"a": record("a", cell, result)}
    text = parts.decoding_answer(written(results_table("decoding", records), tmp_path))
    assert "The cache decodes 2.0 times as fast as the window, our kernels 4.0 times as fast as the cache" in text
    assert "All ways decode the same tokens." in text
    result["rows"][2]["same_tokens"] = 0.5
    assert "At least 50% of the tokens are the same" in parts.decoding_answer(results_table("decoding", records))


def test_nothing_measured_claims_nothing():
    nothing = pd.DataFrame()
    for answer in (parts.loss_answer, parts.optimizer_answer, parts.elementwise_answer, parts.decoding_answer):
        assert len(answer(nothing)) < 60
    assert attention.attention_answer(nothing) == "No attention was measured."
