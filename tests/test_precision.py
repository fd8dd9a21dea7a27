import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lmcore.profiling import precision
from lmcore.profiling.precision import EXPERIMENTS, RMS, ROUNDED, RUNNING, WIDENED, Accumulation
from lmcore.profiling.workload import WorkloadConfig
from lmcore.workbook.report.benchmark import mixed_precision as mixed
from lmcore.workbook.report.benchmark import precision as answers
from lmcore.workbook.report.benchmark.precision_figures import accumulation_figure, layer_norm_figure
from lmcore.workbook.report.figures import use_style


@pytest.fixture(scope="module")
def sums() -> pd.DataFrame:
    return precision.accumulation_table()


@pytest.fixture(scope="module")
def norms() -> pd.DataFrame:
    return precision.layer_norm_table()


def test_the_handouts_sums_are_these_numbers(sums):
    assert sums["printed"].tolist() == [
        "tensor(10.0001)", "tensor(9.9531, dtype=torch.float16)", "tensor(10.0021)", "tensor(10.0021)"
    ]  # fmt: skip
    assert sums["result"].tolist() == [10.000133514404297, 9.953125, 10.00213623046875, 10.00213623046875]
    assert sums["same_as"].tolist() == [1, 2, 3, 3]


@pytest.mark.parametrize(("number", "kind"), [(0, np.float32), (1, np.float16)])
def test_sums_and_roundings_as_numpy_computes_them(sums, number, kind):
    row, total, rounded = sums.iloc[number], kind(0), 0
    for _ in range(1000):
        before, total = total, kind(total + kind(0.01))
        rounded += Fraction(float(before)) + Fraction(float(kind(0.01))) != Fraction(float(total))
    assert (row["result"], row["rounded"]) == (float(total), rounded)
    assert row["spacing"] == np.spacing(total)


def test_errors_of_storing_and_adding_are_the_whole_error(sums):
    for row in sums.to_dict("records"):
        assert row["error"] == pytest.approx(row["representation_error"] + row["accumulation_error"], abs=1e-12)
        assert row["error"] == pytest.approx(row["result"] - 10, abs=1e-12)
    assert sums["representation_error"].iloc[1] == pytest.approx(1000 * (float(np.float16(0.01)) - 0.01))
    assert sums.loc[2, "rounded"] == 0
    assert sums.loc[2, "accumulation_error"] == 0
    assert sums.loc[1, "worst_error"] == pytest.approx(0.5, abs=0.02)  # ten times what is left of it at the end


def test_the_course_ends_at_the_result(sums):
    course = precision.accumulation_course()
    ends = course[course["additions"] == 1000].set_index("experiment")["error"]
    assert ends.tolist() == sums["error"].tolist()
    assert (course[course["additions"] == 0]["error"] == 0).all()


def test_the_answer_on_sums_follows_the_experiments(sums):
    text = answers.accumulation_answer(sums)
    assert "`tensor(9.9531, dtype=torch.float16)`" in text
    assert "nearest comes fp32 into fp32" in text
    assert "furthest off is fp16 into fp16 (-0.047)" in text
    assert "Experiment 3 (fp16 into fp32) adds without any error" in text
    assert "Experiments 3 and 4 agree in every partial sum" in text
    assert "That is luck: on the way its sum is off by +0.5" in text
    other = answers.accumulation_answer(precision.accumulation_table([Accumulation("bf16", "bf16"), EXPERIMENTS[0]]))
    assert "furthest off is bf16 into bf16 (-6)" in other  # stalls at 4, where half a step is more than 0.01
    assert "added 0;" in other
    assert "luck" not in other
    assert "agree" not in other
    assert "fp16" not in other


def test_types_of_the_toy_model_on_the_cpu():
    for kind, dtype in (("fp16", "float16"), ("bf16", "bfloat16")):
        types = precision.toy_dtypes("cpu", kind)
        assert types["parameters inside autocast"] == types["gradients"] == types["loss"] == "float32"
        assert types["output of `fc1`"] == types["logits"] == dtype
    assert set(precision.toy_dtypes("cpu", "fp32").values()) == {"float32"}


@pytest.mark.gpu
def test_layer_norm_of_the_toy_model_stays_wide_on_cuda():
    for kind in ("fp16", "bf16"):
        assert precision.toy_dtypes("cuda", kind)["output of layer norm"] == "float32"


def toy(**norm_types: str) -> pd.DataFrame:
    rows = precision.toy_dtype_rows(WorkloadConfig(device="cpu"), Path())["rows"]
    found = []
    for device, norm in norm_types.items():
        for row in rows:
            changed = {"dtype": norm} if row["quantity"] == "output of layer norm" and norm else {}
            found.append(row | {"device": device} | changed)
    return pd.DataFrame(found)


