"""Our kernels beside those of `nsys stats --report cuda_gpu_kern_sum`, of an export or a report of Nsight Systems.

`python benchmarks/nsys_check.py profile.sqlite --out nsys_check.json`. Where nsys is not on the PATH, SQL does what the
report documents: instances and total time by kernel name, of the table CUPTI_ACTIVITY_KIND_KERNEL alone.
"""

import argparse
import io
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pandas as pd

from lmcore.errors import require
from lmcore.profiling.nsys.tool import export_report, find_nsys, load_trace
from lmcore.profiling.nsys.trace import totals
from lmcore.provenance import environment
from workbook.report.results import write_results

STATS = ("stats", "--report", "cuda_gpu_kern_sum", "--format", "csv", "--quiet", "--output", "-")
SQL = """SELECT value AS Name, COUNT(*) AS Instances, SUM("end" - start) AS "Total Time (ns)"
    FROM CUPTI_ACTIVITY_KIND_KERNEL JOIN StringIds ON id = demangledName GROUP BY value"""


def of_nsys(export: Path) -> tuple[str, pd.DataFrame]:
    """Who says so, and a row for each kernel name: Name, Instances, Total Time (ns)."""
    if (nsys := shutil.which("nsys")) is None:
        with sqlite3.connect(f"{export.resolve().as_uri()}?mode=ro", uri=True) as db:
            return "SQL", pd.read_sql_query(SQL, db)
    done = subprocess.run([nsys, *STATS, str(export)], capture_output=True, text=True, check=False)
    _, header, rows = done.stdout.partition("Time (%)")
    require(bool(header), f"nsys stats printed no table: {(done.stderr or done.stdout).strip()[-300:]}")
    return "nsys stats", pd.read_csv(io.StringIO(header + rows))


def main() -> int:
    """Prints the largest relative difference of calls and of time, and writes a row for each kernel; 1 above 1e-6."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/nsys_check.json"))
    report, out = vars(parser.parse_args()).values()
    export = export_report(find_nsys(), report) if report.suffix == ".nsys-rep" else report
    trace, (who, theirs) = load_trace(export), of_nsys(export)
    kernels = trace.kernels[~trace.kernels["name"].astype(str).str.startswith("CUDA graph ")]  # no kernels, but graphs
    table = totals(kernels, ["name"]).set_index("name")[["calls", "total_seconds"]]
    theirs = theirs.set_index("Name")[["Instances", "Total Time (ns)"]].div([1, 1e9])
    table = table.join(theirs, how="outer").fillna(0.0).set_axis(["calls", "seconds", "of_nsys", "s_of_nsys"], axis=1)
    apart = float((table[["calls", "seconds"]].to_numpy() / table[["of_nsys", "s_of_nsys"]] - 1).abs().to_numpy().max())
    write_results(table.reset_index(names="kernel"), out, environment(), compared_with=who, largest=apart)
    what = f"{len(table)} kernels, {table['calls'].sum():,.0f} calls, {1e3 * table['seconds'].sum():,.3f} ms"
    print(f"{trace.tool}, {what}; largest difference from {who}: {apart:.2e}")
    return int(not apart <= 1e-6)


if __name__ == "__main__":
    sys.exit(main())
