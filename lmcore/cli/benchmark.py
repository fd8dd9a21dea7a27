"""`lmcore benchmark`: one benchmark case or a sweep of them, timed (CS336 A2 benchmarking_script (a))."""

import json
from pathlib import Path
from typing import Annotated

import tyro

from lmcore.errors import EXIT_FAILURE, FINISHED
from lmcore.files import write_json
from lmcore.profiling.cases import GridConfig, grid_cases

DEFAULTS = GridConfig()


def benchmark(
    settings: Annotated[GridConfig, tyro.conf.arg(name="")] = DEFAULTS, out: Path = Path("runs/benchmark")
) -> int:
    """Time forward, backward and optimizer of a model, or of many: each case in a process of its own, or in several.

    The table is printed in Markdown; a case that does not fit into the memory is a row that says so. The same command
    resumes where it was stopped. Exit codes: 0 measured or out of memory, 1 a case failed; 129, 130 or 143 stopped by
    SIGHUP, SIGINT or SIGTERM.

    Args:
        settings: What is timed.
        out: Folder for the records, those of other commands too, and for tables of this command's: benchmark.json and
            samples.json.
    """
    from lmcore.profiling.readable import readable
    from lmcore.profiling.timing import measure, repeated, samples_table, timing_table

    records = repeated(measure, grid_cases(settings), out / "cases", "benchmark")
    table, source = timing_table(records), {name: record["environment"] for name, record in records.items()}
    for name, rows in (("benchmark", table), ("samples", samples_table(records))):
        cells = json.loads(rows.to_json(orient="records", double_precision=15))  # what is missing as null
        write_json(out / f"{name}.json", {"provenance": source, "rows": cells})
    print(readable(table).to_markdown(index=False, disable_numparse=True), end="\n\n")
    for name, record in records.items():
        if record["outcome"] != "complete":
            print(f"{name}: {record['outcome']}: {record['reason']}")
    print(f"Written to {out}/benchmark.json, every step to samples.json.")
    return 0 if all(record["outcome"] in FINISHED for record in records.values()) else EXIT_FAILURE
