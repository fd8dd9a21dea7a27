"""Records of `profile_workload` as tables: for one pass, the times, categories and kernels of every range.

Ranges of the same name, such as "inference: ffn" in every block, are summed. Cases are named in the column `case`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from lmcore.errors import require
from lmcore.profiling.nsys.categories import CATEGORIES
from lmcore.profiling.workload import PHASES

Records = Mapping[str, Mapping[str, Any]]
Rows = Iterable[dict[str, Any]]

BOTH = "forward + backward"
MODES = ("inference", "training")
PARTS = ("token embeddings", "norm", "attention", "ffn", "lm head")
REPORTED = (*MODES, BOTH, *PHASES, *(f"inference: {part}" for part in PARTS))
"""Ranges that the tables of categories and kernels keep; `category_times` has all."""

ATTENTION = ["scores", "scale, mask and copies", "softmax", "final matmul"]
"""Parts of the annotated attention."""

CLOCKS = ["seconds", "gpu_seconds", "busy_seconds", "idle_seconds"]
SHAPE = ["d_model", "num_layers", "num_heads", "d_ff", "vocab_size", "context_length"]
CONFIGURATION = ["case", "size", *SHAPE, "batch_size", "precision", "attention", "tool", "gpu", "device"]
CASE = ["case", "size", "context_length", "precision", "gpu"]


def configurations(records: Records) -> pd.DataFrame:
    """What was run in each case: `CONFIGURATION`; `gpu` tells whether the GPU's kernels were timed."""
    rows = []
    for name, record in records.items():
        config, tool = record["config"], (record["result"] or {}).get("tool")
        known = {"case": name, "tool": tool, "device": (record["environment"] or {}).get("device")}
        known["gpu"] = "CPU operators" not in tool if tool else None
        rows.append({**config["model"], **config, **known})
    return pd.DataFrame(rows)[CONFIGURATION]


def per_pass(records: Records, read: Callable[[dict[str, Any], float], Rows]) -> pd.DataFrame:
    """The rows that `read(range, instances)` gives of each range of one pass, added up by their words.

    The range "forward + backward" is the sum of forward pass, loss and backward pass.
    """
    rows = []
    for name, record in records.items():
        for root in MODES:
            summary = (record["result"] or {}).get(root) or {"ranges": {}}
            for path, entry in summary["ranges"].items():
                last = path.split("/")[-1]
                label = root if "/" not in path else last if root == "training" else f"inference: {last}"
                found = read(entry, entry["instances"] / summary["passes"])
                rows += [{"case": name, "range": label} | row for row in found]
    require(len(rows) > 0, "Nothing could be profiled; choose a smaller size or context.")
    table = pd.DataFrame(rows)
    trained = table["case"].isin(table.loc[table["range"] == "backward", "case"])
    both = table[trained & table["range"].isin(("forward", "loss", "backward"))]
    table = pd.concat([table, both.assign(range=BOTH)])
    keys = [name for name in table if name not in ("calls", "seconds", *CLOCKS)]
    return table.groupby(keys, sort=False).sum().reset_index()


def range_times(records: Records) -> pd.DataFrame:
    """Seconds of each range by the `CLOCKS` of `busy_table`."""
    return per_pass(records, lambda entry, count: [{clock: count * (entry[clock] or 0) for clock in CLOCKS}])


def category_times(records: Records) -> pd.DataFrame:
    """Calls and seconds of each category of kernels in each range."""
    return per_pass(
        records,
        lambda entry, count: [
            {"category": row["kind"], "calls": count * row["calls"], "seconds": count * row["total_seconds"]}
            for row in entry["kinds"]
        ],
    )


def kernel_times(records: Records) -> pd.DataFrame:
    """Calls and seconds of the recorded kernels of each range."""

    def read(entry: dict[str, Any], count: float) -> Rows:
        for row in entry["kernels"]:
            names = {"name": row["name"], "short_name": row["short_name"], "category": row["kind"]}
            calls = count * row["calls_per_instance"]
            yield names | {"calls": calls, "seconds": calls * row["mean_seconds"]}

    return per_pass(records, read)


