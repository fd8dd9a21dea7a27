import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from nsys_profiles import ADAM, COPY, CPU, GEMM, GEMM_NT, GPU, MUL, SUM, entry, grid, record, timings

from lmcore.accounting import forward_flops_by_component
from lmcore.errors import UserError
from lmcore.profiling.nsys.tool import Nsys
from lmcore.profiling.nsys.trace import Trace, build_trace
from lmcore.profiling.workload import workload_config
from lmcore.workbook.report.figures import use_style
from lmcore.workbook.report.nsys import answers, figures, kernels, pitfalls, profiles, shares, tables, wording
from lmcore.workbook.report.nsys.timeline import binned, block_window, busy_share, fitting, timeline_figure
from lmcore.workbook.report.tables import write_results


@pytest.fixture(scope="module", autouse=True)
def style():
    use_style()


def everything(records: dict, ratio: float | None = 1.0) -> tuple:
    """All tables, as they come back from results files; the benchmark takes `ratio` times as long as the profile, None:
    there is none."""
    table = tables.profile_table(records)
    rows = timings(records, ratio) if ratio else timings(records)[:0]
    columns = list(timings(grid())[0])
    table = tables.with_timings(table, pd.DataFrame(rows, columns=columns))
    every = (table, tables.kernel_rows(records), tables.kind_rows(records), tables.attention_rows(records))
    with tempfile.TemporaryDirectory() as folder:
        return tuple(write_results(each, Path(folder) / "table.json", {}) for each in every)


def texts(records: dict, ratio: float | None = 1.0) -> list[str]:
    """The answers to (a) to (e)."""
    table, kernel, kind, attention = everything(records, ratio)
    return [
        answers.forward_time_answer(table),
        kernels.top_kernel_answer(table, kernel),
        kernels.other_kernels_answer(table, kernel, kind),
        shares.training_answer(table, kind),
        shares.softmax_answer(table, attention),
    ]


def with_gaps() -> dict:
    """A grid with a cell that does not fit at all, and one whose training step does not."""
    late = record("2.7b", 512, training="out of memory")
    never = record("xl", 1024, outcome="out of memory")
    return grid() | {late["cell"]: late, never["cell"]: never}


def test_a_part_is_summed_over_the_blocks_of_a_pass():
    made = record("small", 128, steps=4)
    part = profiles.part(made, "inference", "ffn")
    layers = 12
    assert part.kinds["matmul"][0] == pytest.approx(3 * layers)
    one = made["result"]["inference"]["ranges"]["inference/forward/block */ffn"]
    assert part.gpu_seconds == pytest.approx(layers * one["gpu_seconds"])
    assert part.kernels["calls"].sum() == pytest.approx(5 * layers)
    assert part.kernel_seconds == pytest.approx(part.kernels["seconds"].sum())
    assert part.share("matmul") + part.share("elementwise") == pytest.approx(1)
    assert profiles.part(made, "inference", "no such range") is None


def test_the_parts_of_a_training_step_make_up_the_step():
    made = record("small", 256)
    step = profiles.part(made, "training step")
    phases = [profiles.part(made, "training step", name) for name in profiles.PASS_RANGES]
    assert step.kernel_seconds == pytest.approx(sum(phase.kernel_seconds for phase in phases))


def test_profile_table_keeps_what_did_not_fit():
    table, *_ = everything(with_gaps())
    by_cell = table.set_index("cell")
    assert by_cell.loc["xl-1024-fp32", "outcome"] == "out of memory"
    assert pd.isna(by_cell.loc["xl-1024-fp32", "inference_seconds"])
    late = by_cell.loc["2.7b-512-fp32"]
    assert late["training_outcome"] == "out of memory"
    assert late["inference_matmul_share"] > 0
    assert pd.isna(late["training_seconds"])
    assert late["gpu"]
    done = by_cell.loc["small-128-fp32"]
    assert done["training_busy_seconds"] + done["training_idle_seconds"] == pytest.approx(done["training_gpu_seconds"])


