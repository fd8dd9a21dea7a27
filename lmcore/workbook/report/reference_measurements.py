"""The measured part of the reference results: the figures of notebooks 04 to 06, and what the README says of them."""

import gzip
import json
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from lmcore.workbook.report.answers import format_bytes, format_percent, format_seconds, format_significant
from lmcore.workbook.report.benchmark import figures as benchmark
from lmcore.workbook.report.benchmark.roofline_figure import roofline_figure
from lmcore.workbook.report.benchmark.study_figures import batch_figure, context_figure, optimizations_figure
from lmcore.workbook.report.memory import figures as memory
from lmcore.workbook.report.nsys import figures as nsys
from lmcore.workbook.report.nsys.shares import softmax_pairs
from lmcore.workbook.report.nsys.timeline import timeline_figure
from lmcore.workbook.report.tables import read_results

CONTEXT, PRECISION = 256, "fp32"
"""Where the sizes are compared."""

IDLE = 0.1
"""Share of a step up to which a GPU may be idle and still count as what sets the pace."""


def measurement_figures(results: Path) -> dict[str, Figure]:
    """The figures that are drawn from a machine's tables and timelines, by name."""
    timings, warmups, parts, study = (_rows(results, name) for name in _TIMING)
    profiles, kinds, attention = (_rows(results, f"nsys_{name}") for name in ("profiles", "kinds", "attention"))
    peaks, composition, kept = (_rows(results, f"memory_{name}") for name in ("peaks", "composition", "kept"))
    steps = composition[composition["passes"] == "train_step"]
    timeline = _timeline(results, "nsys_small-256-fp32")
    return {
        "benchmark_times": benchmark.times_figure(timings, CONTEXT),
        "benchmark_contexts": benchmark.contexts_figure(timings),
        "benchmark_warmups": benchmark.warmups_figure(warmups),
        "benchmark_ffn_attention": benchmark.ffn_attention_figure(parts),
        "benchmark_utilization": benchmark.utilization_figure(timings, CONTEXT, "train_step"),
        "benchmark_roofline": roofline_figure(parts[parts["cell"] == parts["cell"].iloc[-1]]),
        "study_batch_size": batch_figure(_study(study, context_length=512, attention="plain")),
        "study_context": context_figure(_study(study, batch_size=8, precision="fp16")),
        "study_optimizations": optimizations_figure(_study(study, batch_size=16, context_length=1024)),
        "nsys_idle": nsys.idle_figure(profiles, PRECISION),
        "nsys_shares": nsys.shares_figure(profiles, kinds, PRECISION),
        "nsys_contexts": nsys.contexts_figure(profiles, kinds),
        "nsys_attention": nsys.attention_figure(attention, softmax_pairs(attention)),
        "nsys_timeline_inference": timeline_figure(timeline["inference"], True),
        "nsys_timeline_training": timeline_figure(timeline["training"], True),
        "memory_peaks": memory.peaks_figure(peaks),
        "memory_kept": memory.kept_figure(kept),
        **{f"memory_composition_{size}": memory.composition_figure(part) for size, part in steps.groupby("size")},
        **{f"memory_timeline_{size}": _memory_timeline(results, size) for size in ("large", "2.7b")},
    }


_TIMING = ("benchmark", "warmup_samples", "components", "study")


def _rows(results: Path, name: str) -> pd.DataFrame:
    return read_results(results / f"{name}.json")[0]


def _study(study: pd.DataFrame, **wanted: Any) -> pd.DataFrame:
    for column, value in wanted.items():
        study = study[study[column] == value]
    return study


def _timeline(results: Path, name: str) -> dict[str, Any]:
    """A record that is too large to be read by people, and so is kept compressed."""
    return json.loads(gzip.decompress((results / "timelines" / f"{name}.json.gz").read_bytes()))


def _memory_timeline(results: Path, size: str) -> Figure:
    titles = {"forward": "forward pass", "train_step": "training step"}
    return memory.timeline_figure(
        {
            f"{size}, {title}, context 512, {PRECISION}": _timeline(results, f"memory_{size}-512-fp32-{passes}")
            for passes, title in titles.items()
        }
    )


