import json
import re

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from memory_profiles import inference, training
from memory_profiles import record as record_of

from lmcore.config import model_config
from lmcore.errors import UserError
from lmcore.profiling.memory.predicted import predicted_peak
from lmcore.profiling.memory.saved import saved_by_operation
from lmcore.profiling.workload import workload_config
from lmcore.workbook.report.figures import save_figure, use_style
from lmcore.workbook.report.memory import answers, figures, kept, peak_answers, sizes, tables
from lmcore.workbook.report.memory.timeline_html import timeline_data, write_timeline
from lmcore.workbook.report.tables import write_results

NO_STAGES = tables.stages_table({})


@pytest.fixture(scope="module", autouse=True)
def style():
    use_style()


def record(*arguments, **changes) -> dict:
    """A cell of a model with few layers, so that its peak is soon predicted."""
    return record_of(*arguments, **{"num_layers": 2} | changes)


def records(*found: dict) -> dict[str, dict]:
    return {entry["cell"]: entry for entry in found}


def exact(size="large", context=128, factor=1.0, **changes) -> dict:
    """A cell whose measured peak is the predicted one times a factor."""
    entry = record(None, size, context, **changes)
    config = tables.config_of(entry)
    predicted = predicted_peak(config.model, config.batch_size, precision=config.precision, passes=config.passes)
    peak = round(factor * predicted["peak_bytes"])
    return entry | {"result": {"peak_bytes": peak, "reserved_peak_bytes": 2 * peak, "device": "Chip A"}}


def complete(text: str) -> bool:
    """Whether a sentence has no hole in it."""
    return not re.search(
        r"\bnan\b|\bNone\b|\{|\}", text.replace("{,}", "").replace("{model}", "").replace("\\text", "")
    )


def drawn(figure) -> None:
    """Draws a figure; nothing of it may be cut off."""
    FigureCanvasAgg(figure).draw()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert min(box.x0, box.y0) >= -0.01
    assert box.x1 <= width + 0.02
    assert box.y1 <= height + 0.02


# tables


def test_peaks_are_held_against_the_prediction_and_missing_cells_are_rows():
    lost = record(None, context=512, passes="train_step", outcome="out of memory")
    rows = tables.peaks_table(records(exact(factor=1.25), lost))
    assert rows["relative_error"][0] == pytest.approx(-0.2)
    assert rows["allocated_peak_bytes"][0] == rows["peak_bytes"][0]
    assert pd.isna(rows["peak_bytes"][1])
    assert rows["predicted_bytes"][1] > rows["predicted_bytes"][0]
    assert rows["device"].tolist() == ["Chip A", "Chip A"]
    assert rows["reason"][1].startswith("CUDA out of memory")


def test_bytes_are_not_rounded_where_some_are_missing(tmp_path):
    entry = exact(factor=1.0123456789)
    lost = record(None, context=512, outcome="out of memory")
    written = write_results(tables.peaks_table(records(entry, lost)), tmp_path / "peaks.json", {})
    assert written["peak_bytes"][0] == entry["result"]["peak_bytes"]
    assert pd.isna(written["peak_bytes"][1])


def test_the_requested_peak_is_taken_before_the_rounded_one():
    entry = exact()
    entry["result"] |= {"requested_peak_bytes": 1000, "peak_bytes": 1024}
    row = tables.peaks_table(records(entry)).iloc[0]
    assert (row["peak_bytes"], row["allocated_peak_bytes"]) == (1000, 1024)
    on_cpu = record({"peak_bytes": 1000, "device": "CPU"})
    assert pd.isna(tables.peaks_table(records(on_cpu))["allocated_peak_bytes"][0])


def test_stages_have_the_levels_of_their_ends():
    profile = training(layers=6, activation=40_000_000, weights=1_000_000_000)
    rows = tables.stages_table(records(record(profile, passes="train_step"))).set_index("stage")
    assert list(rows.index) == ["forward", "loss", "backward", "optimizer"]
    assert rows.loc["forward", "end activations"] == 18 * 40_000_000
    assert rows.loc["backward", "end activations"] == 0
    assert rows.loc["backward", "end gradients"] == pytest.approx(1e9, rel=1e-6)
    assert rows.loc["optimizer", "end temporary"] == 0
    assert rows["peak_position"].notna().sum() == 1
    assert rows.loc["forward", "start_bytes"] == 3_001_000_000


