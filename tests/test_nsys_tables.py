"""Records of profiled cases as tables; the record is made by hand."""

import pytest

from lmcore.errors import UserError
from lmcore.profiling.nsys import tables
from lmcore.profiling.nsys.categories import compact_name

MODEL = dict.fromkeys(tables.SHAPE, 64) | {"attention": "plain"}


def passes(**kernels):
    """What `summary` says of a pass, by path with "." for "/": kernels (name, category, calls, seconds)."""
    found = {"ranges": [], "categories": [], "kernels": []}
    for path, rows in kernels.items():
        row = {"path": path.replace(".", "/").replace("_", " ")}
        found["ranges"].append(row | {"instances": 1} | dict.fromkeys(tables.CLOCKS, 0.5))
        for name, category, calls, seconds in rows:
            work = row | {"category": category, "calls": calls, "seconds": seconds}
            found["categories"].append(work)
            found["kernels"].append(work | {"name": name, "short_name": name})
    return found


GEMM, ADD = ("gemm", "matmul", 2, 6.0), ("add", "elementwise", 4, 2.0)
RECORD = {
    "config": {"size": "small", "batch_size": 4, "precision": "fp32", "model": MODEL},
    "environment": {"device": "GPU"},
    "outcome": "complete",
    "reason": None,
    "result": {
        "tool": "nsys",
        "training_outcome": "complete",
        "inference": passes(**{
            "inference": [GEMM, ADD], "inference.forward": [GEMM, ADD],
            "inference.forward.block *.norm": [ADD], "inference.forward.norm": [ADD],
        }),
        "training": passes(**{
            "training_step": [GEMM, ADD], "training_step.forward": [GEMM], "training_step.backward": [ADD]
        }),
    },
}  # fmt: skip
LOST = RECORD | {"outcome": "out of memory", "reason": "too large", "result": None}
RECORDS = {"a": RECORD, "b": LOST}


def test_ranges_of_one_name_are_added_up():
    times = tables.one_pass(RECORDS, "kernels").set_index(["range", "name"])
    assert times.loc[("inference: norm", "add"), ["calls", "seconds"]].tolist() == [8, 4.0]
    assert tables.one_pass(RECORDS, "ranges").set_index("range").loc["inference: norm", "seconds"] == 2 * 0.5


def test_forward_and_backward_are_one_range():
    both = tables.one_pass(RECORDS, "categories").query("range == 'forward + backward'").set_index("category")
    assert both["seconds"].to_dict() == {"matmul": 6.0, "elementwise": 2.0}


def test_a_case_that_did_not_fit_keeps_its_row():
    profile = tables.profile_table(RECORDS).set_index("case")
    assert profile.loc["a", ["inference_matmul_share", "launch_seconds"]].tolist() == [0.75, 0.5]
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
