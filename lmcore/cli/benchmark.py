"""`lmcore benchmark`: one cell or a sweep of them, timed (CS336 A2 benchmarking_script (a))."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from lmcore.errors import EXIT_FAILURE, require
from lmcore.profiling.options import BenchmarkConfig, benchmark_cells, check_device, require_covered
from lmcore.stopping import stoppable

if TYPE_CHECKING:  # PyTorch is imported when the command runs
    import pandas as pd

DEFAULTS = BenchmarkConfig()


def benchmark(
    settings: Annotated[BenchmarkConfig, tyro.conf.arg(name="")] = DEFAULTS,
    out: Path = Path("runs/benchmark"),
    markdown: bool = False,
    latex: bool = False,
) -> int:
    """Time forward, backward and optimizer of a model, or of many: each cell in a process of its own.

    A cell that does not fit into the memory is a row that says so. The same command goes on where it was stopped. Exit
    codes: 0 measured or out of memory, 1 a cell failed, 130 or 143 stopped by SIGINT or SIGTERM.

    Args:
        settings: What is timed.
        out: Folder for the cells, those of other commands too, and for tables of this command's: benchmark.json,
            samples.json and the same as CSV.
        markdown: Print the table as Markdown.
        latex: Print the table as LaTeX.
    """
    from lmcore.profiling.cells import FINISHED, run_apart, run_cells
    from lmcore.profiling.timing import measure, samples_table, timing_table
    from lmcore.workbook.report.benchmark.views import failures
    from lmcore.workbook.report.tables import provenance_of_cells, write_results

    cells = benchmark_cells(settings)
    if settings.ops == "fused":
        require_covered(cells)
    with stoppable():
        # in a process of its own: this one is not to hold a GPU while cells are measured
        outcome, reason = run_apart(check_device, (settings.device, settings.precision), None)
        require(outcome == "complete", str(reason))
        records = run_cells(measure, cells, out / "cells", title="benchmark")
    table, source = timing_table(records), provenance_of_cells(records)
    write_results(table, out / "benchmark.json", source)
    write_results(samples_table(records), out / "samples.json", source)
    print(formatted(table, markdown, latex))
    print(failures(table) or f"Written to {out}/benchmark.json and .csv, every step to samples.json.")
    return 0 if all(record["outcome"] in FINISHED for record in records.values()) else EXIT_FAILURE


def formatted(table: "pd.DataFrame", markdown: bool = False, latex: bool = False) -> str:
    """The table for the terminal, or as Markdown, or as LaTeX, or both."""
    from lmcore.workbook.report.benchmark.views import readable

    shown = readable(table)
    texts = []
    if markdown:
        texts.append(shown.to_markdown(index=False, disable_numparse=True))
    if latex:
        texts.append(shown.to_latex(index=False, escape=True).replace("±", r"$\pm$").replace("–", "--"))
    return "\n\n".join(texts) or shown.to_string(index=False)
