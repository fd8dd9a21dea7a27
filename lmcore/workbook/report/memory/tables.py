"""Tables of notebook 06, from the records of `lmcore.profiling.runner.run_cases`: measured beside predicted."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from lmcore.accounting import num_parameters
from lmcore.config import ModelConfig, from_dict
from lmcore.profiling.memory.predicted import predicted_peak
from lmcore.profiling.memory.timeline import CATEGORIES
from lmcore.profiling.workload import WorkloadConfig

PREDICTED = {"optimizer state": "optimizer_state", "other": "inputs"}
"""Keys of `predicted_peak` that are not named as the categories are."""

CELL_COLUMNS = (
    "size", "context_length", "batch_size", "passes", "precision", "attention", "checkpoint_every", "device"
)  # fmt: skip

PEAK_COLUMNS = [
    "cell", *CELL_COLUMNS, "outcome", "reason", "num_parameters", "peak_bytes", "allocated_peak_bytes",
    "reserved_peak_bytes", "predicted_bytes", "predicted_stage", "predicted_moment", "relative_error", "claimed",
]  # fmt: skip
STAGE_COLUMNS = [
    "cell", *CELL_COLUMNS, "tool", "truncated", "stage", "start_bytes", "end_bytes", "peak_bytes", "peak_position",
    "predicted_bytes",
    *(f"{edge} {category}" for edge in ("start", "end") for category in CATEGORIES),
]  # fmt: skip
COMPOSITION_COLUMNS = ["cell", *CELL_COLUMNS, "stage", "category", "bytes", "predicted_bytes"]
LARGEST_COLUMNS = [
    "cell", *CELL_COLUMNS, "stage", "category", "bytes", "count", "kept", "seconds", "source", "shape",
]  # fmt: skip

Records = Mapping[str, Mapping[str, Any]]
"""Records of cells by name."""


def config_of(record: Mapping[str, Any]) -> WorkloadConfig:
    """The configuration that a record was measured with."""
    return from_dict(WorkloadConfig, record["config"])


def peaks_table(records: Records) -> pd.DataFrame:
    """A row for each cell: its peak in bytes, measured and predicted, whether it fitted into the memory or not.

    `peak_bytes` are those that tensors asked for; `allocated_peak_bytes` as the allocator rounds them up and
    `reserved_peak_bytes` as it took them from the device, both None without CUDA. `relative_error` is that of the
    prediction; `claimed` says whether the prediction is meant for such a cell at all.
    """
    return exact_bytes(pd.DataFrame([_peak_row(record) for record in records.values()], columns=PEAK_COLUMNS))


def exact_bytes(table: pd.DataFrame) -> pd.DataFrame:
    """The table with its bytes as whole numbers or None: as floats, results files would round them."""
    columns = {name: table[name].astype("Int64").astype(object) for name in table if name.endswith("bytes")}
    return table.assign(**{name: column.where(column.notna(), None) for name, column in columns.items()})


def _peak_row(record: Mapping[str, Any]) -> dict[str, Any]:
    config, result = config_of(record), record.get("result") or {}
    predicted = prediction(config)
    keys = ("requested_peak_bytes", "torch_requested_peak_bytes", "peak_bytes")
    measured = next((result[key] for key in keys if result.get(key) is not None), None)
    on_gpu = result.get("reserved_peak_bytes") is not None
    return cell_columns(record) | {
        "outcome": record["outcome"],
        "reason": record.get("reason"),
        "num_parameters": num_parameters(config.model),
        "peak_bytes": measured,
        "allocated_peak_bytes": (result.get("torch_peak_bytes") or result.get("peak_bytes")) if on_gpu else None,
        "reserved_peak_bytes": result.get("reserved_peak_bytes"),
        "predicted_bytes": predicted["peak_bytes"],
        "predicted_stage": predicted["stage"],
        "predicted_moment": predicted["moment"],
        "relative_error": None if measured is None else predicted["peak_bytes"] / measured - 1,
        "claimed": not config.compile,
    }


def prediction(config: WorkloadConfig) -> dict[str, Any]:
    """`predicted_peak` of a cell."""
    return predicted_peak(config.model, config.batch_size, precision=config.precision, passes=config.passes)


def cell_columns(record: Mapping[str, Any]) -> dict[str, Any]:
    """What tells the rows of a record from those of others."""
    config = config_of(record)
    result, environment = record.get("result") or {}, record.get("environment") or {}
    return {
        "cell": record["cell"],
        "size": config.size or f"{config.model.num_layers} × {config.model.d_model}",
        "context_length": config.model.context_length,
        "batch_size": config.batch_size,
        "passes": config.passes,
        "precision": config.precision,
        "attention": config.model.attention,
        "checkpoint_every": config.model.checkpoint_every,
        "device": result.get("device") or environment.get("device"),
    }


def _profiled(records: Records) -> Iterator[tuple[dict[str, Any], Mapping[str, Any], WorkloadConfig]]:
    """Columns of the cell, profile and configuration of each record that has a timeline."""
    for record in records.values():
        if (record.get("result") or {}).get("timeline"):
            yield cell_columns(record), record["result"], config_of(record)


def stages_table(records: Records) -> pd.DataFrame:
    """A row for each stage of each profile: its level at both ends, by category, and its peak beside the predicted."""
    rows = []
    for cell, profile, config in _profiled(records):
        predicted = prediction(config)["by_stage"]
        for stage in profile["stages"]:
            edges = {"start": at_event(profile, stage["first_event"]), "end": at_event(profile, stage["last_event"])}
            levels = {f"{edge} {name}": value for edge, found in edges.items() for name, value in found.items()}
            sizes = {key: stage[key] for key in ("start_bytes", "end_bytes", "peak_bytes")}
            rest = {
                "tool": profile["tool"],
                "truncated": profile["truncated"],
                "stage": stage["name"],
                "peak_position": _position(profile, stage),
                "predicted_bytes": predicted.get(stage["name"]),
            }
            rows.append(cell | rest | sizes | levels)
    return pd.DataFrame(rows, columns=STAGE_COLUMNS)


def _position(profile: Mapping[str, Any], stage: Mapping[str, Any]) -> float | None:
    """Where within a stage the peak of the whole step lies: 0 at its beginning, 1 at its end; None elsewhere."""
    if stage["name"] != profile["peak_stage"]:
        return None
    length = stage["last_event"] - stage["first_event"]
    return (profile["peak_event"] - stage["first_event"]) / length if length else 0.0


def at_event(profile: Mapping[str, Any], event: int) -> dict[str, int]:
    """Bytes of each category after so many events of the profile's timeline; 0 before the first."""
    timeline = profile["timeline"]
    before = [index for index, number in enumerate(timeline["event"]) if number <= event]
    index = before[-1] if before else 0
    return {name: timeline["bytes"].get(name, [0])[index] if before else 0 for name in CATEGORIES}


