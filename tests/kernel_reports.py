"""What the tests of notebook 07's tables share: records of benchmark cases, and rows of speed files."""

from lmcore.config import to_dict


def record(name, config, result, outcome="complete", reason=None):
    return {
        "case": name, "config": to_dict(config), "outcome": outcome, "reason": reason, "result": result,
        "environment": {"device": "CPU"},
    }  # fmt: skip


def speed_row(row, group, contestant, ours, median, **more):
    """A row of a speed file; without a median it did not fit into the memory."""
    empty = dict.fromkeys(("rate", "rate_unit", "share", "share_of", "peak_bytes", "reason"))
    return empty | {
        "row": row, "group": group, "work": f"work of {row}", "settings": {}, "contestant": contestant, "ours": ours,
        "unit": "ms", "median": median, "low": median, "high": median, "repeats": 9,
        "outcome": "complete" if median else "out of memory", "notes": {},
    } | more  # fmt: skip
