"""Answers and figures of the optimisation report on made-up tables: other numbers, other sentences."""

import dataclasses

import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from test_cases import SMALL, batch_cells, context_cells, optimization_cells

from lmcore.profiling.cases import OPTIMIZATIONS, StudyConfig
from lmcore.workbook.report.benchmark import optimizations as levers
from lmcore.workbook.report.benchmark import study as answers
from lmcore.workbook.report.benchmark.study_figures import batch_figure, context_figure, optimizations_figure
from lmcore.workbook.report.figures import use_style


def test_what_checkpointing_changed():
    same = levers.CheckpointingCheck(1, same_loss=True, same_gradients=30, gradients=30, forward_calls=6, num_layers=3)
    text = levers.checkpointing_answer(same)
    assert text.startswith("Loss and all 30 gradients are bitwise the same")
    assert "although 3 of 3 blocks ran their forward pass a second time" in text
    check = levers.CheckpointingCheck(1, same_loss=True, same_gradients=8, gradients=9, forward_calls=4, num_layers=2)
    assert not check.identical
    assert "the loss is the same, and **only 8 of 9** gradients" in levers.checkpointing_answer(check)
    idle = dataclasses.replace(check, same_gradients=9, forward_calls=2)
    assert "no block was computed a second time" in levers.checkpointing_answer(idle)


def row(name, config, **changes) -> dict:
    """A row of a timing table, with made-up numbers."""
    model, half = config.model, config.precision != "fp32"
    batch, context = config.batch_size, model.context_length
    return {
        "cell": name, "num_layers": model.num_layers, "num_heads": model.num_heads,
        "context_length": context, "batch_size": batch, "precision": config.precision, "attention": model.attention,
        "checkpoint_every": model.checkpoint_every, "outcome": "complete", "device": "Chip A",
        "tokens_per_second": (150e3 if half else 50e3) * batch / (batch + 2),
        "peak_memory_bytes": 2e9 + batch * context * (1.4e6 if half else 2e6) + batch * context**2 * 144 * 8,
    } | changes  # fmt: skip


def table(cells, **changes) -> pd.DataFrame:
    return pd.DataFrame([row(*case, **changes) for case in cells.items()])


NOT_FITTED = {"outcome": "out of memory", "tokens_per_second": None, "peak_memory_bytes": None}


def failed(rows: pd.DataFrame, *cells: int) -> pd.DataFrame:
    return pd.DataFrame([r | NOT_FITTED if i in cells else r for i, r in enumerate(rows.to_dict("records"))])


def test_batch_sizes_with_memory():
    rows = table(batch_cells(StudyConfig()))
    text = answers.batch_answer(rows)
    low = (0.6e6 * 512) / (2e9 + 2e6 * 512 + 512**2 * 1152)
    assert f"**fp16** reaches 3.0 times the throughput of fp32 and saves {100 * low:.2g}% to" in text
    assert "by 1.33 GB for each sequence on top of 2.00 GB." in text  # fp32: 2e6 * 512 + 1152 * 512**2
    assert "the speed-ups here agree with that" in text
    assert "throughput rises from 16,700 tokens/s at batch size 1 to 47,100 tokens/s at 32, and comes within" in text
    slow = answers.batch_answer(rows.assign(tokens_per_second=1000.0))
    assert "it is slower" not in slow
    assert "Larger batches do not raise the throughput of fp16." in slow
    assert "the speed-ups here are smaller throughout" in slow


def test_batch_sizes_where_half_precision_loses():
    rows = table(batch_cells(StudyConfig()))
    half = rows["precision"] != "fp32"
    rows.loc[half, "tokens_per_second"] /= 6
    rows.loc[half, "peak_memory_bytes"] *= 2
    text = answers.batch_answer(rows)
    assert "**bf16** reaches 0.50 times the throughput of fp32 and needs" in text
    assert "more memory; it is slower at batch size 1, 2, 4, 8, 16 and 32" in text