def test_kernels_of_forward_and_backward_leave_out_the_optimizer():
    _, kernel, kind, _ = everything(grid(("small",), (128,)))
    both = kernel[kernel["range"] == "forward + backward"]
    assert "optimizer" not in set(both["kind"])
    assert "optimizer" in set(kernel.loc[kernel["range"] == "training", "kind"])
    for label, rows in kind.groupby("range"):
        assert rows["share"].sum() == pytest.approx(1), label
    calls = kernel.set_index(["range", "name"])["calls"]
    top = both.iloc[0]["name"]
    assert calls["forward + backward", top] == calls["forward", top] + calls["backward", top]


def test_flops_and_bytes_of_attention():
    made = record("small", 512)
    config = workload_config("small", 512)
    flops = forward_flops_by_component(config.model, 4)
    rows = tables.attention_rows({"a": made}).set_index("part")
    scores = 12 * 4 * 12 * 512**2
    assert rows.loc["scores", "flops"] == flops["scores"]
    assert rows.loc["final matmul", "flops"] == flops["weighted_sum"]
    assert rows.loc["softmax", "flops"] == 5 * scores
    assert rows.loc["softmax", "bytes"] == 32 * scores
    assert rows.loc["softmax", "intensity"] == pytest.approx(5 / 32)
    assert rows.loc["scores", "bytes"] == 4 * 12 * 4 * 12 * (512**2 + 2 * 512 * 64)
    assert rows["share_of_time"].sum() == pytest.approx(1)
    assert rows["share_of_flops"].sum() == pytest.approx(1)
    half = tables.attention_rows({"a": record("small", 512, "bf16")}).set_index("part")
    assert half.loc["softmax", "bytes"] == 44 * scores
    assert half.loc["scores", "bytes"] == rows.loc["scores", "bytes"] / 2


def test_a_fused_attention_has_no_parts():
    made = record("small", 512)
    ranges = made["result"]["inference"]["ranges"]
    made["result"]["inference"]["ranges"] = {path: row for path, row in ranges.items() if "dot product" not in path}
    table, _, _, attention = everything({"a": made})
    assert not len(attention)
    assert "no parts of attention" in shares.softmax_answer(table, attention)


def test_timings_are_joined_on_what_was_run():
    records = grid(("small",), (128, 256))
    rows = timings(records)
    rows += [rows[0] | {"compile": True, "wall_median": 1.0}, rows[0] | {"passes": "train_step", "wall_median": 2.0}]
    rows += [rows[0] | {"ops": "fused", "warmup_steps": 99, "wall_median": 5.0}]
    rows += [rows[0] | {"warmup_steps": 0, "wall_median": 3.0}, rows[1] | {"precision": "bf16", "wall_median": 4.0}]
    table = tables.with_timings(tables.profile_table(records), pd.DataFrame(rows))
    assert table["benchmark_seconds"].tolist() == [rows[0]["wall_median"], rows[1]["wall_median"]]
    other = pd.DataFrame([rows[0] | {"batch_size": 1}])
    assert tables.with_timings(tables.profile_table(records), other)["benchmark_seconds"].isna().all()


@pytest.mark.parametrize(
    ("changes", "ratio", "there", "absent"),
    [
        ({}, 1.0, ["**match** within 5%.", "it sets the pace"], ["idle for", "not match"]),
        (
            {"idle": 0.5},
            0.5,
            ["**not match** within 5% anywhere", "the CPU cannot launch kernels fast enough", "The CPU sets the pace"],
            ["nearly throughout"],
        ),
        ({}, 0.5, ["the GPU is busy nearly throughout: there the profiler's load"], ["cannot launch"]),
        ({}, 2.0, ["Faster in the profile than in the benchmark are"], ["cannot launch", "Slower"]),
        ({}, None, ["there is no benchmark of the same cells"], ["match"]),
    ],
)
def test_forward_time_against_the_benchmark(changes, ratio, there, absent):
    text = texts(grid(**changes), ratio)[0]
    for sentence in there:
        assert sentence in text
    for sentence in absent:
        assert sentence not in text


