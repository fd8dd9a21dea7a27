"""`lmcore profile`: the time, kernels and memory of a step of one's own code."""

import inspect
import os
import pkgutil
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro

from lmcore.cli.memory import described
from lmcore.cli.nsys import pass_lines, text
from lmcore.errors import UserError, require
from lmcore.files import write_json


def profile(
    function: Annotated[str, tyro.conf.Positional],
    out: Path = Path("runs/profile"),
    tokens: int | None = None,
    top: int = 10,
) -> int:
    """Profile a step of your own PyTorch code: its time and energy, its kernels by range, its memory by owner.

    Args:
        function: module:function, in the current folder or installed; it returns step, (step, model) or (step, model,
            optimizer), where step is a function without arguments. A model gives ranges, and the memory its owners.
        out: Folder for profile.json.gz, a record for ui.perfetto.dev, and memory.json.
        tokens: Tokens that a step goes through, for rates.
        top: How many kernels, and how many allocations, to print.
    """
    step, model, optimizer = made_by(function)
    from lmcore.profiling import own
    from lmcore.profiling.nsys.profile import summary
    from lmcore.profiling.nsys.trace import busy_table
    from lmcore.profiling.readable import median_spread

    where = str(own.device_of(model, "auto"))
    times = own.time_steps(step, tokens=tokens, device=where)
    print(times["device"], *(f"{clock}: {median_spread(times, clock)} ms" for clock in ("wall", "busy")), sep="\n")
    rates = ("peak_memory_bytes", "tokens_per_second", "joules_per_step", "joules_per_token")
    print(*(f"{name.replace('_', ' ')}: {times[name]:,.6g}" for name in rates if times[name]), sep="\n")
    trace = own.profile_kernels(step, model, folder=out, device=where)
    lines = [trace.tool, *trace.notes, *pass_lines(summary(trace, own.STEP), top)]
    print(*lines, *text(busy_table(trace, own.STEP).drop(columns="instance")), sep="\n")
    memory = own.record_memory(step, model, optimizer, device=where)
    write_json(out / "memory.json", memory)
    print("", described(memory, top), f"\nWritten to {out}: profile.json.gz and memory.json.", sep="\n")
    return 0


def made_by(target: str) -> tuple[Any, Any, Any]:
    """Step, model and optimizer, the last two perhaps None, that the function "module:function" returns.

    Raises `UserError` for what is not there or returns something else.
    """
    require(":" in target, f"Name a function as module:function, such as train:profiled, not {target!r}.")
    sys.path.insert(0, os.getcwd())
    try:
        inspect.signature(function := pkgutil.resolve_name(target)).bind()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise UserError(f"{target} cannot be called from {os.getcwd()} without arguments: {error}.") from error
    made = function()
    step, model, optimizer = (*(made if isinstance(made, tuple) else (made,)), None, None)[:3]
    others = (model, "named_parameters"), (optimizer, "param_groups")
    fits = callable(step) and all(part is None or hasattr(part, name) for part, name in others)
    require(fits, f"{target} returned {made!r}; let it return step, (step, model) or (step, model, optimizer).")
    return step, model, optimizer
