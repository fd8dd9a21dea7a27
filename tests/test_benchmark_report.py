"""Answers and figures of notebook 04 on synthetic tables: other numbers, other sentences."""

import math
import tempfile

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from lmcore.config import MODEL_SIZES, to_dict
from lmcore.profiling import timing
from lmcore.profiling.components import components_table
from lmcore.profiling.workload import PHASES, case_grid, workload_config
from lmcore.workbook.report import tables
from lmcore.workbook.report.benchmark import answers, figures, roofline, views, warmups
from lmcore.workbook.report.benchmark.pace import launches_set_pace
from lmcore.workbook.report.benchmark.roofline_figure import roofline_figure
from lmcore.workbook.report.figures import use_style
from lmcore.workbook.report.tables import write_results

OOM = (
    "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 1 MiB is free."
)


@pytest.fixture(scope="module", autouse=True)
def style():
    use_style()


def record(name, config, walls, cuda=True, device="NVIDIA H200", split=(0.3, 0.02, 0.6, 0.08), allocations=0):
    """A record whose steps, warm-ups first, take `walls` seconds; None: out of memory."""
    environment = {"device": device, "torch": "2"}
    head = {"cell": name, "config": to_dict(config), "environment": environment}
    if walls is None:
        return head | {"outcome": "out of memory", "reason": OOM, "result": None}
    many = {"forward": 1, "forward_backward": 3, "train_step": 4}[config.passes]
    samples = [
        {
            "wall": wall,
            "cuda": 0.99 * wall if cuda else None,
            **dict.fromkeys(PHASES),
            **{phase: wall * share for phase, share in zip(PHASES[:many], split, strict=False)},
            "warmup": number < config.warmup_steps,
            "device_allocations": (allocations if number == 0 else 0) if cuda else None,
            "page_faults": 900 if number == 0 else 1,
        }
        for number, wall in enumerate(walls)
    ]
    result = {"device": device, "samples": samples, "peak_memory_bytes": 10**9 if cuda else None}
    return head | {"outcome": "complete", "reason": None, "result": result}


def written(table):
    """The table as a notebook has it: through a results file, which leaves numbers of numpy's, and NaN for None."""
    with tempfile.TemporaryDirectory() as folder:
        return write_results(table, f"{folder}/table.json", {})


def timing_table(records):
    return written(timing.timing_table(records))


def samples_table(records):
    return written(timing.samples_table(records))


def grid(sizes=("small", "2.7b"), contexts=(256,), precisions=("fp32",), seconds=1.0, lost=(), noise=0.001, **options):
    cells = case_grid(sizes, contexts, precisions, warmup_steps=1, steps=4)
    far = {"forward": 1, "forward_backward": 3, "train_step": 4}
    records = {}
    for name, config in cells.items():
        base = seconds * far[config.passes] * MODEL_SIZES[config.size]["d_model"] * config.model.context_length / 2**18
        walls = None if name in lost else [base * (1 + noise * shift) for shift in (9, -1, 1, -1, 1)]
        records[name] = record(name, config, walls, **options)
    return records


def test_timings_of_several_sizes_with_one_that_does_not_fit():
    table = timing_table(grid(lost=("2.7b-256-fp32-train_step",)))
    text = answers.timings_answer(table, 256)
    assert "mean ± standard deviation of 4 steps after 1 warm-up)" in text
    assert "| small" in text
    assert "| out of memory" in text
    assert "Out of memory, and so without a time: `2.7b-256-fp32-train_step` (CUDA out of memory. Tried to" in text
    assert "A forward pass takes from **750 ms** (`small`) to **2.50 s** (`2.7b`)." in text
    assert "takes 2.00 times as long as the forward pass of the same steps: about the two that the FLOPs say" in text
    assert "The standard deviation is small everywhere" in text
    assert "The clocks agree" in text
    assert "CPU" not in text


def test_timings_of_one_size_on_a_cpu():
    records = grid(("smoke",), device="CPU", cuda=False, noise=0.4, split=(0.2, 0.02, 0.7, 0.08))
    text = answers.timings_answer(timing_table(records), 256)
    assert "**62.5 ms** (`smoke`)." in text
    assert "takes 3.50 times as long as the forward pass of the same steps: more than the two" in text
    assert "The timings scatter widely" in text
    assert "There is no CUDA device, so there is one clock here" in text
    assert "out of memory" not in text.lower()
    less = grid(("smoke",), split=(0.5, 0.02, 0.4))
    assert (
        "takes 0.80 times as long as the forward pass of the same steps: less than the two"
        in answers.timings_answer(timing_table(less), 256)
    )