def reported_categories(records: Records) -> pd.DataFrame:
    """`CASE`, range, category, calls, seconds and share of time of the `REPORTED` ranges, by order of `CATEGORIES`."""
    table = category_times(records)
    table = table.sort_values("category", key=lambda names: names.map(CATEGORIES.index), kind="stable")
    whole = table.groupby(["case", "range"])["seconds"].transform("sum")
    table["share"] = table["seconds"] / whole.where(whole > 0)
    return configurations(records)[CASE].merge(table[table["range"].isin(REPORTED)], on="case")


def reported_kernels(records: Records, most: int = 20, of_parts: int = 3) -> pd.DataFrame:
    """The leading kernels of the `REPORTED` ranges: `most` of whole passes, `of_parts` of their parts.

    The kernel that leads in inference is kept wherever it runs.
    """
    table = kernel_times(records)
    table = table[table["range"].isin(REPORTED)].sort_values(["seconds", "name"], ascending=[False, True])
    table["rank"] = table.groupby(["case", "range"]).cumcount() + 1
    leader = table[(table["range"] == "inference") & (table["rank"] == 1)].set_index("case")["name"]
    whole = category_times(records).groupby(["case", "range"])["seconds"].sum().rename("whole")
    table = table.join(whole, on=["case", "range"])
    room = np.where(table["range"].isin((*MODES, BOTH)), most, of_parts)
    table = table[(table["rank"] <= room) | (table["name"] == table["case"].map(leader))]
    table["share"] = table["seconds"] / table["whole"].where(table["whole"] > 0)
    order = ["case", "range", "rank", "name", "short_name", "category", "calls", "seconds", "share"]
    return configurations(records)[CASE].merge(table[order], on="case")


def profile_table(records: Records) -> pd.DataFrame:
    """A row for each case: `CONFIGURATION`, how it ended, the `CLOCKS` of inference, training step and its phases.

    `kernel_seconds` is the work's time, `matmul_share` that of the matmuls in it; `launch_seconds` is how long the CPU
    needs to launch a forward pass.
    """
    table = configurations(records)
    for column in ("outcome", "reason"):
        table[column] = [record[column] for record in records.values()]
    table["training_outcome"] = [(record["result"] or {}).get("training_outcome") for record in records.values()]
    times, work = range_times(records).set_index(["case", "range"]), category_times(records)
    seconds = work.groupby(["case", "range"])["seconds"].sum()
    matmul = work[work["category"] == "matmul"].set_index(["case", "range"])["seconds"]
    times = times.assign(kernel_seconds=seconds, matmul_share=matmul.reindex(seconds.index, fill_value=0) / seconds)
    for label in (*MODES, *PHASES):
        if label in times.index.get_level_values("range"):
            table = table.join(times.xs(label, level="range").add_prefix(f"{label}_"), on="case")
    launching = times["seconds"].xs("inference: forward", level="range")
    return table.join(launching.rename("launch_seconds"), on="case")


def attention_times(records: Records) -> pd.DataFrame:
    """`CASE`, part and seconds of the parts of attention in an inference; fused or compiled attention has no parts.

    Raises `UserError` if no case has them.
    """
    work = category_times(records).groupby(["case", "range", "category"])["seconds"].sum()
    rows = []
    for case, own in work.groupby("case"):
        whole = own.groupby("range").sum()
        names = [f"inference: {name}" for name in ("computing attention scores", "final matmul", "computing softmax")]
        if not set(names) <= set(whole.index):
            continue
        scores, final = (own.get((case, name, "matmul"), 0.0) for name in names[:2])
        rest = whole[names[0]] + whole[names[1]] - scores - final
        rows.append({"case": case} | dict(zip(ATTENTION, (scores, rest, whole[names[2]], final), strict=True)))
    require(len(rows) > 0, "The profiles show no parts of attention: it is fused or compiled.")
    parts = pd.DataFrame(rows).melt("case", ATTENTION, "part", "seconds")
    return configurations(records)[CASE].merge(parts, on="case")


def timeline_table(record: Mapping[str, Any], what: str) -> pd.DataFrame:
    """The drawn inference and training step of a case, which the column `pass` names: its "ranges", or its "work"."""
    timelines = {name: one for name, one in record["result"]["timeline"].items() if one}
    table = pd.concat([pd.DataFrame(one[what]).assign(**{"pass": name}) for name, one in timelines.items()])
    return table.rename(columns={"kind": "category"})
