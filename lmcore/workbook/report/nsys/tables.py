"""Tidy tables of notebook 05, from the records of `run_cases(profile_workload, …)`."""

import zlib
from collections.abc import Mapping
from typing import Any

import pandas as pd

from lmcore.accounting import forward_flops_by_component
from lmcore.errors import require
from lmcore.profiling.nsys.profile import INFERENCE, TRAINING
from lmcore.workbook.report.benchmark.views import ops_of
from lmcore.workbook.report.nsys.profiles import (
    FINAL,
    MODEL_PARTS,
    PASS_RANGES,
    SCORES,
    SOFTMAX,
    Part,
    added_up,
    model_of,
    on_gpu,
    part,
)

Records = Mapping[str, Mapping[str, Any]]

RANGES = {
    "inference": (INFERENCE, None),
    "training": (TRAINING, None),
    "forward": (TRAINING, "forward"),
    "loss": (TRAINING, "loss"),
    "backward": (TRAINING, "backward"),
    "optimizer": (TRAINING, "optimizer"),
}
"""Names of ranges in the tables, and where they are in a profile: "forward" is that of a training step."""

WHOLE = ("inference", "training", "forward + backward")

HEAD = (
    "cell", "size", "d_model", "num_layers", "num_heads", "d_ff", "vocab_size", "context_length", "batch_size",
    "precision", "attention", "tool", "gpu", "device",
)  # fmt: skip
CLOCKS = ("seconds", "gpu_seconds", "busy_seconds", "idle_seconds")
TOP, TOP_OF_PARTS = 20, 3
"""Kernels that are kept of inference, training step and forward + backward, and of every range inside them."""

LONGEST_NAME = 160
"""Characters of a kernel's name in results files; PyTorch's may have a thousand, with all template arguments."""

SOFTMAX_FLOPS = {"maximum": 1, "subtraction": 1, "exponential": 1, "sum": 1, "division": 1}
"""Operations of a softmax for each score; exponential and comparison count as one each."""

SCALE_AND_MASK_FLOPS = {"division by the root of d_k": 1, "mask": 1}
"""Operations between the product of queries and keys and the softmax, for each score."""

SOFTMAX_PASSES = 8
"""Times that a float32 number is read or written for each score: `lmcore.functional.softmax` has a kernel for each
of its five operations, all of which read the scores, and three of which write as many numbers."""

CONVERSION_BYTES = 12
"""What half precision adds for each score: half is read and float32 written before the softmax, and back after it."""

ATTENTION_PARTS = ("scores", "scale, mask and copies", "softmax", "final matmul")