def test_some_cells_match():
    records = grid(("small",), (128, 256, 512))
    rows = timings(records)
    rows[0]["wall_median"] *= 0.8
    table = tables.with_timings(tables.profile_table(records), pd.DataFrame(rows))
    text = answers.forward_time_answer(table)
    assert "**match** within 5% in 2 of them." in text
    assert "Slower in the profile is also small at context 128," in text


def test_what_did_not_fit_is_named():
    time, _, _, training, _ = texts(with_gaps())
    for text in (time, training):
        assert "**Out of memory** even in the forward pass: xl at context 1,024." in text
        assert "the training step runs **out of memory**: 2.7b at context 512." in text
    assert "All cells fit into the memory." in texts(grid())[0]
    inference = texts(grid(training=None))
    assert "No cell ran out of memory." in inference[0]
    assert "No training step could be profiled" in inference[3]
    assert "No backward pass was profiled" in inference[1]


def test_nothing_could_be_profiled():
    for text in texts(grid(outcome="out of memory")):
        assert "No cell could be profiled" in text or "No training step could be profiled" in text
        assert "**Out of memory** even in the forward pass: small at context 128" in text


def test_failures_say_why():
    records = grid(("small",), (128,))
    records["x"] = record("large", 128, outcome="failed") | {"cell": "x", "reason": "nsys was ended."}
    assert "Failed: large at context 128 (nsys was ended.)." in texts(records)[0]


def test_the_top_kernel_and_its_calls():
    text = texts(grid(("small",), (128,)))[1]
    assert "is invoked **85 times** in one pass, 7 in each of 12 blocks and 1 more" in text
    assert "(attention 48, ffn 36, lm head 1)" in text
    assert "It is **the same kernel** with the backward pass, in the one cell." in text


@pytest.mark.parametrize(
    ("top", "sentence"),
    [
        (GEMM_NT, "**another kernel** in both cells, again a matrix multiplication"),
        (SUM, "**another kernel** in both cells: a reduction."),
    ],
)
def test_another_kernel_leads_with_the_backward_pass(top, sentence):
    records = grid(("small",), (128, 256), backward_top=top, speed=60e12)
    for made in records.values():
        phases = made["result"]["training"]["ranges"]
        phases["training step/backward"] = entry({top: (100, 1.0), MUL: (3, 0.1)}, 3)
    assert sentence in texts(records)[1]


def test_a_top_kernel_that_multiplies_nothing():
    text = texts(grid(("small",), (1024,), slow=1e11))[1]
    assert "forward pass is **an elementwise operation**, `vectorized elementwise (Mul)`" in text
    assert "is a matrix multiplication" not in text


def test_top_kernels_of_several_kinds_are_counted():
    records = grid(("small",), (128, 256))
    half = record("small", 256, "bf16")
    top = half["result"]["inference"]["ranges"]
    cast = ("void at::native::bfloat16_copy_kernel_cuda", *COPY[1:])
    top["inference"] = entry({cast: (30, 1.0), GEMM: (85, 0.5)}, 3)
    text = texts(records | {half["cell"]: half})[1]
    assert text.startswith("In 2 of 3 cells (fp32) the kernel with most cumulative time in the forward pass is **a mat")
    assert "in 1 (bf16) **a copy: autocast's casts of weights and activations**" in text
    assert "In bf16 copies take 66.7%, against" in texts(records | {half["cell"]: half})[2]
    assert "autocast" not in "".join(texts(records)[1:3])


def test_parts_of_the_calls_add_up_to_all():
    made = record("small", 128)
    ranges = made["result"]["inference"]["ranges"]
    ranges["inference/forward/block */ffn"]["kernels"] = []  # as where a list of kernels is cut
    assert "(attention 48, lm head 1, others 36)" in texts({"a": made | {"cell": "a"}})[1]
    many = [(f"k{number}", f"k{number}", "elementwise") for number in range(5)]
    ranges["inference/forward/block */ffn"] = entry({kernel: (1, 1.0) for kernel in many} | {GEMM: (3, 1e-9)}, 36)
    assert "(attention 48, ffn 36, lm head 1)" in texts({"a": made | {"cell": "a"}})[1]