def test_the_answer_on_types_says_where_they_were_found():
    text = answers.toy_answer(toy(cuda="float32", cpu=""))
    assert "On the GPU (CUDA) layer norm is on autocast's list" in text
    assert "On the CPU autocast leaves layer norm in the type" in text
    assert "no CUDA GPU" not in text
    alone = answers.toy_answer(toy(cpu=""))
    assert "list of operations" not in alone
    assert alone.endswith("this machine has no CUDA GPU to run it on.")
    wide = answers.toy_answer(toy(cpu="float32"))
    assert "On the CPU layer norm is on autocast's list" in wide
    assert "leaves" not in wide


def test_layer_norm_overflows_in_fp16_alone(norms):
    plain = norms[norms["method"] == ROUNDED]
    fp16 = plain[(plain["precision"] == "fp16") & (plain["offset"] == 0)].set_index("scale")["overflow"]
    limit = math.sqrt(65_504 / 1024)  # of the standard deviation, when 1024 squares are summed
    assert all(bool(lost) == (scale > limit) for scale, lost in fp16.items())
    assert not plain[plain["precision"] != "fp16"]["overflow"].any()
    assert plain[plain["underflow"].eq(True)]["precision"].unique().tolist() == ["fp16"]


def test_digits_and_what_widening_repairs(norms):
    at_one = norms[(norms["scale"] == 1) & (norms["offset"] == 0)].set_index(["precision", "method"])["error"]
    for kind, roundoff in (("fp16", 2**-11), ("bf16", 2**-8), ("fp32", 2**-22)):
        assert at_one[kind, WIDENED] < roundoff
        assert at_one[kind, RMS] < roundoff
    for kind in ("fp16", "bf16"):
        assert at_one[kind, RUNNING] > 10 * at_one[kind, WIDENED]
    assert at_one["bf16", RUNNING] > at_one["fp16", RUNNING]


def test_epsilon_in_fp16_is_subnormal():
    table = precision.epsilon_table().set_index("precision")
    assert table["subnormal"].to_dict() == {"fp32": False, "fp16": True, "bf16": False}
    assert table.loc["fp16", "stored"] == float(np.float16(1e-5))
    reach = np.float16(table.loc["fp16", "reach"])
    below = np.nextafter(reach, np.float16(0))
    assert reach == np.float16(2**-5)
    assert reach + np.float16(1e-5) == reach
    assert below + np.float16(1e-5) > below
    assert precision.epsilon_table(1e-8).set_index("precision").loc["fp16", ["stored", "reach"]].tolist() == [0, 0]


def test_the_answer_on_layer_norm_follows_the_table(norms):
    epsilon = precision.epsilon_table()
    text = answers.layer_norm_answer(norms, epsilon)
    assert "sum of 1,024 squares, the width tested, overflows from inputs of standard deviation 16 on, and the" in text
    assert "adding it changes no variance above 0.031." in text
    assert "In **bf16** no variance overflowed or vanished" in text
    assert "the rounding of the output itself" in text
    calm = norms.assign(overflow=norms["overflow"].where(norms["overflow"].isna(), False), underflow=False)
    assert "overflows" not in answers.layer_norm_answer(calm, epsilon)
    rough = norms.assign(error=norms["error"].where(norms["method"] != WIDENED, 0.3))
    assert "the rounding of the output itself" not in answers.layer_norm_answer(rough, epsilon)


def timed(size: str, parameters: float, kind: str, seconds: float | None, **changes) -> dict:
    row = {
        "size": size, "num_parameters": parameters, "d_model": round(parameters**0.5), "precision": kind,
        "wall_median": seconds, "passes": "forward", "context_length": 256, "batch_size": 4, "compile": False,
        "attention": "plain", "checkpoint_every": None, "warmup_steps": 5,
        "outcome": "complete" if seconds else "out of memory", "device": "Chip A",
        "flops_per_second": parameters * 2048 / seconds if seconds else None,
    }  # fmt: skip
    return row | changes


def timings(full: list, half: list, **changes) -> pd.DataFrame:
    sizes = [("small", 1e8), ("medium", 4e8), ("xl", 2e9)]
    pairs = zip(sizes, zip(full, half, strict=True), strict=False)
    return pd.DataFrame(
        [
            timed(*size, kind, s, **changes)
            for size, pair in pairs
            for kind, s in zip(("fp32", "bf16"), pair, strict=True)
        ]
    )


