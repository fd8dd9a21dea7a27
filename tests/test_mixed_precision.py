"""What notebook 04 says of mixed precision, size by size."""

import pandas as pd
import pytest

from lmcore.workbook.report.benchmark import mixed_precision as mixed


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
