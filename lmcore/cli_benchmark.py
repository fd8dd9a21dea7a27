"""`lmcore benchmark`: one cell or a sweep of them, timed (CS336 A2 benchmarking_script (a))."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from lmcore.config import MODEL_SIZES, ModelConfig, OptimizerConfig, model_config, replace, require, require_choices
from lmcore.errors import UserError

if TYPE_CHECKING:  # PyTorch is imported when the command runs
    import pandas as pd

    from lmcore.profiling.workload import WorkloadConfig

EXIT_FAILED_CELL = 1


@dataclass(frozen=True)
class BenchmarkConfig:
    """What is timed: every combination of the options that take several values."""

    size: tuple[str, ...] = ()
    """Named sizes; none: the model whose numbers the --model options give."""
    context_length: tuple[int, ...] = ()
    """None: that of --model.context-length."""
    precision: tuple[Literal["fp32", "tf32", "bf16", "fp16"], ...] = ("fp32",)
    passes: tuple[Literal["forward", "forward_backward", "train_step"], ...] = ("forward", "forward_backward")
    """forward: inference; forward_backward: with loss and gradients; train_step: and AdamW's update."""
    attention: tuple[Literal["plain", "sdpa"], ...] = ()
    """None: that of --model.attention."""
    batch_size: int = 4
    warmup_steps: int = 5
    steps: int = 10
    compile: bool = False
    device: str = "auto"
    """auto, cpu, mps, cuda or cuda:N."""
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self):
        require_choices(self)
        require(bool(self.precision), "Give at least one precision: fp32, tf32, bf16 or fp16.")
        require(bool(self.passes), "Give at least one of the passes: forward, forward_backward or train_step.")
        defaults = ModelConfig()
        own = [name for name in MODEL_SIZES["small"] if getattr(self.model, name) != getattr(defaults, name)]
        options = ", ".join(f"--model.{name.replace('_', '-')}" for name in own)
        require(not (self.size and own), f"A named size has its own numbers: give either --size or {options}.")


DEFAULTS = BenchmarkConfig()


def benchmark(
    settings: Annotated[BenchmarkConfig, tyro.conf.arg(name="")] = DEFAULTS,
    out: Path = Path("runs/benchmark"),
    markdown: bool = False,
    latex: bool = False,
) -> int:
    """Time forward, backward and optimizer of a model, or of many: each cell in a process of its own.

    A cell that does not fit into the memory is a row that says so. The same command goes on where it was stopped. Exit
    codes: 0 measured or out of memory, 1 a cell failed.

    Args:
        settings: What is timed.
        out: Folder for the cells, and for benchmark.json, samples.json and the same as CSV.
        markdown: Print the table as Markdown.
        latex: Print the table as LaTeX.
    """
    from lmcore.profiling.cells import FINISHED, run_apart, run_cells
    from lmcore.profiling.timing import measure, samples_table, timing_table
    from lmcore.report.benchmark.views import failures
    from lmcore.report.tables import provenance_of_cells, write_results

    cells = benchmark_cells(settings)
    # in a process of its own: this one is not to hold a GPU while cells are measured
    outcome, reason = run_apart(check_device, (settings.device, settings.precision), None)
    require(outcome == "complete", str(reason))
    records = run_cells(measure, cells, out / "cells", title="benchmark")
    table, source = timing_table(records), provenance_of_cells(records)
    write_results(table, out / "benchmark.json", source)
    write_results(samples_table(records), out / "samples.json", source)
    print(formatted(table, markdown, latex))
    print(failures(table) or f"Written to {out}/benchmark.json and .csv, every step to samples.json.")
    return 0 if all(record["outcome"] in FINISHED for record in records.values()) else EXIT_FAILED_CELL


def benchmark_cells(settings: BenchmarkConfig) -> "dict[str, WorkloadConfig]":
    """The cells that the options ask for, by names that say how they differ. Raises `UserError` on bad values."""
    from lmcore.profiling.workload import WorkloadConfig

    s, cells = settings, {}
    models = {size: replace(s.model, **MODEL_SIZES[model_size(size)]) for size in s.size} or {None: s.model}
    contexts, attentions = s.context_length or (s.model.context_length,), s.attention or (s.model.attention,)
    for (size, model), *ways in itertools.product(models.items(), contexts, attentions, s.precision, s.passes):
        context, attention, precision, passes = ways
        config = WorkloadConfig(
            model=replace(model, context_length=context, attention=attention),
            batch_size=s.batch_size, passes=passes, precision=precision, compile=s.compile,
            warmup_steps=s.warmup_steps, steps=s.steps, optimizer=s.optimizer, seed=s.seed, device=s.device, size=size,
        )  # fmt: skip
        name = [size or f"own-{model.num_layers}x{model.d_model}", str(context), precision, passes]
        name += [attention] * (attention != "plain") + ["compiled"] * s.compile + [f"b{s.batch_size}"]
        cells["-".join(name)] = config
    return cells


def model_size(name: str) -> str:
    """`name` if there is a size of that name. Raises `UserError` otherwise."""
    model_config(name)
    return name


def check_device(device: str, precisions: Sequence[str]) -> None:
    """Raises `UserError` where no cell could run: the device is not there, or does not compute in a precision."""
    import torch

    from lmcore.device import autocast, select_device

    chosen, _ = select_device(device)
    for precision in precisions:
        try:
            with autocast(chosen, precision):
                torch.ones(2, 2, device=chosen) @ torch.ones(2, 2, device=chosen)
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            raise UserError(
                f"{chosen.type} does not compute in {precision} ({why}); choose another --precision or --device."
            ) from None


def formatted(table: "pd.DataFrame", markdown: bool = False, latex: bool = False) -> str:
    """The table for the terminal, or as Markdown, or as LaTeX, or both."""
    from lmcore.report.benchmark.views import readable

    shown = readable(table)
    texts = []
    if markdown:
        texts.append(shown.to_markdown(index=False, disable_numparse=True))
    if latex:
        texts.append(shown.to_latex(index=False, escape=True).replace("±", r"$\pm$").replace("–", "--"))
    return "\n\n".join(texts) or shown.to_string(index=False)
