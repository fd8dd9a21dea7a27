"""Records of `profile_workload` as tables of one pass; cases are named in the column `case`."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from lmcore.errors import require
from lmcore.profiling.workload import PHASES

Records = Mapping[str, Mapping[str, Any]]

BOTH = "forward + backward"
MODES = ("inference", "training")
CLOCKS = ["seconds", "gpu_seconds", "busy_seconds", "idle_seconds"]
SHAPE = ["d_model", "num_layers", "num_heads", "d_ff", "vocab_size", "context_length"]
CONFIGURATION = ["case", "size", *SHAPE, "batch_size", "precision", "attention", "tool", "gpu", "device"]


def configurations(records: Records) -> pd.DataFrame:
    """What was run in each case: `CONFIGURATION`; `gpu` tells whether the GPU's kernels were timed."""
    rows = []
    for name, record in records.items():
        config, tool = record["config"], (record["result"] or {}).get("tool")
        known = {"case": name, "tool": tool, "device": (record["environment"] or {}).get("device")}
        known["gpu"] = "CPU operators" not in tool if tool else None
        rows.append({**config["model"], **config, **known})
    return pd.DataFrame(rows)[CONFIGURATION]


def one_pass(records: Records, what: str) -> pd.DataFrame:
    """The "ranges", "categories" or "kernels" of `summary` by case and range: "inference", "training", a part of a
    training step ("forward"), or one of an inference ("inference: ffn").

    Ranges of one name, as in every block, are added up; "forward + backward" is the sum of forward pass, loss and
    backward pass. Raises `UserError` if no case has a result.
    """
    rows = [
        {"case": name, "mode": mode} | row
        for name, record in records.items()
        for mode in MODES
        for row in ((record["result"] or {}).get(mode) or {}).get(what, ())
    ]
    require(len(rows) > 0, "Nothing could be profiled; choose a smaller size or context.")
    table = pd.DataFrame(rows)
    mode, last = table.pop("mode"), table["path"].str.rpartition("/")[2]
    inner = last.where(mode == "training", "inference: " + last)
    table.insert(1, "range", inner.where(table.pop("path").str.contains("/"), mode))
    trained = table["case"].isin(table.loc[table["range"] == "backward", "case"])
    both = table[trained & table["range"].isin(("forward", "loss", "backward"))]
    table = pd.concat([table, both.assign(range=BOTH)])
    keys = [name for name in table if name not in ("instances", "calls", *CLOCKS)]
    return table.groupby(keys, sort=False).sum().reset_index()


def profile_table(records: Records) -> pd.DataFrame:
    """A row for each case: `CONFIGURATION`, how it ended, the `CLOCKS` of inference, training step and its phases.

    `kernel_seconds` is the work's time, `matmul_share` that of the matmuls in it; `launch_seconds` is how long the CPU
    needs to launch a forward pass.
    """
    table = configurations(records)
    for column in ("outcome", "reason"):
        table[column] = [record[column] for record in records.values()]
    table["training_outcome"] = [(record["result"] or {}).get("training_outcome") for record in records.values()]
    times = one_pass(records, "ranges").set_index(["case", "range"])[CLOCKS]
    work = one_pass(records, "categories")
    seconds = work.groupby(["case", "range"])["seconds"].sum()
    matmul = work[work["category"] == "matmul"].set_index(["case", "range"])["seconds"]
    times = times.assign(kernel_seconds=seconds, matmul_share=matmul.reindex(seconds.index, fill_value=0) / seconds)
    for label in (*MODES, *PHASES):
        if label in times.index.get_level_values("range"):
            table = table.join(times.xs(label, level="range").add_prefix(f"{label}_"), on="case")
    launching = times["seconds"].xs("inference: forward", level="range")
    return table.join(launching.rename("launch_seconds"), on="case")