def composition_table(records: Records) -> pd.DataFrame:
    """A row for each category of each profile: bytes at the moment of the peak, measured and predicted."""
    rows = []
    for cell, profile, config in _profiled(records):
        predicted = prediction(config)
        for name in CATEGORIES:
            found = {
                "stage": profile["peak_stage"],
                "category": name,
                "bytes": profile["peak_by_category"].get(name, 0),
                "predicted_bytes": predicted[PREDICTED.get(name, name)],
            }
            rows.append(cell | found)
    return pd.DataFrame(rows, columns=COMPOSITION_COLUMNS)


def largest_table(records: Records, count: int = 25) -> pd.DataFrame:
    """The largest allocations that each profiled step made, the same ones together, with the shapes of their size.

    `kept` of `count` were still there at the end, `seconds` is their median lifetime, `shape` what of the model has
    just so many values (see `shapes_of_size`).
    """
    rows = []
    for cell, profile, config in _profiled(records):
        for found in profile["largest"][:count]:
            columns = {key: found[key] for key in ("stage", "category", "bytes", "count", "kept", "seconds", "source")}
            shapes = shapes_of_size(config.model, config.batch_size, found["bytes"], config.precision, found["stage"])
            rows.append(cell | columns | {"shape": " or ".join(shapes) or None})
    return pd.DataFrame(rows, columns=LARGEST_COLUMNS)


def shapes_of_size(
    config: ModelConfig, batch_size: int, size: int, precision: str = "fp32", stage: str | None = "forward"
) -> list[str]:
    """The model's tensors that take just `size` bytes: "logits (4 × 128 × 10,000 values of 4 bytes)".

    Values have four bytes, in mixed precision also two; masks, with one, are named where nothing else fits. Matrices
    are made in forward pass and loss as half-precision copies alone, later as gradients and temporaries too.
    """
    half = [2] if precision in ("bf16", "fp16") else []
    early = stage in ("forward", "loss")
    activations = _fitting(activation_shapes(config, batch_size), size, [4, *half])
    found = activations + _fitting(matrix_shapes(config), size, half if early else [4, *half])
    return found or _fitting({"causal mask": (config.context_length, config.context_length)}, size, [1])


def _fitting(shapes: Mapping[str, tuple[int, ...]], size: int, widths: Sequence[int]) -> list[str]:
    found = []
    for name, dimensions in shapes.items():
        width, rest = divmod(size, math.prod(dimensions))
        if rest == 0 and width in widths:
            shape = " × ".join(f"{dimension:,}" for dimension in dimensions)
            found.append(f"{name} ({shape} values of {width} byte{'s' * (width > 1)})")
    return found


def activation_shapes(config: ModelConfig, batch_size: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the large tensors that a forward pass makes, by what they are."""
    c, tokens = config, (batch_size, config.context_length)
    return {
        "the logits": (*tokens, c.vocab_size),
        "the attention scores of a block": (batch_size, c.num_heads, c.context_length, c.context_length),
        "the hidden layer of a feed-forward network": (*tokens, c.d_ff),
        "the residual stream": (*tokens, c.d_model),
        "half of a block's queries or keys, for RoPE": (batch_size, c.num_heads, c.context_length, c.d_k // 2),
    }


def matrix_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the model's matrices, by what they are."""
    return {
        "the token embeddings or the output matrix": (config.vocab_size, config.d_model),
        "a matrix of a feed-forward network": (config.d_ff, config.d_model),
        "a projection of the attention": (config.d_model, config.d_model),
    }