def test_other_kernels_by_what_they_compute():
    text = texts(grid(("small",), (512,)))[2]
    assert "**multiplication** 14.4% (" in text
    assert "elementwise (14.4%) and softmax/reduction (2.0%)" in text
    quick = texts(grid(("small",), (512,), slow=1e15))[2]
    assert "stay below 1% each" in quick
    assert "multiplication** " not in quick


def test_the_share_of_matmuls_falls_rises_or_stays():
    falls = texts(grid())[3]
    assert "the share **falls** in all 4 cells, by 2.7 to 6.0 percentage points." in falls
    assert "optimizer 0.0% → 3.3%" in falls
    assert "By size, at context 512, the training step's share is small 79.7%, large 85.6%, rising throughout." in falls
    assert "By context, for large: 128: 87.6%, 512: 85.6%, falling throughout." in falls
    records = grid(("small",), (1024,), slow=3e11)
    ranges = records["small-1024-fp32"]["result"]["training"]["ranges"]
    ranges["training step"] = entry({GEMM_NT: (100, 1.0), ADAM: (3, 1e-4)}, 3)
    rises = texts(records)[3]
    assert "the share **rises** in the one cell" in rises
    ranges["training step"] = records["small-1024-fp32"]["result"]["inference"]["ranges"]["inference"]
    mixed = grid(("small",), (512,)) | {"b": record("small", 512, "bf16") | {"cell": "b"}}
    assert "(mean over" not in texts(mixed)[3]
    assert "from inference to training step: in fp32 " in texts(mixed)[3]
    assert "; in bf16 " in texts(mixed)[3]
    stays = texts(records)[3]
    assert "1 stay within a point" in stays
    assert "The shares of the other kinds hardly change." in stays


def test_the_softmax_against_the_products():
    text = texts(grid())[4]
    assert "**1.25 times** as long" in text
    assert "**0.0195 times** their FLOPs: it takes longer everywhere. For each FLOP it needs 64.0 times" in text
    assert "memory, not arithmetic, sets its time" in text
    quick = texts(grid(slow=1e15))[4]
    assert "it takes longer" not in quick
    assert "even needs less time than the products" in quick
    assert "The reason is arithmetic intensity" not in quick


def test_the_softmax_against_a_large_copy():
    table, _, _, attention = everything(grid(("small",), (512,)))
    rows = pd.DataFrame([{"device": "Chip A", "peak_bytes_per_second": 6e12}])
    ceiling = shares.copy_ceiling(rows, table)
    assert ceiling == 6e12
    assert shares.copy_ceiling(rows.assign(device="Chip B"), table) is None
    assert shares.copy_ceiling(pd.DataFrame(), table) is None
    assert "50% of the 6,000 GB/s of a large copy" in shares.softmax_answer(table, attention, ceiling)
    assert "large copy" not in shares.softmax_answer(table, attention)
    half = everything({"a": record("small", 512, "bf16")})
    assert "(in bf16 two more cast the scores to float32 and the result back)" in shares.softmax_answer(
        half[0], half[3]
    )


def test_the_softmax_by_context():
    records = grid(("small",), (128, 1024))
    attention = tables.attention_rows(records)
    short = (attention["context_length"] == 128) & attention["part"].isin(["scores", "final matmul"])
    attention.loc[short, "seconds"] *= 10
    text = shares.softmax_answer(tables.profile_table(records), attention)
    assert "128: 0.125, 1,024: 1.25" in text
    assert "64.0 times the scores" in text
    assert "the products' 6.40-fold: at short contexts the products are too small to fill the GPU" in text


def test_a_cpu_has_operators_and_no_gpu_time():
    for text in texts(grid(("smoke",), (32, 64), tool=CPU, speed=5e9, slow=2e9), 0.7):
        assert "kernel" not in text
        assert "GPU time" not in text
        assert "GPU idle" not in text
    time = texts(grid(("smoke",), (32,), tool=CPU), 0.7)[0]
    assert "there is no GPU whose time could be told" in time
    assert "on a CPU the profiler's note of every operator" in time
    assert "memory, not arithmetic" not in texts(grid(("smoke",), (32,), tool=CPU, slow=1e9))[4]


