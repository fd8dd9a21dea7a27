"""Records of profiled cases as tables; the record is made by hand, of two passes with two blocks each."""

import pytest

from lmcore.errors import UserError
from lmcore.profiling.nsys import tables
from lmcore.profiling.nsys.categories import compact_name

CLOCKS = dict.fromkeys(tables.CLOCKS, 0.5)
MODEL = dict.fromkeys(tables.SHAPE, 64) | {"attention": "plain"}


def entry(instances, *kernels):
    """A range with kernels (name, category, calls, seconds), for each instance."""
    rows = [{"name": name, "short_name": name, "kind": kind} | count(*numbers) for name, kind, *numbers in kernels]
    kinds = [{"kind": kind, "calls": calls, "total_seconds": seconds} for _, kind, calls, seconds in kernels]
    return {"instances": instances, **CLOCKS, "kinds": kinds, "kernels": rows}


def count(calls, seconds):
    return {"calls_per_instance": calls, "mean_seconds": seconds / calls}


GEMM, ADD = ("gemm", "matmul", 2, 6.0), ("add", "elementwise", 4, 2.0)
RECORD = {
    "config": {"size": "small", "batch_size": 4, "precision": "fp32", "model": MODEL},
    "environment": {"device": "GPU"},
    "outcome": "complete",
    "reason": None,
    "result": {
        "tool": "nsys",
        "training_outcome": "complete",
        "inference": {
            "passes": 2,
            "ranges": {
                "inference": entry(2, GEMM, ADD),
                "inference/forward": entry(2, GEMM, ADD),
                "inference/forward/block */ffn": entry(4, ("gemm", "matmul", 1, 3.0)),
            },
        },
        "training": {
            "passes": 2,
            "ranges": {
                "training step": entry(2, GEMM, ADD),
                "training step/forward": entry(2, GEMM),
                "training step/backward": entry(2, ADD),
            },
        },
    },
}
LOST = RECORD | {"outcome": "out of memory", "reason": "too large", "result": None}
RECORDS = {"a": RECORD, "b": LOST}


def test_ranges_of_blocks_are_added_up():
    times = tables.kernel_times(RECORDS).set_index(["range", "name"])
    assert times.loc[("inference: ffn", "gemm"), ["calls", "seconds"]].tolist() == [2, 6.0]
    assert tables.range_times(RECORDS).set_index("range").loc["inference: ffn", "seconds"] == 2 * 0.5


def test_forward_and_backward_are_one_range():
    both = tables.reported_categories(RECORDS).query("range == 'forward + backward'").set_index("category")
    assert both["seconds"].to_dict() == {"matmul": 6.0, "elementwise": 2.0}
    assert both["share"].to_dict() == {"matmul": 0.75, "elementwise": 0.25}


def test_the_kernel_that_leads_is_kept_in_every_range():
    kernels = tables.reported_kernels(RECORDS, most=1, of_parts=0)
    assert set(kernels.loc[kernels["name"] == "gemm", "range"]) >= {"inference", "inference: ffn", "training"}
    assert set(kernels.loc[kernels["name"] == "add", "range"]) == set()


def test_a_case_that_did_not_fit_keeps_its_row():
    profile = tables.profile_table(RECORDS).set_index("case")
    assert profile.loc["a", ["inference_matmul_share", "launch_seconds"]].tolist() == [0.75, 0.5]
    assert profile.loc["b", "reason"] == "too large"
    assert profile.loc["b", ["inference_seconds", "tool"]].isna().all()


def test_nothing_profiled():
    with pytest.raises(UserError, match="smaller size"):
        tables.range_times({"b": LOST})


@pytest.mark.parametrize(
    ("name", "compact"),
    [
        ("cutlass_80_simt_sgemm_128x64_8x5_nt_align1", "cutlass gemm nt 128x64"),
        ("nvjet_sm90_tst_192x128_64x5_1x2_h_bz_coopB_TNT", "nvjet gemm TNT 192x128"),
        ("vectorized_elementwise_kernel (bfloat16_copy)", "vectorized elementwise (bfloat16_copy)"),
        ("elementwise_kernel (Mul)", "elementwise (Mul)"),
        ("reduce_kernel (Mean)", "reduce_kernel (Mean)"),
    ],
)
def test_compact_names(name, compact):
    assert compact_name(name) == compact
