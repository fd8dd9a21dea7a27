"""`lmcore profile`: a step of any PyTorch code under the clock and the profilers."""

import difflib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tyro

from lmcore.errors import UserError, require


def profile(
    function: Annotated[str, tyro.conf.Positional],
    out: Path = Path("runs/profile"),
    device: str = "auto",
    tokens: int | None = None,
    top: int = 10,
) -> int:
    """Profile a step of your own code: its time, its kernels by range, and its memory by owner.

    Exit codes: 0 measured, 2 the function is not there or fails.

    Args:
        function: module:function, in the current folder or installed; it returns step, (step, model) or (step, model,
            optimizer), where step is a function without arguments. A model gives ranges, and the memory its owners.
        out: Folder for the records: profile.json.gz, for ui.perfetto.dev, and memory.json.
        device: Where the step computes: auto (the model's), cpu, mps, cuda or cuda:N.
        tokens: Tokens of one step, for rates.
        top: How many kernels, and how many allocations, to print.
    """
    step, model, optimizer = made_by(function)
    import pandas as pd

    from lmcore.cli.memory import described
    from lmcore.cli.nsys import pass_lines, text
    from lmcore.files import write_json
    from lmcore.profiling import own
    from lmcore.profiling.nsys.profile import summary
    from lmcore.profiling.nsys.trace import busy_table

    where = str(own.device_of(model, device))
    times = own.time_steps(step, device=where, tokens=tokens)
    clocks = pd.DataFrame([{"clock": name, **times.pop(name)} for name in ("wall", "cuda", "busy")])
    print(
        *text(clocks.dropna(subset="median")),
        "",
        *(f"{name}: {value}" for name, value in times.items() if value is not None),
        sep="\n",
    )
    trace = own.profile_kernels(step, model, folder=out, device=where)
    busy = busy_table(trace, own.STEP).drop(columns="instance")
    print("", trace.tool, *trace.notes, *pass_lines(summary(trace, own.STEP), top), *text(busy), sep="\n")
    memory = own.record_memory(step, model, optimizer, device=where)
    write_json(out / "memory.json", memory)
    print(
        f"\n{described(memory, top)}\n\nWritten to {out / own.RECORD} (for ui.perfetto.dev) and {out / 'memory.json'}."
    )
    return 0


def made_by(target: str) -> tuple[Callable[[], Any], Any, Any]:
    """Step, model and optimizer, the last two perhaps None, that the function "module:function" returns.

    Raises `UserError` for what is not there, fails, or returns something else; so does the step, when it fails.
    """
    name, _, attribute = target.partition(":")
    require(bool(name and attribute), f"Name the function as module:function, such as train:profiled, not {target!r}.")
    sys.path.insert(0, os.getcwd())
    there = f"There is no module {name} in {os.getcwd()} or among the installed ones; name another."
    require(importlib.util.find_spec(name.partition(".")[0]) is not None, there)
    module = in_a_sentence(lambda: importlib.import_module(name), f"Importing {name}")()
    near = difflib.get_close_matches(attribute, vars(module), n=1)
    meant = f"did you mean {near[0]}?" if near else "give one that it defines."
    require(callable(getattr(module, attribute, None)), f"{module.__file__} has no function {attribute}; {meant}")
    made = in_a_sentence(getattr(module, attribute), target)()
    step, model, optimizer = (*(made if isinstance(made, tuple) else (made,)), None, None)[:3]
    fits = callable(step) and (model is None or hasattr(model, "named_parameters"))
    require(
        fits and (optimizer is None or hasattr(optimizer, "param_groups")),
        f"{target} returned {made!r}; let it return step, (step, model) or (step, model, optimizer).",
    )
    return in_a_sentence(step, f"The step of {target}"), model, optimizer


def in_a_sentence(function: Callable[[], Any], what: str) -> Callable[[], Any]:
    """The function, which raises a `UserError` that says where it failed."""

    def called() -> Any:
        try:
            return function()
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            raise UserError(f"{what} failed at {at.filename}:{at.lineno} ({said}); repair it there.") from error

    return called