def test_words_for_kernels():
    assert wording.in_words("vectorized_elementwise_kernel (Mul)", "elementwise") == "multiplication"
    assert wording.in_words("reduce_kernel (Max)", "softmax/reduction") == "maxima"
    assert wording.in_words("aten::exp", "elementwise") == "exponentials and logarithms"
    assert wording.in_words("sgemm_tn", "matmul") == "matrix multiplication"
    assert wording.in_words("mystery", "elementwise") == "other elementwise"
    assert wording.in_words("mystery", "other") == "other"
    assert wording.in_words("elementwise_kernel", "elementwise", "void at::native::masked_fill_kernel") == "masking"
    masked = "void at::native::elementwise_kernel<128, 2, at::native::<unnamed>::masked_fill_kernel(at::TensorIter"
    assert wording.telling("elementwise_kernel", masked) == "elementwise_kernel (masked_fill)"
    assert wording.telling("elementwise_kernel (Mul)", masked) == "elementwise_kernel (Mul)"
    assert "masking" in wording.in_words("elementwise_kernel (masked_fill)", "elementwise")
    assert r"\|" in wording.markdown([{"name": "a|b"}])
    assert "precision" not in wording.markdown([{"precision": "fp32", "x": "1"}])
    assert "bf16" in wording.markdown([{"precision": "fp32", "x": "1"}, {"precision": "bf16", "x": "2"}])


def trace_of(thread: int, copies: tuple = ()) -> Trace:
    """Two passes of forward and backward; `thread` launches the backward pass's kernels, which run much later."""
    rows, ranges = [], []
    for step in range(2):
        begin = step * 10_000
        ranges += [("training step", begin, begin + 9000), ("forward", begin, begin + 1000)]
        ranges.append(("backward", begin + 1000, begin + 2000))
        for number in range(10):
            launch = begin + 100 + 200 * number - (number == 9)
            own = 1 if number < 5 else thread
            start = begin + 3000 + 500 * number
            rows.append(("gemm", start, start + 400, 7, 1, own, launch, -1))
    columns = ["name", "start", "end", "stream", "process", "thread", "launched_at", "bytes"]
    frame = pd.DataFrame([(*row, 1, 1) for row in ranges], columns=["name", "start", "end", "process", "thread"])
    work = pd.DataFrame([*rows, *copies], columns=columns)
    return build_trace("Nsight Systems 2025.3.1", work.assign(duration=work["end"] - work["start"]), frame)