def test_batch_sizes_on_a_cpu_and_out_of_memory():
    text = answers.batch_answer(table(batch_cells(SMALL), device="CPU", peak_memory_bytes=None))
    assert text.startswith("On CPU, at a context of 16:")
    assert answers.NO_MEMORY in text
    assert "saves" not in text
    assert "report" not in text  # another setting than its own
    text = answers.batch_answer(failed(table(batch_cells(StudyConfig())), 5, 17))
    assert "Without a measurement: batch size 32 (fp32) and 32 (bf16): out of memory." in text
    assert "(batch sizes 1, 2, 4, 8 and 16)" in text
    nothing = failed(table(batch_cells(SMALL)), 0, 1, 2, 3)
    assert answers.batch_answer(nothing).startswith("No cell was measured")


def test_context_finds_the_quadratic_part():
    text = answers.context_answer(table(context_cells(StudyConfig())))
    memory = {t: 2e9 + 8 * t * 1.4e6 + 8 * t**2 * 1152 for t in (128, 512, 1024)}
    share = 8 * 1024**2 * 1152 / memory[1024]
    assert f"and {100 * share:.2g}% of the peak at 1,024" in text
    assert "the fit amounts to 8.0 bytes for each score." in text
    assert "the probabilities as the second product takes them, in fp16 (2 bytes)" in text
    full = answers.context_answer(table(context_cells(StudyConfig())).assign(precision="fp32"))
    assert "takes them, in fp32 (4 bytes)" in full
    assert "the report's 5.0 GB to 25 GB is 5.0 times" in text
    assert f"{memory[1024] / memory[128]:.2g} times as much" in text
    assert "throughput hardly changes, from 120,000 at 128 to 120,000 tokens/s at 1,024." in text
    assert "highest" not in text
    peaked = table(context_cells(StudyConfig())).assign(tokens_per_second=[1e3, 2e3, 5e3, 4e3])
    assert (
        "throughput rises from 1,000 at 128 to 4,000 tokens/s at 1,024, and is highest at 512"
        in answers.context_answer(peaked)
    )


def test_context_without_a_quadratic_part_or_a_fit():
    rows = table(context_cells(StudyConfig()))
    linear = rows.assign(peak_memory_bytes=1e9 + 1e7 * rows["context_length"])
    text = answers.context_answer(linear)
    assert "A fit finds no quadratic part: 10.0 MB for each position" in text
    assert "the growth here agrees" in text
    steep = rows.assign(peak_memory_bytes=rows["context_length"] ** 2.0)
    assert "the growth here is steeper" in answers.context_answer(steep)
    wild = answers.context_answer(rows.assign(peak_memory_bytes=[1e9, 9e9, 2e9, 9e9]))
    assert "No sum of a fixed, a linear and a quadratic part describes it" in wild
    few = answers.context_answer(failed(rows, 3))
    assert "too few to tell" in few
    assert "context length 1,024 (fp16): out of memory" in few
    cpu = answers.context_answer(table(context_cells(SMALL), device="CPU", peak_memory_bytes=None))
    assert answers.NO_MEMORY in cpu
    assert "report" not in cpu


def test_the_fit_recovers_a_polynomial():
    x = pd.Series([128, 256, 512, 1024])
    fit = answers.fitted(x, 3e9 + 5e6 * x + 7e3 * x**2, degree=2)
    assert fit.coefficients == pytest.approx((3e9, 5e6, 7e3))
    assert fit.residual < 1e-9
    assert answers.fitted(x, x.astype(float) ** 2, degree=1).residual > answers.GOOD_FIT


def optimized(study=None, **numbers) -> pd.DataFrame:
    """The four rows, with (tokens per second, bytes) by the name of the optimization."""
    rows = table(optimization_cells(study or StudyConfig()))
    for place, name in enumerate(OPTIMIZATIONS):
        key = name.replace(" ", "_")
        if key in numbers:
            rows.loc[place, ["tokens_per_second", "peak_memory_bytes"]] = numbers[key]
    return rows