def test_the_composition_adds_up_to_the_peak():
    profile = training()
    rows = tables.composition_table(records(record(profile, passes="train_step"), record(None, outcome="failed")))
    assert rows["bytes"].sum() == profile["peak_bytes"]
    predicted = predicted_peak(workload_config("large", 128, num_layers=2).model, 4, passes="train_step")
    assert rows["predicted_bytes"].sum() == predicted["peak_bytes"]


def test_sizes_lead_to_shapes():
    config = model_config("2.7b", context_length=128, vocab_size=10_000)
    (hidden,) = tables.shapes_of_size(config, 4, 4 * 128 * 10_240 * 4)
    assert hidden == "the hidden layer of a feed-forward network (4 × 128 × 10,240 values of 4 bytes)"
    (logits,) = tables.shapes_of_size(config, 4, 4 * 128 * 10_000 * 4)
    assert logits.startswith("the logits (4 × 128 × 10,000")
    matrix = 10_240 * 2560 * 4
    assert tables.shapes_of_size(config, 4, matrix) == []  # no forward pass in float32 makes a matrix
    assert tables.shapes_of_size(config, 4, matrix // 2, "bf16")[-1].startswith("a matrix of a feed-forward network")
    assert "values of 4 bytes" in tables.shapes_of_size(config, 4, matrix, "fp32", "backward")[-1]
    assert tables.shapes_of_size(config, 4, 128 * 128)[0].startswith("causal mask")
    assert tables.shapes_of_size(config, 4, 12_345) == []


# the timelines in words


def told(profile: dict, **changes) -> str:
    return answers.timeline_answer(tables.stages_table(records(record(profile, **changes))))


def test_a_training_step_that_can_be_read_from_its_slopes():
    text = told(training(layers=12), passes="train_step")
    assert "activations pile up block by block, by 1.44 GB" in text
    assert "The peak of 4.51 GB is in the backward pass." in text
    assert "more than is allocated for gradients (1.00 GB), so the level falls" in text
    assert "the stages can be told by their slopes, **and the peak lies where they meet**" in text
    assert complete(text)


def test_a_training_step_whose_gradients_outgrow_its_activations():
    text = told(training(layers=6, activation=1_000_000), passes="train_step")
    assert "less than is allocated for gradients" in text
    assert "so the level climbs" in text
    assert "**only the backward pass** changes the level enough" in text
    assert "in the optimizer's step" in text


def test_a_training_step_that_is_flat():
    text = told(training(layers=6, activation=1_000, weights=1_000_000), passes="train_step", size="xl")
    flat = training(layers=1, activation=8, weights=120)
    flat_text = told(
        flat | {"stages": [s | {"start_bytes": 9, "end_bytes": 9} for s in flat["stages"]]}, passes="train_step"
    )
    assert "Size xl" in text
    assert "can hardly be told" in flat_text


def test_a_step_without_the_optimizer():
    profile = training(layers=12)
    text = told(profile | {"stages": profile["stages"][:-1]}, passes="forward_backward")
    assert "forward and backward pass in fp32" in text
    assert "The optimizer" not in text
    assert "  " not in text


def test_inference_is_a_base_with_teeth():
    text = told(inference(layers=3, passing=200_000_000), passes="forward")
    assert "1.00 GB or 71% of the peak of 1.40 GB" in text
    assert "the highest on the way, up to 401 MB" in text
    assert "At the end, 100 MB more" in text
    assert complete(text)


def test_without_profiles_nothing_is_claimed():
    nothing = tables.stages_table({})
    assert answers.timeline_answer(nothing) == answers.NO_CELL
    assert answers.device_note(nothing) == answers.NO_CELL


def test_a_machine_without_a_gpu_says_so():
    on_gpu = answers.device_note(tables.stages_table(records(record(training(), passes="train_step"))))
    assert "CPU" not in on_gpu
    assert "full" not in on_gpu
    full = answers.device_note(tables.stages_table(records(record(training(truncated=True), passes="train_step"))))
    assert "The record of `large-128-fp32-train_step` was full" in full
    profile = training(tool="torch.profiler, CPU allocator", device="CPU")
    text = answers.device_note(tables.stages_table(records(record(profile, "smoke", passes="train_step"))))
    assert "no CUDA GPU" in text
    assert "size smoke" in text


# peaks and precisions in words


def test_peaks_by_context_with_what_did_not_fit():
    lost = record(None, "2.7b", 512, passes="train_step", outcome="out of memory")
    cells = records(
        exact("2.7b", 128, passes="forward"), exact("2.7b", 512, passes="forward"),
        exact("2.7b", 128, passes="train_step"), lost, exact("2.7b", 128, passes="forward", attention="sdpa"),
    )  # fmt: skip
    text = peak_answers.peaks_answer(tables.peaks_table(cells), NO_STAGES)
    assert "| 2.7b" in text
    assert "**out of memory**" in text
    assert "**Out of memory** on Chip A: `2.7b-512-fp32-train_step` (CUDA out of memory." in text
    assert text.count("| 512") == 1
    assert "from context 128 to 512" in text
    assert "training step" in text.splitlines()[4]
    assert "at most 2.00 times as much" in text
    assert peak_answers.peaks_answer(tables.peaks_table(cells), NO_STAGES, "bf16") == "No cell in bf16 was measured."


def compared(forward: float, step: float) -> str:
    cells = [exact(passes="forward"), exact(passes="train_step")]
    mixed = [exact(passes=p, precision="bf16") for p in ("forward", "train_step")]
    for entry, base, ratio in zip(mixed, cells, (forward, step), strict=True):
        entry["result"]["peak_bytes"] = round(ratio * base["result"]["peak_bytes"])
    profiles = [
        record(training(activation=200_000_000), passes="train_step"),
        record(training(activation=100_000_000), passes="train_step", precision="bf16"),
    ]
    composition = tables.composition_table(records(*profiles))
    return peak_answers.precision_answer(tables.peaks_table(records(*cells, *mixed)), composition, NO_STAGES)


def test_mixed_precision_is_judged_by_its_numbers():
    text = compared(1.5, 0.7)
    assert "For a forward pass, bf16 means **more memory** throughout: 1.50 times" in text
    assert "For a training step, bf16 means **less memory** throughout: 0.700 times" in text
    assert "activations go from" in text
    assert "parameters and optimizer state make" in text
    assert "gradients make" not in text  # a small share of this peak
    assert complete(text)
    assert compared(0.95, 1.02).count("**hardly any difference**") == 2


def placed(*activations: int, precision: str = "fp32", weights: int = 1_000_000_000) -> list[dict]:
    """Records of training steps at contexts 128, 256, … whose activations are so large."""
    return [
        record(training(activation=a, weights=weights), context=128 * 2**i, passes="train_step", precision=precision)
        for i, a in enumerate(activations)
    ]


def test_a_peak_in_the_optimizer_says_why_the_context_does_not_matter():
    cells = records(*placed(1_000_000, 2_000_000, 100_000_000))
    text = peak_answers.peaks_answer(tables.peaks_table(cells), tables.stages_table(cells))
    assert "At context 128 and 256 the peak of large lies in the optimizer's step" in text
    assert "parameters, gradients and optimizer state take 4.00 GB; the activations came to less, at most 36" in text
    assert "**the context does not change it**" in text
    assert "At context 512 the peak of large lies in the backward pass: the activations, 1.8" in text
    assert text.index("| 128") < text.index("| 256") < text.index("| 512")
    once = records(*placed(1_000_000))
    text = peak_answers.peaks_answer(tables.peaks_table(once), tables.stages_table(once))
    assert "lies in the optimizer's step" in text
    assert "the context does not change it" not in text


def moved(plain: list[int], mixed: list[int]) -> str:
    cells = records(*placed(*plain), *placed(*mixed, precision="bf16"))
    found = [table(cells) for table in (tables.peaks_table, tables.composition_table, tables.stages_table)]
    return peak_answers.precision_answer(*found)


def test_a_precision_that_moves_the_peak_out_of_the_optimizer():
    text = moved([1_000_000, 20_000_000], [2_000_000, 90_000_000])
    assert "At context 128 both peaks of large lie in the optimizer's step" in text
    assert "At context 256 the activations with the copies of weights that bf16 keeps" in text
    assert "from the optimizer's step to the backward pass (+" in text
    text = moved([90_000_000], [1_000_000])
    assert "the smaller activations" in text
    assert "from the backward pass to the optimizer's step (−" in text
    assert complete(text)


def test_sizes_stand_in_order():
    cells = records(exact("2.7b", 128), exact("large", 256), exact("2.7b", 64), exact("large", 128))
    text = peak_answers.peaks_answer(tables.peaks_table(cells), NO_STAGES)
    found = re.findall(r"^\| (large|2.7b) +\| (\d+)", text, re.MULTILINE)
    assert found == [("large", "128"), ("large", "256"), ("2.7b", "64"), ("2.7b", "128")]


def test_one_precision_cannot_be_compared():
    text = peak_answers.precision_answer(tables.peaks_table(records(exact())), tables.composition_table({}), NO_STAGES)
    assert text == "Only fp32 was measured, so nothing can be compared."


def test_mixed_precision_where_a_cell_is_missing():
    lost = record(None, passes="train_step", precision="bf16", outcome="out of memory")
    cells = records(exact(passes="train_step"), lost)
    text = peak_answers.precision_answer(tables.peaks_table(cells), tables.composition_table({}), NO_STAGES)
    assert "–" in text
    assert "`large-128-bf16-train_step`" in text
    assert complete(text)


# sizes and predictions in words


def test_the_residual_stream_is_derived():
    config = model_config("2.7b", context_length=256, vocab_size=10_000)
    text = sizes.residual_answer({"2.7b, context 256": config}, 4)
    assert r"$4 \cdot 256 \cdot 2{,}560 \cdot 4 = 10{,}485{,}760$ bytes, **10.0 MB**" in text
    assert "5.00 MB" in sizes.residual_answer({"x": model_config("2.7b", context_length=128)}, 4)


def test_the_largest_allocations_are_named():
    profile = inference(passing=4 * 128 * 5120 * 4)
    text = sizes.largest_answer(tables.largest_table(records(record(profile, passes="forward"))))
    assert "are 12 allocations of **10.0 MiB**, which is just the size of the hidden layer" in text
    assert "from `lmcore/model.py:59 Linear.forward`." in text
    assert "| temporary  | 2.00 ms" in text
    assert "just the size of the hidden layer of a feed-forward network (4 × 128 × 5,120" in text
    odd = sizes.largest_answer(tables.largest_table(records(record(inference(passing=1002), passes="forward"))))
    assert "just the size" not in odd
    assert sizes.largest_answer(tables.largest_table({})) == answers.NO_CELL


def test_predictions_inside_and_outside_of_their_claim():
    inside = tables.peaks_table(records(exact(), exact(context=256, factor=1.01)))
    text = sizes.accounting_answer(inside, tables.composition_table({}))
    assert "**all 2 cells**" in text
    assert "−0.99%, of `large-256-fp32-forward`" in text
    assert "Outside" not in text
    assert "cuBLAS may take" in text
    lost = record(None, context=512, passes="train_step", outcome="out of memory")
    outside = tables.peaks_table(records(exact(), exact(context=256, factor=2.0), lost))
    text = sizes.accounting_answer(outside, tables.composition_table({}))
    assert "**1 of 2 cells**" in text
    assert "Outside: `large-256-fp32-forward` (−50%)." in text
    assert "Predicted for what did not fit into the memory: `large-512-fp32-train_step`" in text
    assert "cuBLAS" not in text
    assert sizes.accounting_answer(tables.peaks_table({}), tables.composition_table({})) == answers.NO_CELL


# what a block keeps


@pytest.mark.parametrize("changes", [{}, {"precision": "bf16"}, {"attention": "sdpa"}, {"attention": "flash"}])
def test_what_a_block_keeps_is_the_prediction_operation_by_operation(changes):
    config = workload_config("smoke", 32, vocab_size=100, passes="train_step", device="cpu", **changes)
    entry = record(None, "smoke", 32, vocab_size=100, passes="train_step", **changes)
    rows = kept.kept_table(records(entry | {"result": {"saved": saved_by_operation(config)}}))
    assert rows["bytes"].tolist() == rows["predicted_bytes"].tolist()
    assert (rows["weight_copy_bytes"].sum() > 0) == (changes == {"precision": "bf16"})
    attention = (
        {"fused attention"} if config.model.attention != "plain" else {"scores", "mask", "softmax", "weighted sum"}
    )
    others = {"norm 1", "q, k, v projections", "rope", "output projection", "norm 2", "w1, w3", "silu", "gate", "w2"}
    assert set(rows["operation"]) - {"output projection"} == attention | others - {"output projection"}


def test_what_a_block_keeps_in_words():
    rows = pd.DataFrame(
        [
            ("fp32", "silu", 60, 0, 60, "x", "s"),
            ("fp32", "gate", 40, 0, 40, "y", "s"),
            ("bf16", "silu", 50, 20, 55, "x", "s"),
        ],
        columns=kept.KEPT_COLUMNS,
    )
    text = kept.kept_answer(rows, 3)
    assert "one block keeps **100 bytes**, all 3 of them 300 bytes" in text
    assert "It is 50 bytes in bf16 (50% less)." in text
    assert "Of that, 20 bytes in bf16 are copies of weights" in text
    assert "off by at most 10% (in bf16)" in text
    assert "copies of weights" not in kept.kept_answer(rows.iloc[:2], 3)
    assert "exact" in kept.kept_answer(rows.iloc[:2], 3)
    assert "No block was measured" in kept.kept_answer(rows.assign(bytes=None), 3)


# figures and the page


def test_timelines_are_drawn_small_and_whole(tmp_path):
    figure = figures.timeline_figure({"forward": inference(layers=30), "training": training(layers=150)})
    drawn(figure)
    assert save_figure(figure, tmp_path / "timeline.svg").stat().st_size < 500_000
    texts = [text.get_text() for text in figure.axes[1].texts]
    assert {"forward", "loss", "backward", "optimizer"} < set(texts)
    assert any(text.startswith("peak ") for text in texts)


def test_thinning_keeps_the_peak():
    totals = [1.0] * 10_000
    totals[7_777] = 5.0
    kept_points = figures.thinned_points(range(10_000), totals, 100)
    assert 7_777 in kept_points
    assert len(kept_points) == 100
    assert figures.thinned_points([0], [1.0], 100).tolist() == [0]


def test_outlines_lie_on_one_another():
    profile = training(layers=2, activation=100, weights=600)
    events, levels = profile["timeline"]["event"], profile["timeline"]["bytes"]
    levels = np.array([levels[name] for name in profile["categories"]], dtype=float)
    bases = np.cumsum(levels, axis=0) - levels
    outlines = figures.allocation_outlines(profile, np.array(events), bases, 0.0)
    assert max(outline[:, 1].max() for outline in outlines) == profile["peak_bytes"]
    assert len(figures.allocation_outlines(profile, np.array(events), bases, 0.5)) < len(outlines)


def test_peaks_composition_and_kept_bytes_are_drawn_whole():
    lost = record(None, context=256, passes="train_step", outcome="out of memory")
    cells = records(
        exact(passes="forward"), exact(passes="train_step"), exact(passes="train_step", precision="bf16"), lost
    )
    figure = figures.peaks_figure(tables.peaks_table(cells))
    drawn(figure)
    assert "out of memory" in [text.get_text() for text in figure.axes[1].get_legend().get_texts()]
    profiles = records(record(training(), passes="train_step"), record(inference(), passes="forward"))
    drawn(figures.composition_figure(tables.composition_table(profiles)))
    rows = [("fp32", name, 60 + i, 0, 60, "x", "s") for i, name in enumerate("abc")]
    found = pd.DataFrame(rows, columns=kept.KEPT_COLUMNS)
    drawn(figures.kept_figure(found))
    drawn(figures.kept_figure(pd.concat([found, found.assign(variant="bf16", bytes=None)])))


def test_the_page_needs_nothing_from_outside(tmp_path):
    profile = training(layers=4)
    profile["allocations"][3]["source"] = "</script><b>"
    page = write_timeline(profile, tmp_path / "timeline.html", "A <title> & more").read_text(encoding="utf-8")
    assert "A &lt;title&gt; &amp; more" in page
    assert not re.search(r"@[A-Z]+@", page)
    assert not re.search(r"(?:src|href)=|https?://|import\(|fetch\(|XMLHttp", page)
    assert "default-src 'none'" in page
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1]
    assert json.loads(text) == timeline_data(profile)


def test_the_page_holds_every_allocation_and_its_lifetime():
    profile = training(layers=2)
    data = timeline_data(profile)
    assert len(data["allocations"]) == len(profile["allocations"])
    assert max(sum(values) for values in zip(*data["bytes"], strict=True)) == data["peak"] == profile["peak_bytes"]
    first, last, size, category, source, stage, seconds = data["allocations"][-1]
    assert data["categories"][category]["label"] == "temporary"
    assert data["sources"][source].startswith("lmcore/optimizer.py")
    assert (stage, seconds) == ("optimizer", pytest.approx((last - first) * 1e-3))
    assert size == profile["allocations"][-1]["bytes"]
    with pytest.raises(UserError, match="nothing was allocated"):
        timeline_data(profile | {"timeline": {"event": [], "bytes": {}, "seconds": []}})