def test_timings_without_any():
    table = timing_table(grid(("2.7b",), lost=tuple(grid(("2.7b",)))))
    text = answers.timings_answer(table, 256)
    assert text.startswith("No cell at context 256 in fp32 was measured. Out of memory")
    assert "nan" not in text
    assert "found 3 that cannot be" in answers.script_answer(table)
    assert answers.utilization_answer(table, 256, "train_step").startswith("No training step at context 256")
    forward_only = timing_table(grid(("small",), lost=("small-256-fp32-forward_backward", "small-256-fp32-train_step")))
    text = answers.timings_answer(forward_only, 256)
    assert "A forward pass takes" in text
    assert "A backward pass" not in text


def test_launches_that_set_the_pace():
    split = (0.4, 0.02, 0.5, 0.08)
    steady = grid(("small", "2.7b"), contexts=(256, 512), split=split)
    assert "takes 1.25 times as long as the forward pass of the same steps: less than the two" in (
        answers.timings_answer(timing_table(steady), 256)
    )
    flat = steady | grid(("small",), contexts=(512,), seconds=0.5, split=(0.3, 0.02, 0.6, 0.08))
    text = answers.timings_answer(timing_table(flat), 256)
    assert "where the GPU computes longer than the host launches (`2.7b`) it is **1.25**" in text
    assert "in `small`, whose steps scatter or take hardly longer at the next context" in text
    scattered = answers.timings_answer(timing_table(grid(split=split, noise=0.1)), 256)
    assert "at each of these sizes steps scatter" in scattered
    assert "GPU" not in answers.timings_answer(
        timing_table(grid(split=split, noise=0.1, cuda=False, device="CPU")), 256
    )


def test_the_ratio_is_that_of_the_means_in_the_row():
    table = timing_table(grid(("small",)))
    table.loc[table["passes"] == "forward_backward", ["backward_mean", "forward_mean"]] = [0.9, 0.3]
    row = next(line for line in answers.timings_answer(table, 256).splitlines() if line.startswith("| small"))
    cells = [cell.strip() for cell in row.split("|")]
    assert (cells[5][:3], cells[6][:3], cells[7]) == ("900", "300", "3.00")


def test_an_optimizer_that_does_not_grow():
    table = timing_table(grid(contexts=(128, 512)))
    steps = table["passes"] == "train_step"
    table.loc[steps, "wall_median"] -= table.loc[steps, "optimizer_median"] - 0.5
    table.loc[steps, "optimizer_median"] = 0.5
    text = answers.contexts_answer(table, "train_step")
    share = 0.5 / table.loc[steps & (table["size"] == "2.7b") & (table["context_length"] == 128), "wall_median"].iloc[0]
    assert (
        f"the optimizer, **{100 * share:.2g}%** of the step of `2.7b` at 128. Without it the time grows **4.0 ×**"
        in text
    )
    assert "time without optimizer" in text
    assert "optimizer" not in answers.contexts_answer(table)


def test_clocks_that_differ():
    records = grid(("small",))
    for one in records.values():
        for step in one["result"]["samples"]:
            step["cuda"] = step["wall"] / 2
    assert "The clocks differ by up to 50%" in answers.clocks_sentence(timing_table(records))


def test_contexts():
    table = timing_table(grid(contexts=(128, 512), lost=("2.7b-512-fp32-forward",)))
    text = answers.contexts_answer(table)
    row = next(line for line in text.splitlines() if line.startswith("| small"))
    assert [cell.strip() for cell in row.split("|")[2:4]] == ["128", "512"]
    assert "4.0 ×" in row
    assert "| 2.7b" not in text
    assert "`2.7b-512-fp32-forward`" in text
    one = timing_table(grid(contexts=(128,)))
    assert answers.contexts_answer(one) == "No size was measured at more than one context."
    slower = timing_table(grid(("small",), contexts=(128, 512)) | grid(("small",), contexts=(1024,), seconds=9))
    assert "Time that grows more than the FLOPs" in answers.contexts_answer(slower)


