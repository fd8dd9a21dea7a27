"""Timing tables for readers, as `lmcore benchmark` prints them."""

import tempfile

import pandas as pd

from lmcore import results
from lmcore.config import MODEL_SIZES, to_dict
from lmcore.profiling import readable as timings
from lmcore.profiling import timing
from lmcore.profiling.workload import PHASES, case_grid
from lmcore.results import write_results

OOM = (
    "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 1 MiB is free."
)


def record(name, config, walls, device="NVIDIA H200"):
    """A record whose steps, warm-ups first, take `walls` seconds; None: out of memory."""
    environment = {"device": device, "torch": "2"}
    head = {"case": name, "config": to_dict(config), "environment": environment}
    if walls is None:
        return head | {"outcome": "out of memory", "reason": OOM, "result": None}
    many = {"forward": 1, "forward_backward": 3, "train_step": 4}[config.mode]
    samples = [
        {
            "wall": wall,
            "cuda": 0.99 * wall,
            **dict.fromkeys(PHASES),
            **{phase: wall * share for phase, share in zip(PHASES[:many], (0.3, 0.02, 0.6, 0.08), strict=False)},
            "warmup": number < config.warmup_steps,
            "device_allocations": 0,
            "page_faults": 1,
        }
        for number, wall in enumerate(walls)
    ]
    return head | {"outcome": "complete", "reason": None,
                   "result": {"device": device, "samples": samples, "peak_memory_bytes": 10**9}}  # fmt: skip


def written(table):
    """The table as a notebook has it: through a results file, which leaves numbers of numpy's, and NaN for None."""
    with tempfile.TemporaryDirectory() as folder:
        return write_results(table, f"{folder}/table.json", {})


def timing_table(records):
    return written(timing.timing_table(records))


def grid(sizes=("small", "2.7b"), lost=(), **options):
    far, records = {"forward": 1, "forward_backward": 3, "train_step": 4}, {}
    for name, config in case_grid(sizes, (256,), ("fp32",), warmup_steps=1, steps=4).items():
        base = far[config.mode] * MODEL_SIZES[config.size]["d_model"] / 1024
        walls = None if name in lost else [base * (1 + 0.001 * shift) for shift in (9, -1, 1, -1, 1)]
        records[name] = record(name, config, walls, **options)
    return records


def test_tables_for_readers():
    table = timing_table(grid(lost=("2.7b-256-fp32-train_step",)))
    shown = timings.readable(table)
    assert shown.equals(timings.readable(timing.timing_table(grid(lost=("2.7b-256-fp32-train_step",)))))
    assert "context" not in shown
    assert shown["wall clock (ms)"].iloc[-1] == "out of memory"
    assert "nan" not in shown.to_markdown() + shown.to_latex()
    assert "MFU" not in timings.readable(timing_table(grid(device="Chip A")))
    assert timings.spread(0.0345678, 0.000221) == "34.6 ± 0.22"
    assert timings.spread(0.5, None) == "500"
    assert timings.spread(None, None) == timings.MISSING
    row = {"wall_mean": 0.0428, "wall_median": 0.02478, "wall_spread": 0.0561, "busy_median": 0.5, "busy_spread": None}
    assert [timings.median_spread(row, clock) for clock in ("wall", "busy")] == ["24.8 (56)", "500"]
    row |= {"outcome": "complete", "host_bound": False}
    calm = row | {"wall_spread": 0.001}
    assert [timings.timed(calm | {"host_bound": waits}) for waits in (True, False)] == [
        "24.8 (1.0); busy 500",
        "24.8 (1.0)",
    ]
    assert timings.timed(row) == "24.8 (56); busy 500"  # it does not wait for the host all the time
    assert timings.timed(row | {"outcome": "out of memory", "wall_median": None}) == "out of memory"
    assert timings.median_spread({"wall_median": None, "wall_spread": None}) == timings.MISSING
    assert [timings.rate(value) for value in (2.5e12, 3e10, None)] == ["2.50 TFLOP/s", "30.0 GFLOP/s", timings.MISSING]
    sources = results.provenance_of_cases(grid(("small",)))
    assert (sources["device"], sources["cases"]) == ("NVIDIA H200", 3)


def test_readers_are_told_of_fused_operations():
    """Where there are some beside plain ones."""
    records = grid(("small",))
    plain = timing_table(records)
    fused = timing_table({name: r | {"config": r["config"] | {"ops": "fused"}} for name, r in records.items()})
    assert "ops" not in timings.readable(plain)
    assert timings.readable(pd.concat([plain, fused]))["ops"].tolist() == ["plain"] * 3 + ["fused"] * 3