def head_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that say which cell a row is about; `gpu`: whether kernels on a GPU were timed."""
    config, model = record["config"], model_of(record)
    tool = (record["result"] or {}).get("tool")
    values = {
        "cell": record["cell"],
        "tool": tool,
        "gpu": on_gpu(tool) if tool else None,
        "device": (record["environment"] or {}).get("device"),
        **{name: config[name] for name in ("size", "batch_size", "precision")},
        **{name: getattr(model, name) for name in HEAD if hasattr(model, name)},
    }
    return {name: values[name] for name in HEAD}


def profile_table(records: Records) -> pd.DataFrame:
    """One row for each cell: seconds of the ranges in `RANGES` for each pass, and the matmuls' share of kernel time.

    {range}_seconds is on the CPU, gpu_ from the first kernel to the end of the last, busy_ and idle_ the parts of that;
    matmul_share that of the time of all kernels. `launch_seconds` is how long the CPU is in the forward pass of an
    inference, at the end of which it begins to wait for the GPU. `training_outcome` tells of a
    training step that did not fit although inference did. Ranges that were not measured are None.
    """
    rows = []
    for record in records.values():
        result = record["result"] or {}
        row = head_of(record) | {
            "outcome": record["outcome"],
            "training_outcome": result.get("training_outcome"),
            "reason": record["reason"],
        }
        for label, (root, name) in RANGES.items():
            found = part(record, root, name)
            row |= {f"{label}_{clock}": getattr(found, clock) if found else None for clock in CLOCKS}
            row[f"{label}_kernel_seconds"] = found.kernel_seconds if found else None
            row[f"{label}_matmul_share"] = found.share("matmul") if found else None
        launching = part(record, INFERENCE, "forward")
        row["launch_seconds"] = launching.seconds if launching else None
        rows.append(row)
    return pd.DataFrame(rows).astype(object).replace({float("nan"): None})


def require_profiled(table: pd.DataFrame) -> None:
    """Raises `UserError` unless the forward pass of some cell of `profile_table` was profiled."""
    reasons = "; ".join(f"{row['cell']}: {row['reason'] or row['outcome']}" for row in table.to_dict("records"))
    some = len(table) > 0 and bool(table["inference_seconds"].notna().any())
    require(some, f"No cell could be profiled; choose a smaller size or context ({reasons or 'there are none'}).")


def kernel_rows(records: Records) -> pd.DataFrame:
    """The kernels that take longest in each range of each cell: calls and seconds for each pass, share of its kernels'
    time. "forward + backward" is a training step without its optimizer; inference is also split by `MODEL_PARTS`, each
    with the kernel that leads in inference, however little time that takes there.
    Names are shortened (`kept_name`).
    """
    rows = []
    for record in records.values():
        head = _short_head(record)
        parts = _parts(record)
        leading = set(parts["inference"].kernels["name"].head(1)) if "inference" in parts else set()
        for label, found in parts.items():
            top = TOP if label in WHOLE else TOP_OF_PARTS
            whole = found.kernel_seconds
            for rank, kernel in enumerate(found.kernels.to_dict("records"), 1):
                if rank > top and kernel["name"] not in leading:
                    continue
                kernel["name"] = kept_name(kernel["name"])
                share = kernel["seconds"] / whole if whole else None
                rows.append(head | {"range": label, "rank": rank} | kernel | {"share": share})
    columns = ["cell", "size", "context_length", "precision", "gpu", "range", "rank"]
    return pd.DataFrame(rows, columns=[*columns, "name", "short_name", "kind", "calls", "seconds", "share"])


def kept_name(name: str) -> str:
    """A kernel's name, the end of a long one replaced by a checksum of it all: different names stay different."""
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 9]}…{zlib.crc32(name.encode()):08x}"


def kind_rows(records: Records) -> pd.DataFrame:
    """Kinds of kernels in each range of each cell: calls and seconds for each pass, share of its kernels' time."""
    rows = []
    for record in records.values():
        head = _short_head(record)
        for label, found in _parts(record).items():
            rows += [
                head | {"range": label, "kind": kind, "calls": calls, "seconds": seconds, "share": found.share(kind)}
                for kind, (calls, seconds) in found.kinds.items()
            ]
    columns = ["cell", "size", "context_length", "precision", "gpu", "range", "kind", "calls", "seconds", "share"]
    return pd.DataFrame(rows, columns=columns)


def _short_head(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in head_of(record).items()
        if key in ("cell", "size", "context_length", "precision", "gpu")
    }


def _parts(record: Mapping[str, Any]) -> dict[str, Part]:
    """The ranges of `RANGES`, those of the model's parts in inference, and forward, loss and backward together."""
    places = RANGES | {f"inference: {name}": (INFERENCE, name) for name in MODEL_PARTS}
    found = {label: part(record, *place) for label, place in places.items()}
    both = [found[name] for name in PASS_RANGES[:3] if found[name] is not None]
    if found["backward"] is not None:
        found["forward + backward"] = _joined(both)
    return {label: value for label, value in found.items() if value is not None}


def _joined(parts: list[Part]) -> Part:
    kinds: dict[str, tuple[float, float]] = {}
    for each in parts:
        for kind, (calls, seconds) in each.kinds.items():
            before = kinds.get(kind, (0.0, 0.0))
            kinds[kind] = (before[0] + calls, before[1] + seconds)
    clocks = {name: sum(getattr(each, name) for each in parts) for name in CLOCKS}
    kernels = added_up(row for each in parts for row in each.kernels.to_dict("records"))
    return Part(**clocks, kinds=kinds, kernels=kernels)