def test_memory_copies_are_counted_for_each_pass():
    nothing = kernels.copies_text(trace_of(thread=1), {"training step": "training step"})
    assert nothing == "No memory copies were recorded."
    rows = [("device to device", 4000, 6000, -1, 1, 1, 150 + 10_000 * (n // 3), 1000) for n in range(6)]
    text = kernels.copies_text(trace_of(1, rows), {"training step": "training step"})
    assert [word.strip() for word in text.splitlines()[-1].split("|")[1:-1]] == [
        "training step", "device to device", "3", "3.00 KB", "6.00 µs", "2.00 µs"
    ]  # fmt: skip


def test_pitfalls_are_counted_in_the_trace():
    table = pitfalls.pitfalls(trace_of(thread=2)).set_index("question")
    assert table.loc["launched in backward", ["right", "hasty"]].tolist() == [10, 0]
    assert table.loc["belonging to backward", ["right", "hasty"]].tolist() == [10, 0]
    assert table.loc["work inside training step", "right"] == pytest.approx(18e-6)
    assert table.loc["work inside training step", "hasty"] == pytest.approx(22e-6)
    assert table.loc["time of the device's work in training step", "right"] == pytest.approx(8e-6)
    assert table.loc["time of the device's work in training step", "hasty"] == pytest.approx(9.8e-6)
    text = pitfalls.pitfalls_text(table.reset_index(), "Nsight Systems 2025.3.1", 2)
    assert text.startswith("In the 2 recorded steps together:")
    assert "finds 0 of 10 kernels of the backward pass (0.0%)" in text
    same = pitfalls.pitfalls_text(pitfalls.pitfalls(trace_of(thread=1)), "Nsight Systems 2025.3.1", 1)
    assert "come from the very thread that opened the range" in same


def rendered(figure) -> float:
    """Draws a figure; the share of its pixels that are not white."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return float((np.asarray(canvas.buffer_rgba())[..., :3].min(axis=2) < 250).mean())


@pytest.mark.parametrize(
    "records", [grid(), with_gaps(), grid(("smoke",), (32,), tool=CPU)], ids=["gpu", "gaps", "cpu"]
)
def test_figures_draw(records):
    table, _, kind, attention = everything(records)
    pairs = shares.softmax_pairs(attention)
    made = [
        figures.shares_figure(table, kind),
        figures.contexts_figure(table, kind),
        figures.attention_figure(attention, pairs),
        figures.idle_figure(table),
    ]
    for figure in made:
        assert rendered(figure) > 0.03


def test_a_figure_says_what_did_not_fit():
    table, _, kind, _ = everything(grid(("small",), (512,)) | {"x": record("2.7b", 512, training="out of memory")})
    figure = figures.shares_figure(table, kind)
    assert [text.get_text() for text in figure.axes[1].texts if "memory" in text.get_text()] == ["out of memory"]


@pytest.mark.parametrize("part", ["inference", "training"])
def test_the_timeline_draws(part):
    timeline = record("small", 128)["result"]["timeline"][part]
    figure = timeline_figure(timeline)
    assert rendered(figure) > 0.05
    whole, block = figure.axes
    assert whole.get_xlim() == (0.0, timeline["seconds"])
    assert block.get_xlim() == block_window(timeline["ranges"])
    assert {"attention", "ffn"} <= {text.get_text() for text in block.texts}
    bare = timeline | {"ranges": timeline["ranges"][:1]}
    assert len(timeline_figure(bare).axes) == 1


def piece(start: float, end: float, busy: float, kind: str = "matmul", stream: int = 7) -> dict:
    return {"start": start, "end": end, "busy": busy, "kind": kind, "stream": stream, "count": 1}


def test_the_timeline_is_as_full_as_the_gpu_is_busy():
    work = [piece(0, 1, 0.2), piece(1, 2, 1.0, "copy"), piece(3, 4, 1.0, stream=-1)]
    shares = binned(work[:2], 0.0, 4.0, bins=8)
    assert shares.sum(axis=0) == pytest.approx([0.2, 0.2, 1, 1, 0, 0, 0, 0])
    assert busy_share(work, 0.0, 4.0) == pytest.approx(0.3)  # the memory copy is no kernel's time
    title = timeline_figure({"seconds": 4.0, "ranges": [], "work": work}).axes[0].get_title()
    assert title == "the whole pass: GPU busy 30%"
    assert (
        "operators busy" in timeline_figure({"seconds": 4.0, "ranges": [], "work": work}, gpu=False).axes[0].get_title()
    )


def test_an_idle_gpu_leaves_its_lane_white():
    full, idle = (
        {"seconds": 4.0, "ranges": [], "work": [piece(0.01 * n, 0.01 * n + 0.01, busy) for n in range(400)]}
        for busy in (0.01, 0.001)
    )
    assert rendered(timeline_figure(full)) > rendered(timeline_figure(idle)) + 0.1


def test_labels_fit_their_ranges():
    assert fitting("computing softmax", 0.5) == "computing softmax"
    assert fitting("computing softmax", 0.1) == "softmax"
    assert fitting("block 12", 0.04) == "12"
    assert fitting("block 12", 0.001) is None


def test_the_report_says_which_tool_and_what_it_noted(monkeypatch):
    table, *_ = everything(with_gaps())
    text = answers.tools_text(table, ["A note.", "A note."])
    assert text.startswith(f"5 of 6 cells were profiled on Chip A, by {GPU}. (A version is that which an export names")
    assert text.endswith(" A note.")
    assert "export" not in answers.tools_text(everything(grid(("smoke",), (32,), tool=CPU))[0], [])
    monkeypatch.setenv("NSYS", "off")
    assert "Until then, the same tables are made by torch.profiler." in answers.nsys_text()
    monkeypatch.setattr(answers, "find_nsys", lambda: Nsys(Path("/bin/nsys"), "2025.3.1"))
    assert answers.nsys_text() == "Nsight Systems 2025.3.1 is here: /bin/nsys."


def test_phases_of_a_step():
    text = answers.phases_text(everything(grid(("small",), (128,)))[0])
    assert [word.strip() for word in text.splitlines()[0].split("|")[3:-1]] == [
        "forward", "loss", "backward", "optimizer", "whole step", "backward / forward"
    ]  # fmt: skip
    assert "No training step was profiled." in answers.phases_text(everything(grid(training=None))[0])


def test_a_short_backward_pass_is_explained_where_the_gpu_waits():
    records = grid(("small",), (128,))
    ranges = records["small-128-fp32"]["result"]["training"]["ranges"]
    assert "yet takes less time" not in answers.phases_text(everything(records)[0])
    ranges["training step/forward"] |= {"gpu_seconds": 10.0, "idle_seconds": 5.0, "busy_seconds": 5.0}
    ranges["training step/backward"] |= {"gpu_seconds": 9.0, "busy_seconds": 8.0}
    text = answers.phases_text(everything(records)[0])
    assert "in 1 of 1 cells (small at context 128): there the GPU is idle for 50.0% of the forward pass" in text
    assert "the backward pass takes 1.60 times as much" in text


@pytest.mark.parametrize(
    ("launch", "tool", "sentence"),
    [(0.3, GPU, "**CPU runs ahead**"), (1.0, GPU, "**CPU does not run ahead**"), (1.0, CPU, "operators on the CPU")],
)
def test_who_is_ahead_is_read_from_the_profile(launch, tool, sentence):
    made = record("small", 128, tool=tool, idle=0.5)
    ranges = made["result"]["inference"]["ranges"]
    ranges["inference/forward"]["seconds"] = launch * ranges["inference"]["gpu_seconds"]
    text = answers.launching_text(everything({"a": made})[0].iloc[0].to_dict())
    assert sentence in text


def test_only_cells_without_a_benchmark_are_timed():
    records = with_gaps()
    profile = tables.profile_table(records)
    assert tables.untimed(tables.with_timings(profile, pd.DataFrame())) == [
        "small-128-fp32", "small-512-fp32", "large-128-fp32", "large-512-fp32", "2.7b-512-fp32"
    ]  # fmt: skip
    rows = pd.DataFrame(timings(records))
    assert tables.untimed(tables.with_timings(profile, rows)) == []
    assert len(tables.untimed(tables.with_timings(profile, rows.assign(device="Chip B")))) == 5


def test_long_names_stay_different():
    names = ["short", "x" * 160, "x" * 1000 + "a", "x" * 1000 + "b"]
    kept = [tables.kept_name(name) for name in names]
    assert kept[:2] == names[:2]
    assert len(set(kept)) == 4
    assert max(map(len, kept)) == 160


def test_a_sweep_in_which_nothing_fits_ends_in_a_sentence():
    with pytest.raises(UserError, match=r"choose a smaller size or context \(small-128-fp32: CUDA out of memory"):
        tables.require_profiled(tables.profile_table(grid(outcome="out of memory")))
    tables.require_profiled(tables.profile_table(with_gaps()))


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x64x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4_execute_"
            "kernel__5x_cublas",
            "xmma gemm tn 128x64x8",
        ),
        ("cutlass_80_simt_sgemm_256x128_8x4_nn_align1", "cutlass sgemm nn 256x128"),
        ("vectorized_elementwise_kernel (bfloat16_copy)", "vectorized elementwise (bfloat16_co…"),
        ("elementwise_kernel (Div)", "elementwise (Div)"),
        ("aten::mm", "aten::mm"),
    ],
)
def test_names_of_kernels_fit_into_a_table(name, shown):
    assert wording.compact(name) == shown
