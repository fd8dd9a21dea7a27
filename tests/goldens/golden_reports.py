"""Which tables are made from the results of the reference machine: as notebooks 04 to 07 and the README make them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import golden_library as library


def reports(results: Path) -> Iterator[tuple[str, Any]]:
    """Name and content of each: a table, or a text with tables."""
    rows = {path.stem: library.read_results(path)[0] for path in sorted(results.glob("*.json")) if is_table(path)}
    yield "README, results", library.results_block(results)
    yield "README, measurements", library.measurements_block(results)
    yield "README, faults", library.faults_block(results.parent / "faults.json")
    yield from benchmark(rows)
    yield from nsys(rows)
    yield from memory(rows)
    yield from speed(results)


def is_table(path: Path) -> bool:
    return path.stem not in ("speed", "answers", "exploration", "trees") and not path.stem.startswith("generate")


def benchmark(rows: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Notebook 04."""
    table, parts, study = rows["benchmark"], rows["components"], rows["study"]
    yield "benchmark, passes", library.benchmark_answers.passes_table(table, 256)
    yield "benchmark, timings", library.benchmark_answers.timings_answer(table, 256)
    yield "benchmark, contexts", library.benchmark_answers.contexts_answer(table, "forward")
    yield "benchmark, utilization", library.benchmark_answers.utilization_answer(table, 256, "train_step")
    yield "benchmark, warm-ups", library.warmups.warmup_table(rows["warmups"], rows["warmup_samples"])
    yield "benchmark, FFN and attention", library.roofline.ratio_table(parts)
    yield "benchmark, roofline", library.roofline.roofline_table(parts[parts["cell"] == parts["cell"].iloc[-1]])
    yield "benchmark, mixed precision", library.mixed_precision.speedup_table(table)
    batch = study[(study["context_length"] == 512) & (study["attention"] == "plain")]
    context = study[(study["batch_size"] == 8) & (study["precision"] == "fp16")]
    optimizations = study[(study["batch_size"] == 16) & (study["context_length"] == 1024)]
    yield "study, batch size", library.study_answers.batch_answer(batch)
    yield "study, precisions", library.study_answers.compared(batch)
    yield "study, context", library.study_answers.context_answer(context)
    yield "study, optimizations", library.optimizations.optimizations_table(optimizations)
    yield "study, optimizations, shown", library.optimizations.optimizations_answer(optimizations)


def nsys(rows: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Notebook 05."""
    table, found, kinds = rows["nsys_profiles"], rows["nsys_kernels"], rows["nsys_kinds"]
    attention = rows["nsys_attention"]
    ceiling = library.nsys_shares.copy_ceiling(rows["components"], table)
    yield "nsys (a)", library.nsys_answers.forward_time_answer(table)
    yield "nsys, phases", library.nsys_answers.phases_text(table)
    yield "nsys (b)", library.nsys_kernels.top_kernel_answer(table, found)
    yield "nsys (c)", library.nsys_kernels.other_kernels_answer(table, found, kinds)
    yield "nsys (d)", library.nsys_shares.training_answer(table, kinds)
    yield "nsys (e)", library.nsys_shares.softmax_answer(table, attention, ceiling)
    yield "nsys, copy ceiling", ceiling
    yield "nsys, softmax and products", library.nsys_shares.softmax_pairs(attention)
    yield "nsys, pitfalls", library.nsys_pitfalls.pitfalls_text(rows["nsys_pitfalls"], "Nsight Systems", 3)


def memory(rows: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Notebook 06."""
    peaks, stages, composition = rows["memory_peaks"], rows["memory_stages"], rows["memory_composition"]
    answers = library.peak_answers
    largest = rows["memory_largest"]
    precision = peaks["precision"].iloc[0]
    yield "memory (a)", library.memory_answers.timeline_answer(stages[stages["context_length"] == 512])
    yield "memory (b)", answers.peaks_answer(peaks, stages, precision)
    yield "memory (c)", answers.precision_answer(peaks, composition[composition["context_length"] == 512], stages)
    yield "memory (e)", library.memory_sizes.largest_answer(largest[largest["precision"] == precision])
    yield "memory, accounting", library.memory_sizes.accounting_answer(peaks, composition)
    yield "memory, kept", library.kept.kept_answer(rows["memory_kept"], 32)


def speed(results: Path) -> Iterator[tuple[str, Any]]:
    """Section 8 of notebook 07, and the README."""
    recorded = library.read_speed(results)
    yield "speed, comparison", library.comparison(recorded.rows, recorded.targets).drop(columns=["judged"])
    yield "speed, README", library.speed_block(results)