def attention_rows(records: Records) -> pd.DataFrame:
    """The parts of attention in an inference: seconds on the device, FLOPs and bytes for each pass of the model.

    Parts are those of `ATTENTION_PARTS`: the matmul kernels of the ranges "computing attention scores" and "final
    matmul", all kernels of "computing softmax", and what else runs in the first two. FLOPs of matmuls are
    `lmcore.accounting`'s, those of the rest `SOFTMAX_FLOPS` and `SCALE_AND_MASK_FLOPS` for each score, masked or not.
    Bytes are the least that the operations as they are written move: each operand once, no cache; None where copies
    are among them. Cells without these ranges, as with fused attention, have no rows.
    """
    rows = []
    for record in records.values():
        parts = {name: part(record, INFERENCE, name) for name in (SCORES, SOFTMAX, FINAL)}
        if any(found is None for found in parts.values()):
            continue
        seconds = _attention_seconds(parts)
        whole = sum(seconds.values())
        work = attention_work(record)
        flops = sum(work[name][0] for name in ATTENTION_PARTS)
        rows += [
            _short_head(record)
            | {
                "part": name,
                "seconds": seconds[name],
                "share_of_time": seconds[name] / whole if whole else None,
                "flops": work[name][0],
                "share_of_flops": work[name][0] / flops,
                "bytes": work[name][1],
                "intensity": work[name][0] / work[name][1] if work[name][1] else None,
            }
            for name in ATTENTION_PARTS
        ]
    columns = ["cell", "size", "context_length", "precision", "gpu", "part", "seconds", "share_of_time"]
    return pd.DataFrame(rows, columns=[*columns, "flops", "share_of_flops", "bytes", "intensity"])


def _attention_seconds(parts: Mapping[str, Part]) -> dict[str, float]:
    matmuls = {name: parts[name].kinds.get("matmul", (0, 0.0))[1] for name in (SCORES, FINAL)}
    rest = sum(parts[name].kernel_seconds - matmuls[name] for name in (SCORES, FINAL))
    return {
        "scores": matmuls[SCORES],
        "scale, mask and copies": rest,
        "softmax": parts[SOFTMAX].kernel_seconds,
        "final matmul": matmuls[FINAL],
    }


def attention_work(record: Mapping[str, Any]) -> dict[str, tuple[int, int | None]]:
    """FLOPs and bytes of each of `ATTENTION_PARTS` in one forward pass of a record's model."""
    config, model = record["config"], model_of(record)
    component = forward_flops_by_component(model, config["batch_size"])
    half = config["precision"] in ("bf16", "fp16")
    heads = model.num_layers * config["batch_size"] * model.num_heads
    scores = heads * model.context_length**2
    product = (2 if half else 4) * (scores + 2 * heads * model.context_length * model.d_k)
    softmax_bytes = scores * (4 * SOFTMAX_PASSES + (CONVERSION_BYTES if half else 0))
    return {
        "scores": (component["scores"], product),
        "scale, mask and copies": (scores * sum(SCALE_AND_MASK_FLOPS.values()), None),
        "softmax": (scores * sum(SOFTMAX_FLOPS.values()), softmax_bytes),
        "final matmul": (component["weighted_sum"], product),
    }


TIMING_KEYS = (
    "d_model", "num_layers", "num_heads", "d_ff", "vocab_size", "context_length", "batch_size", "precision",
    "attention", "device",
)  # fmt: skip
"""What a benchmark must have in common with a profile to be of the same forward pass."""


def with_timings(profiles: pd.DataFrame, timings: pd.DataFrame) -> pd.DataFrame:
    """`profile_table` with `benchmark_seconds` and `benchmark_std` of the same forward pass, by the host's clock.

    `timings` is a `lmcore.profiling.timing.timing_table`; compiled, checkpointed, fused and unmeasured cells do not
    count, and of several cells of one kind the one with most warm-ups does. None where there is none.
    """
    if not len(timings):
        return profiles.assign(benchmark_seconds=None, benchmark_std=None)
    same = timings[(timings["passes"] == "forward") & (timings["outcome"] == "complete")]
    same = same[~same["compile"].astype(bool) & same["checkpoint_every"].isna() & same["wall_median"].notna()]
    same = same.sort_values("warmup_steps", ascending=False)
    found: dict[tuple, tuple] = {}
    for row in same.to_dict("records"):
        if ops_of(row) == "fused":
            continue
        found.setdefault(tuple(row[key] for key in TIMING_KEYS), (row["wall_median"], row["wall_std"]))
    pairs = [found.get(tuple(row[key] for key in TIMING_KEYS), (None, None)) for row in profiles.to_dict("records")]
    return profiles.assign(
        benchmark_seconds=pd.Series([pair[0] for pair in pairs], index=profiles.index, dtype=object),
        benchmark_std=pd.Series([pair[1] for pair in pairs], index=profiles.index, dtype=object),
    )


def untimed(joined: pd.DataFrame) -> list[str]:
    """Cells of `with_timings` whose forward pass was profiled and not timed."""
    return list(joined.loc[joined["inference_seconds"].notna() & joined["benchmark_seconds"].isna(), "cell"])
