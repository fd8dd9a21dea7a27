"""`lmcore memory`: what the memory of a step was for, or what a snapshot of somebody else holds (CS336 A2 1.1.6)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import tyro

from lmcore.cli.output import printable
from lmcore.errors import EXIT_FAILURE, EXIT_OUT_OF_MEMORY
from lmcore.profiling.cases import GridConfig, grid_cases

DEFAULTS = GridConfig(mode=("forward", "train_step"), warmup_steps=1, steps=1)


def memory(
    settings: Annotated[GridConfig, tyro.conf.arg(name="")] = DEFAULTS,
    out: Path = Path("runs/memory"),
    snapshot: Path | None = None,
    top: int = 10,
) -> int:
    """Record every allocation of a step: peaks, what they were for, the largest and the lines they come from.

    On a GPU a snapshot for docs.pytorch.org/memory_viz is kept; without one the storages of tensors are recorded. The
    records are reused by the same command. Exit codes: 0 recorded, 4 out of memory, 1 a case failed; 129, 130 or 143
    stopped by SIGHUP, SIGINT or SIGTERM.

    Args:
        settings: Which steps are recorded; at least one goes before, so that the optimizer has its state.
        out: Folder for the results and snapshots.
        snapshot: Read this snapshot, of whatever program, instead of recording one.
        top: How many of the largest allocations to print.
    """
    if snapshot is not None:  # what its allocations were for is unknown
        from lmcore.profiling.memory.snapshot import histories_of, read_snapshot
        from lmcore.profiling.memory.timeline import summary

        histories = histories_of(read_snapshot(snapshot))
        print("\n\n".join(f"Device {n}: {described(summary(one), top)}" for n, one in histories.items()))
        return 0
    from lmcore.profiling.memory.profile import profile_memory
    from lmcore.profiling.runner import run_cases

    records = run_cases(profile_memory, grid_cases(settings), out / "cases", "memory")
    for name, record in records.items():
        if record["outcome"] != "complete":
            print(f"\n{name}: {record['outcome']}: {record['reason']}")
            continue
        print(f"\n{name}\n{described(record['result'], top)}")
        if kept := record["result"]["snapshot"]:
            file = out / "cases" / name / kept["file"]
            print(f"Drop {file} into https://docs.pytorch.org/memory_viz to see every allocation over time.")
    outcomes = {record["outcome"] for record in records.values()}
    return EXIT_FAILURE if "failed" in outcomes else EXIT_OUT_OF_MEMORY if "out of memory" in outcomes else 0


def described(result: Mapping[str, Any], top: int) -> str:
    """Peaks, categories and the largest allocations of a profile, for the terminal."""
    from tabulate import tabulate

    from lmcore.formatting import format_bytes as size

    where = f" in {result['peak_stage']}" if result["peak_stage"] else ""
    text = f"{result['tool']}, {result['events']:,} events. Peak: {size(result['peak_bytes'])}{where}."
    if result.get("torch_peak_bytes"):
        text += f" The allocator itself counts {size(result['torch_peak_bytes'])}, rounded up."
    splits = [result[f"{when}_by_category"] for when in ("before", "peak", "after", "most")]
    tables = {
        ("stage", "peak", "at its end"): [
            (s["name"], size(s["peak_bytes"]), size(s["end_bytes"])) for s in result["stages"]
        ],
        ("memory for", "before", "at the peak", "after", "its own peak"): [
            (name, *(size(split[name]) for split in splits)) for name in result["categories"]
        ],
        ("largest", "count", "memory for", "stage", "source"): [
            (size(row["bytes"]), row["count"], row["category"], row["stage"], printable(row["source"], kept=""))
            for row in result["largest"][:top]
        ],
    }
    lines = [text, *result.get("notes", ())]
    lines += [f"\n{tabulate(rows, header, 'plain', disable_numparse=True)}" for header, rows in tables.items() if rows]
    return "\n".join(lines)
