"""Reads the results of `lmcore.profiling.nsys.profile.profile_workload`: what ran in a range, for each pass."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from lmcore.config import ModelConfig, from_dict
from lmcore.profiling.nsys.kinds import KINDS
from lmcore.profiling.nsys.nvtx import ATTENTION_PARTS
from lmcore.profiling.nsys.profile import INFERENCE, TRAINING

SUMMARY = {INFERENCE: "inference", TRAINING: "training"}
"""Where a result has the summary of an outermost range."""

PASS_RANGES = ("forward", "loss", "backward", "optimizer")
MODEL_PARTS = ("token embeddings", "norm", "attention", "ffn", "lm head")
SCORES, SOFTMAX, FINAL = ATTENTION_PARTS

KERNEL_COLUMNS = ["name", "short_name", "kind", "calls", "seconds"]


@dataclass(frozen=True)
class Part:
    """What ran inside the ranges of one name, summed up for each pass (each "inference" or "training step")."""

    seconds: float
    """How long the ranges were open on the CPU."""
    gpu_seconds: float
    """From the first kernel to the end of the last; of CPU operators likewise."""
    busy_seconds: float
    idle_seconds: float
    kinds: dict[str, tuple[float, float]]
    """Calls and seconds of each kind of kernel."""
    kernels: pd.DataFrame
    """Those that took longest, by time: `KERNEL_COLUMNS`."""

    @property
    def kernel_seconds(self) -> float:
        """Time of all kernels together; more than busy_seconds if some ran at once."""
        return sum(seconds for _, seconds in self.kinds.values())

    def share(self, kind: str) -> float | None:
        """Share of a kind in the time of all kernels; None where there was none."""
        whole = self.kernel_seconds
        return self.kinds.get(kind, (0, 0.0))[1] / whole if whole else None


def on_gpu(tool: Any) -> bool:
    """Whether a tool timed a GPU's kernels; torch.profiler on a machine without one times operators on the CPU."""
    return isinstance(tool, str) and "CPU operators" not in tool


def model_of(record: Mapping[str, Any]) -> ModelConfig:
    """The model that a record was made with."""
    return from_dict(ModelConfig, record["config"]["model"])


def part(record: Mapping[str, Any], root: str, name: str | None = None) -> Part | None:
    """What ran in ranges called `name` inside `root`, or in `root` itself; None where that was not measured.

    Ranges of one name lie in every block; ranges inside a range of the same name do not occur.
    """
    ranges = _ranges(record, root)
    whole = ranges.get(root)
    if whole is None:
        return None
    if name is None:
        return combined([whole], [1.0])
    chosen = [entry for path, entry in ranges.items() if path != root and path.split("/")[-1] == name]
    if not chosen:
        return None
    return combined(chosen, [entry["instances"] / whole["instances"] for entry in chosen])


def _ranges(record: Mapping[str, Any], root: str) -> Mapping[str, Mapping[str, Any]]:
    summary = (record["result"] or {}).get(SUMMARY[root])
    return summary["ranges"] if summary else {}


def combined(entries: Iterable[Mapping[str, Any]], weights: Iterable[float]) -> Part:
    """The sum of ranges' summaries, each of one instance, times how many instances a pass has."""
    times = dict.fromkeys(("seconds", "gpu_seconds", "busy_seconds", "idle_seconds"), 0.0)
    kinds: dict[str, tuple[float, float]] = {}
    kernels = []
    for entry, weight in zip(entries, weights, strict=True):
        for name in times:
            times[name] += weight * (entry[name] or 0.0)
        for row in entry["kinds"]:
            calls, seconds = kinds.get(row["kind"], (0.0, 0.0))
            kinds[row["kind"]] = (calls + weight * row["calls"], seconds + weight * row["total_seconds"])
        kernels += [
            {
                **{key: row[key] for key in ("name", "short_name", "kind")},
                "calls": weight * row["calls_per_instance"],
                "seconds": weight * row["calls_per_instance"] * row["mean_seconds"],
            }
            for row in entry["kernels"]
        ]
    ordered = {kind: kinds[kind] for kind in sorted(kinds, key=KINDS.index)}
    return Part(**times, kinds=ordered, kernels=added_up(kernels))


def added_up(kernels: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows of kernels with those of one name and kind added up, by time."""
    table = pd.DataFrame(kernels, columns=KERNEL_COLUMNS)
    table = table.groupby(["name", "short_name", "kind"], as_index=False, sort=False)[["calls", "seconds"]].sum()
    return table.sort_values(["seconds", "name"], ascending=[False, True], ignore_index=True)