def test_utilization_with_and_without_a_known_peak():
    table = timing_table(grid(precisions=("fp32", "bf16"), lost=("2.7b-256-bf16-train_step",)))
    text = answers.utilization_answer(table, 256, "train_step")
    assert "in brackets MFU" in text
    assert "fp32: from" in text
    assert "out of memory" in text
    unknown = answers.utilization_answer(timing_table(grid(device="Chip A")), 256, "train_step")
    assert "No peak is known for this device (Chip A), and so no MFU is given." in unknown
    assert "%" not in unknown


def warm(first, second=1.0, passes="train_step", **options):
    cells = {
        f"small-256-warm{n}": workload_config("small", warmup_steps=n, steps=6, passes=passes) for n in (0, 1, 2, 5)
    }
    wobble = [1.0, 1.01, 0.99, 1.0, 1.01, 0.99, 1.0, 1.01, 0.99, 1.0]
    return {
        name: record(name, config, [first, second, *wobble][: config.warmup_steps + 6], **options)
        for name, config in cells.items()
    }


def test_warmups_that_matter():
    records = warm(21.0, 2.0, allocations=40)
    table = timing_table(records)
    text = warmups.warmup_answer(table, samples_table(records))
    assert "the first step takes **21 times** the median" in text
    assert "settles at step 3: the allocator asked the driver for memory 40 times in the first step, never in" in text
    assert "after 1 (standard deviation" in text
    assert "cuBLAS" in text
    assert "compiles" not in text
    assert [row.first > 2 for row in warmups.warmup_table(table, samples_table(records)).itertuples()][1:] == [
        False
    ] * 3


def test_warmups_that_do_not_matter_on_a_cpu():
    records = warm(1.02, cuda=False, device="CPU")
    text = warmups.warmup_answer(timing_table(records), samples_table(records))
    assert "takes **1.0 times** the median, so that here it hardly matters." in text
    assert "the process touched new pages of memory 900 times in the first step, once in the second" in text
    assert "cuBLAS" not in text
    assert "CUDA context" not in text
    lost = {"small-256-warm0": record("small-256-warm0", workload_config("small", warmup_steps=0), None)}
    assert warmups.warmup_answer(timing_table(lost), samples_table(lost)).startswith("No cell was measured. Out of")


def test_where_a_series_settles():
    assert warmups.settled_at(pd.Series([9.0, 3.0, 1.05, 1.0, 1.0, 1.0])) == 3
    assert warmups.settled_at(pd.Series([1.0, 1.0])) == 1


def parts(attention=2.0, ffn=1.0, gate=0.1, softmax=1.0, issue=None, device="CPU", size="small", precision="fp32"):
    """A table of components: FLOPs of 1 for attention and 2 for FFN, seconds as given."""
    name, config = f"{size}-256-{precision}", workload_config(size, precision=precision)
    rows = [
        ("Q, K, V projections", "attention", "matmul", "forward", 1e12, 1e9, 0.5),
        ("scale, mask, softmax", "attention", "elementwise", "forward", 1e8, 1e8, softmax),
        ("W2", "ffn", "matmul", "forward", 2e12, 1e9, 0.5),
        ("SiLU and gate", "ffn", "elementwise", "forward", 1e8, 1e8, gate),
        ("AdamW", "block", "elementwise", "update", 1e8, 1e8, 1.0),
        ("attention", "attention", "whole", "forward", 1e12, 1e9, attention),
        ("attention", "attention", "whole", "forward + backward", 3e12, 3e9, 3 * attention),
        ("feed-forward network", "ffn", "whole", "forward", 2e12, 1e9, ffn),
        ("feed-forward network", "ffn", "whole", "forward + backward", 6e12, 3e9, 3 * ffn),
    ]
    keys = ("component", "part_of", "kind", "direction", "flops", "bytes", "seconds")
    components = [dict(zip(keys, row, strict=True)) | {"count": 2, "issue_seconds": issue} for row in rows]
    roofs = {"peak_flops_per_second": 4e12, "peak_bytes_per_second": 4e10}
    result = {"device": device, "ceilings": roofs, "components": components}
    return written(components_table({name: {"cell": name, "config": to_dict(config), "result": result}}))