def test_optimizations_as_the_report_found_them():
    rows = optimized(baseline=(3731, 26e9), checkpointing=(3119, 19e9), fused_attention=(4000, 23e9), both=(3300, 17e9))
    text = levers.optimizations_answer(rows)
    assert "Checkpointing changes peak memory by **−26.9%** and tokens per second by **−16.4%**" in text
    assert "memory agrees (−26.9% there), throughput agrees (−16.4% there)" in text
    assert "memory agrees (−11.5% there), throughput agrees (+7.0% there)" in text
    assert "checkpointing saves more memory and fused attention is the faster: the first is the lever" in text


def test_optimizations_that_turn_out_otherwise():
    rows = optimized(baseline=(1000, 30e9), checkpointing=(700, 9e9), fused_attention=(800, 20e9), both=(2000, 8e9))
    text = levers.optimizations_answer(rows)
    assert "memory changes more (−26.9% there), throughput changes more (−16.4% there)" in text
    assert "throughput goes the other way (+7.0% there)" in text
    assert "Both together change peak memory by **−73.3%** and tokens per second by **+100.0%**." in text
    fast = optimized(baseline=(1000, 30e9), checkpointing=(700, 20e9), fused_attention=(1500, 9e9))
    assert "nothing speaks for the other alone" in levers.optimizations_answer(fast)


def test_optimizations_without_a_baseline_or_memory():
    text = levers.optimizations_answer(failed(optimized(), 0))
    assert "The baseline ended with: out of memory, so there is nothing to compare with." in text
    assert "Checkpointing, fused attention and both ran all the same." in text
    assert "The baseline was not measured" in levers.optimizations_answer(optimized().iloc[1:])
    text = levers.optimizations_answer(failed(optimized(), 2))
    assert "Fused attention was not measured (out of memory)." in text
    assert "Of the two" not in text
    cpu = optimized(SMALL).assign(device="CPU", peak_memory_bytes=None)
    text = levers.optimizations_answer(cpu)
    assert answers.NO_MEMORY in text
    assert "cannot be held against these" in text
    assert "agrees" not in text


FIGURES = {
    "batch": (batch_figure, batch_cells),
    "context": (context_figure, context_cells),
    "optimizations": (optimizations_figure, optimization_cells),
}


@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("name", list(FIGURES))
def test_figures_draw_what_is_known(name, memory):
    use_style()
    draw, cells = FIGURES[name]
    rows = failed(table(cells(StudyConfig())), 3)
    figure = draw(rows if memory else rows.assign(peak_memory_bytes=None))
    FigureCanvasAgg(figure).draw()
    assert len(figure.axes) == (2 if memory else 1)
    for axes in figure.axes:
        assert [text.get_text() for text in axes.texts].count("out of memory") == 1
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert box.x0 >= -0.01
    assert box.x1 <= width + 0.01
    assert box.y1 <= height + 0.01


def test_bars_have_the_height_of_the_numbers():
    use_style()
    speed, memory = optimizations_figure(optimized(baseline=(1000, 30e9), checkpointing=(700, 9e9))).axes
    assert [bar.get_height() for bar in speed.patches][:2] == [1000, 700]
    assert [bar.get_height() for bar in memory.patches][:2] == [30, 9]
    assert speed.texts[0].get_text() == "−30.0%"


def test_why_both_optimizations_save_no_more_than_one_is_said_only_where_it_is_so():
    rows = optimized()
    memory = rows["peak_memory_bytes"].tolist()
    rows["peak_memory_bytes"] = [memory[0], memory[1], memory[2], memory[1]]
    text = levers.optimizations_answer(rows, StudyConfig())
    assert "Both together save no more memory than checkpointing alone" in text
    assert "lies in the loss (cross_entropy, exp)" in text
    assert "save no more" not in levers.optimizations_answer(rows)
    rows["peak_memory_bytes"] = [memory[0], memory[1], memory[2], memory[1] // 2]
    assert "save no more" not in levers.optimizations_answer(rows, StudyConfig())
