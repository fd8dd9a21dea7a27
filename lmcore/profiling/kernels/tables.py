"""Tables of what the tasks of notebook 07 have measured: a row for each result, a column for each name below."""

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import pandas as pd
import torch

from lmcore.accounting import num_parameters
from lmcore.config import from_dict
from lmcore.profiling.kernels.cases import BACKWARD, attention_layer
from lmcore.profiling.kernels.measuring import DTYPES
from lmcore.profiling.workload import WorkloadConfig

COLUMNS = {
    "attention": "case attention mode context_length batch_size num_heads d_k precision outcome reason seconds "
    "extra_bytes flops flops_per_second device",
    "attention_sizes": "case variant batch_size precision context head_size outcome reason forward backward both "
    "saved_bytes steps device device_bytes",
    "loss": "case variant rows d_model vocab_size precision outcome reason seconds chunk_rows extra_bytes logits_bytes "
    "gradient_bytes device",
    "optimizer": "case size outcome contestant bytes_per_parameter seconds reason parameters bytes bytes_per_second "
    "copy_bytes_per_second device",
    "elementwise": "case variant precision operation seconds least_bytes eager_bytes device",
    "decoding": "case size batch_size context_length precision way seconds tokens_per_second same_tokens bound device",
    "parity": "by kernel shape causal precision error worst plain_error tolerance holds device",
}
"""By results file, kernels_<name>.json. `bound` is how many tokens a second reading all weights but the embeddings once
for each of them, at the speed of a copy, would allow."""

DERIVED: dict[str, Callable[[WorkloadConfig, Mapping[str, Any]], Any]] = {
    "d_k": lambda c, row: c.model.d_k,
    "flops": lambda c, row: (
        attention_layer(c.model, c.batch_size, torch.float32).flops * (1 + BACKWARD * (row["mode"] == "both"))
    ),
    "flops_per_second": lambda c, row: row["flops"] / row["seconds"],
    "rows": lambda c, row: c.tokens_per_step,
    "logits_bytes": lambda c, row: row["rows"] * c.model.vocab_size * DTYPES[c.precision].itemsize,
    "gradient_bytes": lambda c, row: (
        (row["rows"] + c.model.vocab_size) * c.model.d_model * DTYPES[c.precision].itemsize
    ),
    "bytes": lambda c, row: row["bytes_per_parameter"] * row["parameters"],
    "bytes_per_second": lambda c, row: row["bytes"] / row["seconds"],
    "tokens_per_second": lambda c, row: c.batch_size * row["new_tokens"] / row["seconds"],
    "bound": lambda c, row: (
        c.batch_size
        * row["copy_bytes_per_second"]
        / ((num_parameters(c.model) - c.model.vocab_size * c.model.d_model) * DTYPES[c.precision].itemsize)
    ),
}
"""Columns that follow from the case and other columns; rates are missing where no time was measured."""


def results_table(name: str, records: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """The table `name` of `COLUMNS`: a row for each of a record's `rows`, of attention for each of its two modes.

    Other columns are fields of the result, of the record, of the case or of its model. `variant` says who computes.
    """
    columns, table = COLUMNS[name].split(), []
    for record in records.values():
        c, result = from_dict(WorkloadConfig, record["config"]), record["result"] or {}
        head = vars(c.model) | vars(c) | {key: record[key] for key in ("case", "outcome", "reason")}
        kind = c.model.attention if name == "attention_sizes" else "plain"
        head["variant"] = "fused" if c.ops == "fused" else "compiled" if c.compile else kind
        head |= {"device": (record["environment"] or {}).get("device"), "seconds": None} | result
        rows = head.pop("rows", () if name != "loss" else ({},))
        if name == "attention":
            rows = [{"mode": mode} | (result.get(mode) or {}) for mode in ("forward", "both")]
        for row in (head | row for row in rows):
            if isinstance(row["seconds"], list):
                row["seconds"] = median(row["seconds"])
            if isinstance(row.get("shape"), list):
                row["shape"] = " × ".join(map(str, row["shape"]))
            for column in (column for column in columns if column in DERIVED):
                rate = column.endswith("_per_second") and row["seconds"] is None
                row.setdefault(column, None if rate else DERIVED[column](c, row))
            table.append([row.get(column) for column in columns])
    return pd.DataFrame(table, columns=columns)