def test_ffn_slower_than_flops_say_beside_attention():
    text = roofline.ffn_attention_answer(parts())
    row = next(line for line in text.splitlines() if "| forward " in line)
    assert [cell.strip() for cell in row.split("|")[5:7]] == ["0.50", "2.00"]
    assert "Timed forward, the FFN takes **0.25** of what the FLOPs would give it" in text
    assert "are 67% of the attention's time; SiLU and gate are 17% of the FFN's" in text
    assert "The FFN's matrix products run **2.00 times** as fast as the attention's: they are larger" in text
    assert "launch" not in text


def test_ffn_as_flops_say_and_above():
    assert "they do as the FLOPs say" in roofline.ffn_attention_answer(parts(attention=1.0, ffn=2.0))
    above = roofline.ffn_attention_answer(parts(attention=1.0, ffn=6.0))
    assert "Timed forward, the FFN takes **3.00 times** what the FLOPs would give it" in above
    several = pd.concat([parts(attention=1.0, ffn=6.0), parts(attention=6.0, size="xl", precision="bf16")])
    text = roofline.ffn_attention_answer(several)
    assert "is between 0.08 and 3.00 times that of the FLOPs" in text
    assert "| bf16" in text
    assert roofline.ffn_attention_answer(parts().iloc[:0]) == "No components were measured."


def test_launches_that_take_longer_than_the_work():
    slow = roofline.ffn_attention_answer(parts(issue=5.0, device="NVIDIA H200"))
    assert (
        "longer to launch the attention than the GPU to compute it in fp32 for `small` (most so 5.00 s against" in slow
    )
    assert slow.endswith("so in an eager model of such blocks the launches may set the pace.")
    both = [parts(issue=0.1), parts(issue=5.0, size="xl", precision="bf16")]
    assert "in fp32 for no size and in bf16 for `xl` (most so" in roofline.ffn_attention_answer(pd.concat(both))
    fast = roofline.ffn_attention_answer(parts(issue=0.1, device="NVIDIA H200"))
    assert "The host launches the attention faster than the GPU computes it." in fast


def test_roofline_sentences():
    text = roofline.roofline_answer(parts())
    assert "reaches **4.00 TFLOP/s** and a large copy **40.0 GB/s**: below 100 FLOPs for each byte" in text
    assert "holds for scale, mask, softmax, SiLU and gate and AdamW" in text
    assert "At 70.0% of the roof or more: W2 (100%)." in text
    assert "Above it" not in text
    assert "fusing" in text
    above = roofline.roofline_answer(parts(gate=0.001))
    assert "Above it: SiLU and gate (250%), as caches are faster" in above
    assert roofline.roofline_answer(parts().iloc[:0]).startswith("No components")
    table = roofline.roofline_table(parts())
    assert "(250%)" not in table
    assert "times a step" in table
    assert next(line for line in table.splitlines() if "AdamW" in line).split("|")[3].strip() == "2"


@pytest.mark.parametrize(
    ("seconds", "words"), [(4.2, "100% of the 4.20 s of a forward pass."), (9.0, "waiting"), (2.0, "cache")]
)
def test_components_added_up(seconds, words):
    assert words in roofline.forward_sum(parts(), seconds)  # (0.5 + 1 + 0.5 + 0.1) twice
    assert roofline.forward_sum(parts(), None) == views.MISSING


def test_tables_for_readers():
    table = timing_table(grid(lost=("2.7b-256-fp32-train_step",)))
    shown = views.readable(table)
    assert shown.equals(views.readable(timing.timing_table(grid(lost=("2.7b-256-fp32-train_step",)))))
    assert "context" not in shown
    assert shown["wall clock (ms)"].iloc[-1] == "out of memory"
    assert "nan" not in shown.to_markdown() + shown.to_latex()
    assert "MFU" not in views.readable(timing_table(grid(device="Chip A")))
    assert views.spread(0.0345678, 0.000221) == "34.6 ± 0.22"
    assert views.spread(0.5, None) == "500"
    assert views.spread(None, None) == views.MISSING
    assert [views.rate(value) for value in (2.5e12, 3e10, None)] == ["2.50 TFLOP/s", "30.0 GFLOP/s", views.MISSING]
    sources = tables.provenance_of_cells(grid(("small",)))
    assert (sources["device"], sources["cells"]) == ("NVIDIA H200", 3)