def measurements_block(results: Path) -> str:
    """What the README says of a machine's benchmark, profiles and memory, as Markdown; numbers from results alone."""
    timings, provenance, _ = read_results(results / "benchmark.json")
    here = timings[(timings["context_length"] == CONTEXT) & (timings["outcome"] == "complete")]
    profiles = _rows(results, "nsys_profiles").set_index("cell")
    rows = [_size_row(part, profiles) for _, part in here.groupby("size", sort=False)]
    table = pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True)
    return (
        f"The plain eager model at batch 4, context {CONTEXT}, vocabulary 10,000, on one {provenance['device']} "
        f"(medians of 10 steps after 5 warm-ups; matmul shares by Nsight Systems):\n\n{table}\n\n"
        f"{_repeat_sentence(timings, _rows(results, 'benchmark_repeat'), profiles)} {_memory_sentence(results)} "
        f"{_optimizations_sentence(_rows(results, 'study'))} Notebooks 04 to 06 answer every question of the handouts "
        f"from [these tables](results/{results.name}).\n"
    )


def _size_row(part: pd.DataFrame, profiles: pd.DataFrame) -> dict[str, str]:
    def cell(precision: str, passes: str) -> pd.Series:
        return part[(part["precision"] == precision) & (part["passes"] == passes)].iloc[0]

    step, half = cell("fp32", "train_step"), cell("bf16", "train_step")
    profile = profiles.loc[step["cell"]]
    return {
        "size": step["size"],
        "forward, fp32": format_seconds(cell("fp32", "forward")["wall_median"]),
        "step, fp32": format_seconds(step["wall_median"]),
        "MFU": format_percent(step["mfu"], 2),
        "forward, bf16": format_seconds(cell("bf16", "forward")["wall_median"]),
        "step, bf16": format_seconds(half["wall_median"]),
        "MFU, bf16": format_percent(half["mfu"], 2),
        "peak memory, fp32": format_bytes(step["peak_memory_bytes"]),
        "matmul, inference": format_percent(profile["inference_matmul_share"], 2),
        "matmul, step": format_percent(profile["training_matmul_share"], 2),
    }


def _repeat_sentence(timings: pd.DataFrame, repeat: pd.DataFrame, profiles: pd.DataFrame) -> str:
    """How far a second run, on another host, is from the first: where the GPU sets the pace and where the CPU does."""
    both = timings.merge(repeat, on="cell", suffixes=("", "_again")).set_index("cell")
    both = both[(both["outcome"] == "complete") & (both["outcome_again"] == "complete")]
    idle = (profiles["training_idle_seconds"] / profiles["training_gpu_seconds"]).astype(float).reindex(both.index)
    ratio = (both["wall_median_again"] / both["wall_median"]).astype(float)
    apart = pd.concat([ratio, 1 / ratio], axis=1).max(axis=1) - 1
    gpu, cpu = apart[idle <= IDLE], apart[idle > IDLE]
    return (
        f"Training steps in which the GPU is idle for up to {format_percent(IDLE, 2)} of the time were repeated on "
        f"another host within {format_percent(gpu.max(), 2)} ({len(gpu)} cells); those in which it waits longer differ "
        f"by up to {format_percent(cpu.max(), 2)} ({len(cpu)} cells): small models wait for a CPU that launches their "
        "kernels one by one, and there hosts, and processes on one host, differ."
    )


def _memory_sentence(results: Path) -> str:
    peaks = _rows(results, "memory_peaks")
    apart = (peaks["predicted_bytes"] / peaks["peak_bytes"] - 1).abs().max()
    return (
        f"Peak memory is predicted from shapes alone within {format_percent(apart, 2)} in all {len(peaks)} cells that "
        "were recorded."
    )


def _optimizations_sentence(study: pd.DataFrame) -> str:
    """What checkpointing and fused attention change at batch 16, context 1024."""
    cells = _study(study, batch_size=16, context_length=1024)
    plain = cells[(cells["attention"] == "plain") & cells["checkpoint_every"].isna()].iloc[0]

    def change(row: pd.Series) -> str:
        memory_ratio = row["peak_memory_bytes"] / plain["peak_memory_bytes"]
        speed = row["tokens_per_second"] / plain["tokens_per_second"]
        return (
            f"{format_significant(memory_ratio, 2)} times the memory and {format_significant(speed, 2)} times the speed"
        )

    fused = cells[(cells["attention"] == "sdpa") & cells["checkpoint_every"].isna()].iloc[0]
    checkpointed = cells[(cells["attention"] == "plain") & cells["checkpoint_every"].notna()].iloc[0]
    return (
        f"On a model of 12 layers at batch 16 and context 1,024, gradient checkpointing has {change(checkpointed)} "
        f"of the plain step, fused attention {change(fused)}."
    )