@pytest.mark.parametrize(
    ("full", "half", "sentence"),
    [
        ([0.02, 0.1, 0.4], [0.02, 0.05, 0.1], "grows with every size, from 1.00× (small) to 4.00× (xl)"),
        ([0.08, 0.3, 0.4], [0.02, 0.1, 0.2], "falls with every size, from 4.00× (small) to 2.00× (xl)"),
        ([0.02, 0.3, 0.4], [0.02, 0.1, 0.2], "not steadily; it is largest for medium (3.00×)"),
        ([0.02, 0.2, 0.4], [0.01, 0.1, 0.2], "is the same for every size, 2.00×"),
        ([0.02, 0.1, 0.4], [0.04, 0.1, 0.2], "; small is slower in bf16"),
        ([0.02], [0.04], "Forward, bf16 is 2.00 times slower (small, the only size compared)."),
        ([0.02], [0.01], "Forward, bf16 is 2.00 times faster (small"),
        ([None], [0.01], "No size was timed both ways, so no speed-up is known."),
    ],
)
def test_the_trend_of_mixed_precision(full, half, sentence):
    assert sentence in mixed.mixed_precision_answer(timings(full, half))


def test_mixed_precision_of_what_did_not_fit_or_was_not_measured():
    table = timings([0.02, 0.1, None], [0.01, 0.04, 0.2], device="CPU")
    text = mixed.mixed_precision_answer(table)
    assert "| out of memory |" in text.replace("  ", "")
    assert "On CPU, at a context of 256:" in text
    assert "from 2.00× (small) to 2.50× (medium)" in text
    assert "In bf16 alone xl fits into the memory." in text
    assert "alone" not in mixed.mixed_precision_answer(timings([0.02, 0.1, 0.4], [0.01, 0.04, None]))
    assert mixed.mixed_precision_answer(table[table["precision"] == "fp32"]).startswith("Nothing was timed both")
    assert mixed.mixed_precision_answer(table[table["precision"] == "tf32"]).startswith("Nothing was timed")
    slow = mixed.mixed_precision_answer(timings([0.01, 0.1, 0.2], [0.02, 0.2, 0.4], device="CPU"))
    assert "that is a loss" in slow
    assert "gain most" not in slow


def test_slower_where_launches_set_the_pace():
    jitter = {"cuda_median": 0.01, "wall_mean": 0.1, "wall_std": 0.02, "flops": 1e9}
    table = timings([0.02, 0.1, 0.4], [0.04, 0.08, 0.1], **jitter, device="NVIDIA H200")
    text = mixed.mixed_precision_answer(table)
    assert "Autocast adds casts, and so launches, to most operands: where launches set the pace (small)" in text
    assert "fp32 ones run on the ordinary (CUDA) cores, bf16 ones on tensor cores" in text
    steady = mixed.mixed_precision_answer(table.assign(wall_std=0.001))
    assert "set the pace" not in steady
    cpu = mixed.mixed_precision_answer(timings([0.02, 0.1, 0.4], [0.04, 0.08, 0.1], device="CPU"))
    assert "Matrix products gain most from bf16;" in cpu
    assert "cores" not in cpu


def test_sizes_are_in_the_order_of_their_width():
    table = timings([0.02, 0.1, 0.4], [0.02, 0.05, 0.1])
    table.loc[table["size"] == "medium", "d_model"] = 10**6
    text = mixed.mixed_precision_answer(table)
    assert "not steadily; it is largest for xl" in text
    assert "to 2.00× (medium)" in text


def test_only_plain_cells_of_one_context_are_compared():
    table = pd.concat(
        [
            timings([0.02, 0.1, 0.4], [0.01, 0.05, 0.2]),
            timings([9.0], [1.0], context_length=1024),
            timings([5.0, 5.0, 5.0], [1.0, 1.0, 1.0], attention="sdpa"),
            timings([7.0, 7.0, 7.0], [0.1, 0.1, 0.1], warmup_steps=0),
        ]
    )
    text = mixed.mixed_precision_answer(table)
    assert "at a context of 256: Forward, the speed-up by bf16 is the same for every size, 2.00×." in text
    assert "5.00 s" not in text
    assert "9.00×" in text


def test_figures_show_what_they_are_given(norms):
    use_style()
    course = precision.accumulation_course()
    left, right = accumulation_figure(course).axes
    assert [len(axes.lines) for axes in (left, right)] == [4, 3]  # two experiments share a line; a line at zero
    scales, offsets = layer_norm_figure(norms).axes
    crosses = [line for axes in (scales, offsets) for line in axes.lines if line.get_marker() == "X"]
    assert {line.get_xdata()[0] for line in crosses} == {16.0, 64.0}
