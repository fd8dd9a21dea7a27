"""Timing tables for readers, as `lmcore benchmark` and notebook 04 print them."""

import pytest

from lmcore.config import replace, to_dict
from lmcore.profiling.readable import MISSING, median_spread, readable, spread, timed
from lmcore.profiling.timing import timing_table
from lmcore.profiling.workload import PHASES, case_grid


def record(name, config, device, lost):
    """A record of a warm-up and four steps; or of one that did not fit."""
    head = {"case": name, "config": to_dict(config), "environment": {"device": device}}
    if lost:
        return head | {"outcome": "out of memory", "reason": "CUDA out of memory.", "result": None}
    steps = [
        {"wall": wall, "cuda": wall, "warmup": wall == 9.0, **dict.fromkeys(PHASES)} for wall in (9.0, 0.03, 0.04, 0.05)
    ]
    return head | {"outcome": "complete", "reason": None, "result": {"device": device, "samples": steps}}


def table(device="NVIDIA H200", **changes):
    cases = case_grid(["small", "2.7b"], [256], warmup_steps=1, steps=3)
    lost = "2.7b-256-fp32-train_step"
    return timing_table({n: record(n, replace(c, **changes), device, n == lost) for n, c in cases.items()})


def test_a_table_for_readers():
    """Settings that are all the same and columns without a value are left out; a case that did not fit says so."""
    shown = readable(table())
    assert list(shown) == ["size", "mode", "mean ± std (ms)", "median (spread) (ms)", "tokens/s", "MFU"]
    assert shown.iloc[0].tolist()[1:5] == ["forward", "40.0 ± 10", "40.0 (16)", "25,600"]
    assert shown.iloc[-1].tolist()[1:] == ["training step", MISSING, "out of memory", MISSING, MISSING]
    assert "MFU" not in readable(table("Chip A"))
    alone = readable(table(ops="fused").iloc[:1])
    assert (alone["ops"].tolist(), alone["attention"].tolist()) == (["fused"], ["plain"])


@pytest.mark.parametrize(
    ("mean", "std", "text"), [(0.0345678, 0.000221, "34.6 ± 0.22"), (0.5, None, "500"), (None, None, MISSING)]
)
def test_a_mean_has_the_digits_that_its_spread_leaves(mean, std, text):
    assert spread(mean, std) == text


def test_a_time_that_waits_for_the_host_has_its_busy_time():
    row = {"outcome": "complete", "host_bound": False, "wall_median": 0.02478, "wall_spread": 0.001}
    row |= {"busy_median": 0.5, "busy_spread": None}
    assert timed(row) == "24.8 (1.0)"
    assert timed(row | {"host_bound": True}) == "24.8 (1.0); busy 500"
    assert timed(row | {"wall_spread": 0.0561}) == "24.8 (56); busy 500"  # it waits now and then
    assert timed(row | {"outcome": "out of memory", "wall_median": None}) == "out of memory"
    assert median_spread(row | {"busy_median": None}, "busy") == MISSING
