"""Profiles of memory made up for tests: a step whose every allocation is known."""

from lmcore.config import to_dict
from lmcore.profiling.workload import workload_config

CATEGORIES = ["parameters", "optimizer state", "other", "gradients", "activations", "temporary"]


class Step:
    """A step as it happens: `make` allocates, `free` frees, `stage` names what follows."""

    def __init__(self, **standing: int):
        self.standing = {name.replace("_", " "): size for name, size in standing.items()}
        self.rows, self.stages, self.event = [], [], 0
        self.levels = [dict.fromkeys(CATEGORIES, 0) | self.standing]

    def stage(self, name: str) -> None:
        self.close()
        self.stages.append({"name": name, "first_event": self.event})

    def close(self) -> None:
        if self.stages:
            self.stages[-1].setdefault("last_event", self.event)

    def change(self, category: str, size: int) -> None:
        self.event += 1
        self.levels.append(self.levels[-1] | {category: self.levels[-1][category] + size})

    def make(self, category: str, size: int, source: str = "lmcore/model.py:59 Linear.forward") -> dict:
        self.change(category, size)
        row = {"bytes": size, "first_event": self.event, "last_event": None, "category": category, "source": source}
        self.rows.append(row | {"stage": self.stages[-1]["name"] if self.stages else None})
        return self.rows[-1]

    def free(self, row: dict) -> None:
        self.change(row["category"], -row["bytes"])
        row["last_event"] = self.event

    def profile(self, passes: str, **changes) -> dict:
        self.close()
        totals = [sum(level.values()) for level in self.levels]
        peak = totals.index(max(totals))
        for stage in self.stages:
            first, last = stage["first_event"], stage["last_event"]
            top = max(range(first, last + 1), key=totals.__getitem__)
            stage |= {
                "start": first * 1e-3,
                "end": last * 1e-3,
                "start_bytes": totals[first],
                "end_bytes": totals[last],
            }
            stage |= {"peak_bytes": totals[top], "peak_by_category": self.levels[top]}
        for row in self.rows:
            row["last_event"] = row["last_event"] or self.event + 1
        always = [
            {"bytes": size, "first_event": 0, "last_event": self.event + 1, "category": name, "stage": None,
             "source": f"{name} (7 allocations)"}
            for name, size in self.standing.items()
        ]  # fmt: skip
        allocations = [
            row | {"start": row["first_event"] * 1e-3, "end": row["last_event"] * 1e-3} for row in always + self.rows
        ]
        inside = [s["name"] for s in self.stages if s["first_event"] < peak <= s["last_event"]]
        return {
            "tool": "torch.cuda memory history", "device": "Chip A", "passes": passes, "precision": "fp32",
            "sources": "source line", "truncated": False, "events": self.event, "seconds": self.event * 1e-3,
            "before_bytes": totals[0], "after_bytes": totals[-1], "peak_bytes": totals[peak],
            "peak_seconds": peak * 1e-3, "peak_event": peak, "peak_stage": inside[0] if inside else None,
            "torch_peak_bytes": totals[peak], "torch_requested_peak_bytes": totals[peak],
            "reserved_peak_bytes": 2 * totals[peak], "categories": CATEGORIES,
            "before_by_category": self.levels[0], "peak_by_category": self.levels[peak],
            "after_by_category": self.levels[-1], "stages": self.stages,
            "timeline": {
                "seconds": [event * 1e-3 for event in range(len(self.levels))], "event": list(range(len(self.levels))),
                "bytes": {name: [level[name] for level in self.levels] for name in CATEGORIES},
            },
            "largest": grouped(self.rows, self.event), "standing": [], "allocations": allocations,
            "allocations_total": len(allocations), "allocations_smallest_bytes": min(r["bytes"] for r in allocations),
            "snapshot": None, "notes": [],
        } | changes  # fmt: skip


def grouped(rows: list[dict], events: int) -> list[dict]:
    """The largest allocations, the same ones together."""
    groups: dict[tuple, dict] = {}
    for row in rows:
        keys = ("bytes", "category", "stage", "source")
        group = groups.setdefault(
            tuple(row[key] for key in keys), {key: row[key] for key in keys} | {"count": 0, "kept": 0}
        )
        group["count"] += 1
        group["kept"] += row["last_event"] > events
        group["seconds"] = (row["last_event"] - row["first_event"]) * 1e-3
    largest = sorted(groups.values(), key=lambda group: (-group["bytes"], -group["count"]))
    return [group | {"total_bytes": group["bytes"] * group["count"]} for group in largest[:25]]


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


def inference(layers: int = 6, passing: int = 40_000_000, weights: int = 1_000_000_000, **changes) -> dict:
    """A forward pass that keeps nothing but its last tensor."""
    step = Step(parameters=weights, other=1_000_000)
    step.stage("forward")
    for _ in range(layers):
        rows = [step.make("temporary", passing) for _ in range(2)]
        for row in rows:
            step.free(row)
    step.make("temporary", passing // 2, "lmcore/model.py:59 Linear.forward")
    return step.profile("forward", **changes)


def record(profile: dict | None, size: str = "large", context: int = 128, outcome: str = "complete", **changes) -> dict:
    """The record of a cell as `run_cases` writes it."""
    config = workload_config(size, context, **changes)
    return {
        "cell": f"{size}-{context}-{config.precision}-{config.passes}" + "-sdpa" * (config.model.attention == "sdpa"),
        "config": to_dict(config),
        "outcome": outcome,
        "reason": "CUDA out of memory. Tried to allocate 3.00 GiB." if outcome == "out of memory" else None,
        "environment": {"device": "Chip A"},
        "result": profile,
    }
