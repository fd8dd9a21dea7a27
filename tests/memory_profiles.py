"""Profiles of memory made up for tests: a step whose every allocation is known."""

import pandas as pd

from lmcore.profiling.memory.snapshot import History
from lmcore.profiling.memory.timeline import summary


class Step:
    """A step as it happens: `make` allocates, `free` frees, `stage` names what follows."""

    def __init__(self, **standing: int):
        self.stages, self.rows = {}, []
        for name, size in standing.items():
            self.event = -1  # `make` counts on to 0: before the first event
            self.make(name.replace("_", " "), size, name)

    def stage(self, name: str) -> None:
        self.stages[name] = self.event

    def make(self, category: str, size: int, source: str = "lmcore/model.py:59 Linear.forward") -> dict:
        self.event += 1
        stage = next(reversed(self.stages), None)
        row = {"bytes": size, "first": self.event, "source": source, "category": category, "stage": stage}
        self.rows.append(row)
        return row

    def free(self, row: dict) -> None:
        self.event += 1
        row["last"] = self.event

    def profile(self, mode: str, **changes) -> dict:
        edges = [*self.stages.values(), self.event]
        stages = {name: (first, last) for name, first, last in zip(self.stages, edges, edges[1:], strict=False)}
        allocations = pd.DataFrame([{"address": 0, "last": self.event + 1} | row for row in self.rows])
        seconds = tuple(event * 1e-3 for event in range(self.event + 1))
        said = summary(History("torch.cuda memory history", allocations, seconds, stages))
        peak = said["peak_bytes"]
        return said | {
            "device": "Chip A", "mode": mode, "precision": "fp32", "sources": "source line", "snapshot": None,
            "torch_peak_bytes": peak, "torch_requested_peak_bytes": peak, "reserved_peak_bytes": 2 * peak, "notes": [],
        } | changes  # fmt: skip


def training(layers: int = 6, activation: int = 40_000_000, weights: int = 1_000_000_000, **changes) -> dict:
    """A training step: activations climb through the layers and fall again, while gradients come."""
    step, kept = Step(parameters=weights, optimizer_state=2 * weights, other=1_000_000), []
    step.stage("forward")
    for _ in range(layers):
        passing = step.make("temporary", activation // 2, "lmcore/functional.py:27 softmax")
        kept += [step.make("activations", activation) for _ in range(3)]
        step.free(passing)
    step.stage("loss")
    kept.append(step.make("activations", activation // 4, "lmcore/functional.py:60 cross_entropy"))
    step.stage("backward")
    for row in reversed(kept):
        passing = step.make("temporary", activation, "MulBackward0")
        if row["bytes"] == activation:
            step.make("gradients", weights // (3 * layers), "gradient of layers.0.ffn.w1.weight")
        step.free(row)
        step.free(passing)
    step.stage("optimizer")
    for _ in range(layers):
        step.free(step.make("temporary", weights // (3 * layers), "lmcore/optimizer.py:90 adamw_update"))
    return step.profile("train_step", **changes)
