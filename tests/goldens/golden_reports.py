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
    yield from nsys(rows)
    yield from memory(rows)
    yield from kernels(rows, results)


def is_table(path: Path) -> bool:
    return path.stem not in ("speed", "answers", "exploration", "trees") and not path.stem.startswith("generate")


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


def kernels(rows: dict[str, Any], results: Path) -> Iterator[tuple[str, Any]]:
    """Notebook 07."""
    yield "kernels, agreement", library.kernel_attention.agreement_answer(rows["kernels_agreement"])
    yield "kernels, attention", library.kernel_attention.attention_answer(rows["kernels_attention"])
    yield "kernels, loss", library.kernel_parts.loss_answer(rows["kernels_loss"])
    yield "kernels, optimizer", library.kernel_parts.optimizer_answer(rows["kernels_optimizer"])
    yield "kernels, elementwise", library.kernel_parts.elementwise_answer(rows["kernels_elementwise"])
    yield "kernels, decoding", library.kernel_parts.decoding_answer(rows["kernels_decoding"])
    yield "kernels, steps", library.steps.ladder_answer(rows["kernels_steps"])
    yield "kernels, curves", library.steps.curves_answer(library.steps.read_curves(results))
    speed = library.speed.read_speed(results)
    yield "speed, comparison", library.speed.comparison(speed).drop(columns=["ours", "peer", "targets"])
    yield "speed, table", library.speed_answers.speed_table(speed)
    yield "speed, README", library.speed_answers.speed_block(results)
