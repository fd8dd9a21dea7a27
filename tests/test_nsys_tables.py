"""Records of profiled cases as tables, from a real export."""

import pytest
from nsys_exports import H200

from lmcore.errors import UserError
from lmcore.profiling.nsys import tables
from lmcore.profiling.nsys.categories import compact_name
from lmcore.profiling.nsys.export import read_export
from lmcore.profiling.nsys.profile import summary

TRACE = read_export(H200)
RECORD = {
    "config": {
        "size": "small", "batch_size": 4, "precision": "fp32",
        "model": dict.fromkeys(tables.SHAPE, 64) | {"attention": "plain"},
    },
    "environment": {"device": "GPU"},
    "outcome": "complete",
    "reason": None,
    "result": {
        "tool": "nsys",
        "training_outcome": "complete",
        "inference": summary(TRACE, "inference"),
        "training": summary(TRACE, "training step"),
    },
}  # fmt: skip
LOST = RECORD | {"outcome": "out of memory", "reason": "too large", "result": None}
RECORDS = {"a": RECORD, "b": LOST}


def added_up(part: str, table: str, ending: str, **chosen) -> float:
    """Seconds of the rows of a pass whose path ends like this."""
    rows = [row for row in RECORD["result"][part][table] if row["path"].endswith(ending)]
    return pytest.approx(sum(row["seconds"] for row in rows if chosen.items() <= row.items()))


def test_ranges_of_one_name_are_added_up():
    """The norms of blocks and the last one."""
    kernels = tables.one_pass(RECORDS, "kernels").query("range == 'inference: norm'")
    assert kernels["seconds"].sum() == added_up("inference", "kernels", "/norm")
    ranges = tables.one_pass(RECORDS, "ranges").set_index("range")
    assert ranges.loc["inference: norm", "seconds"] == added_up("inference", "ranges", "/norm")


WHOLE = ("step/forward", "step/loss", "step/backward")


def test_forward_and_backward_are_one_range():
    both = tables.one_pass(RECORDS, "categories").query("range == 'forward + backward'").set_index("category")
    for category, seconds in both["seconds"].items():
        assert seconds == added_up("training", "categories", WHOLE, category=category)


def test_a_case_that_did_not_fit_keeps_its_row():
    profile = tables.profile_table(RECORDS).set_index("case")
    assert 0.3 < profile.loc["a", "inference_matmul_share"] < 0.7
    assert profile.loc["b", "reason"] == "too large"
    assert profile.loc["b", ["inference_seconds", "tool"]].isna().all()
    with pytest.raises(UserError, match="smaller size"):
        tables.one_pass({"b": LOST}, "ranges")


@pytest.mark.parametrize(
    ("name", "compact"),
    [
        ("cutlass_80_simt_sgemm_128x64_8x5_nt_align1", "cutlass gemm nt 128x64"),
        ("nvjet_sm90_tst_192x128_64x5_1x2_h_bz_coopB_TNT", "nvjet gemm TNT 192x128"),
        ("vectorized_elementwise_kernel (bfloat16_copy)", "vectorized elementwise (bfloat16_copy)"),
        ("reduce_kernel (Mean)", "reduce_kernel (Mean)"),
    ],
)
def test_compact_names(name, compact):
    assert compact_name(name) == compact