def test_readers_are_told_of_fused_operations():
    """Of plain ones beside them only, as in tables from before there was a choice."""
    plain = timing_table(grid(("small",)))
    records = grid(("small",))
    fused = timing_table({name: r | {"config": r["config"] | {"ops": "fused"}} for name, r in records.items()})
    assert plain["ops"].unique().tolist() == ["plain"]
    assert views.readable(plain).equals(views.readable(plain.drop(columns="ops")))
    assert "ops" not in views.readable(plain)
    assert "ops" not in views.readable(plain[:1])
    assert views.readable(fused)["ops"].unique().tolist() == ["fused"]
    both = pd.concat([plain.drop(columns="ops"), fused], ignore_index=True)
    assert views.readable(both)["ops"].tolist() == ["plain"] * 3 + ["fused"] * 3
    assert views.readable(both)["attention"].tolist() == ["plain"] * 3 + ["flash"] * 3


def test_the_pace_of_plain_cells_is_not_measured_by_fused_ones():
    """Time that hardly grows from one cell to the next larger one is the host's, if the cells are alike."""
    small, large = (timing_table(grid(("small",), contexts=(context,), noise=1e-6)) for context in (128, 256))
    small = small.assign(attention="flash")
    large = large.assign(attention="flash", wall_mean=small["wall_mean"], optimizer_mean=small["optimizer_mean"])
    for ops, paced in {"plain": True, "fused": False}.items():
        table = pd.concat([small, large.assign(ops=ops)], ignore_index=True)
        assert launches_set_pace(table.iloc[0].to_dict(), table) is paced


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("machine", ["smoke", "gpu", "nothing fits"])
def test_figures_can_be_drawn(machine):
    if machine == "gpu":
        sizes, contexts = ("tinystories", "small", "medium", "large", "xl", "2.7b", "2.35b"), (128, 256, 512, 1024)
        lost = ("2.7b-1024-fp32-train_step", "xl-1024-fp32-train_step", "2.7b-256-bf16-train_step")
        table = timing_table(grid(sizes, contexts, ("fp32", "bf16", "tf32", "fp16"), lost=lost))
    elif machine == "smoke":
        table = timing_table(grid(("smoke",), cuda=False, device="CPU"))
    else:
        table = timing_table(grid(("2.7b",), lost=tuple(grid(("2.7b",)))))
    samples = samples_table(warm(20.0))
    for figure in (
        figures.times_figure(table, 256),
        figures.contexts_figure(table),
        figures.warmups_figure(samples),
        figures.utilization_figure(table, 256, "train_step"),
        figures.ffn_attention_figure(parts()),
        roofline_figure(parts()),
    ):
        FigureCanvasAgg(figure).draw()
        width, height = figure.get_size_inches()
        box = figure.get_tightbbox()
        assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= -0.05, "a label is cut"
        assert all(np.isfinite(axes.get_xlim()).all() and axes.get_position().width > 0.1 for axes in figure.axes)
    assert math.isclose(figures.times_figure(table, 256).get_size_inches()[0], 6.6)


@pytest.mark.parametrize(
    ("means", "words", "absent"),
    [
        (
            (1.0, 0.75, 0.57, 0.65),
            ["above it by 15.4% after 1", "below it by 12.3% after 2", "it is the processes"],
            [],
        ),
        ((1.0, 0.75, 0.70, 0.65), ["above it by 15.4% after 1", "above it by 7.7% after 2"], ["the processes"]),
        ((1.0, 0.65, 0.65, 0.65), ["by 0.0% after 1"], ["times as large"]),
    ],
)
def test_few_warmups_against_the_most(means, words, absent):
    std = 0.001 if "times as large" in absent else 0.05
    rows = [
        {"size": "small", "warmup_steps": steps, "mean": mean, "std": std}
        for steps, mean in zip((0, 1, 2, 5), means, strict=True)
    ]
    text = warmups.few_sentence(pd.DataFrame(rows))
    assert all(word in text for word in words)
    assert not any(word in text for word in absent)
