"""Training steps per second on a CPU: lmcore plain, compiled and fused beside Hugging Face and torch.nn."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cpu.peers import PeerStep, hugging_face, torch_llama
from cpu.turns import median_and_spread, take_turns, turn_by_turn
from lmcore.accounting import training_flops
from lmcore.config import TrainConfig, replace
from lmcore.errors import UserError
from lmcore.model import TransformerLM
from lmcore.train import training_step

Batches = list[tuple[Tensor, Tensor]]
Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

LMCORE: dict[str, dict[str, Any]] = {
    "lmcore plain": {},
    "lmcore sdpa": {"model__attention": "sdpa"},
    "lmcore compiled": {"compile": True},
    "lmcore sdpa compiled": {"model__attention": "sdpa", "compile": True},
    "lmcore fused": {"ops": "fused"},
}
"""Our contestants, as changes to a recipe."""
PEERS = {"Hugging Face": hugging_face, "torch.nn": torch_llama}
"""The others, each plain and compiled."""
WARMUPS = 3
TOLERANCE = 1e-3
"""How far the losses of the first steps may be apart, relatively: all compute the same function."""


def compare_training(
    config: TrainConfig, repeats: int, compiled: bool = True, seconds_per_turn: float = 0.5
) -> dict[str, Any]:
    """Full steps (forward, backward, clipping, AdamW) in float32 of a configuration, in turns of some steps each.

    All start from the same weights and see the same batches. A contestant that cannot run here is a row that says why.
    Raises `UserError` if they do not compute the same.
    """
    config = replace(config, device="cpu", precision="fp32", model__tie_embeddings=False)
    torch.manual_seed(config.seed)
    source = TransformerLM(config.model)
    batches = random_batches(config)
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    for name, make in contestants(source, config).items():
        if "compiled" in name and not compiled:
            continue
        try:
            steps[name] = step = make()
            losses = [step(*batch)[0].item() for batch in batches[:WARMUPS]]
        except (ImportError, UserError) as error:
            steps.pop(name, None)
            rows[name] = {"outcome": "absent", "reason": str(error)}
            continue
        rows[name] = {"outcome": "complete", "first_losses": losses}
    require_same_losses(rows)
    count = max(1, round(seconds_per_turn / take_turns({"": lambda: run(steps["lmcore plain"], batches, 1)}, 1)[""][0]))
    turns = take_turns({name: lambda step=step: run(step, batches, count) for name, step in steps.items()}, repeats)
    for name, seconds in turns.items():
        per_step = [value / count for value in seconds]
        rows[name] |= {"seconds_per_step": per_step} | median_and_spread(per_step)
        rows[name]["tokens_per_second"] = config.tokens_per_step / rows[name]["median"]
        rows[name]["flops_per_second"] = training_flops(config.model, config.batch_size) / rows[name]["median"]
        rows[name]["times_plain"] = median_and_spread(turn_by_turn(turns, name, "lmcore plain"))
    return {
        "parameters": sum(p.numel() for p in source.parameters()),
        "batch_size": config.batch_size,
        "context_length": config.model.context_length,
        "vocab_size": config.model.vocab_size,
        "steps_per_turn": count,
        "repeats": repeats,
        "contestants": rows,
    }


def contestants(source: TransformerLM, config: TrainConfig) -> dict[str, Callable[[], Step]]:
    """Makers of all contestants' steps, each on a copy of the weights of `source`."""

    def ours(changes: dict[str, Any]) -> Step:
        changed = replace(config, **changes)
        model = TransformerLM(changed.model)
        model.load_state_dict(source.state_dict())
        step, reason = training_step(model, changed, torch.device("cpu"))
        if reason is not None:
            raise UserError(f"The fused step does not cover {reason}.")
        return step

    def theirs(make: Callable, compiled: bool) -> Step:
        model, loss = make(copy.deepcopy(source))
        return PeerStep(model, torch.compile(loss, dynamic=False) if compiled else loss, config.optimizer)

    makers: dict[str, Callable[[], Step]] = {
        name: lambda changes=changes: ours(changes) for name, changes in LMCORE.items()
    }
    for name, make in PEERS.items():
        makers[name] = lambda make=make: theirs(make, False)
        makers[f"{name} compiled"] = lambda make=make: theirs(make, True)
    return makers


def random_batches(config: TrainConfig, count: int = 8) -> Batches:
    """Some batches of random tokens: only time is measured."""
    generator = torch.Generator().manual_seed(1)
    shape = (2, config.batch_size, config.model.context_length)
    tokens = [torch.randint(config.model.vocab_size, shape, generator=generator) for _ in range(count)]
    return [(inputs, targets) for inputs, targets in tokens]


def run(step: Step, batches: Batches, count: int) -> None:
    """Takes `count` steps, over the batches as often as needed."""
    for batch in itertools.islice(itertools.cycle(batches), count):
        step(*batch)


def require_same_losses(rows: dict[str, dict[str, Any]]) -> None:
    """Raises `UserError` unless the first steps of all contestants have the same losses."""
    expected = rows["lmcore plain"]["first_losses"]
    for name, row in rows.items():
        for loss, other in zip(row.get("first_losses", expected), expected, strict=True):
            if not abs(loss - other) <= TOLERANCE * other:
                raise UserError(f"{name} and lmcore plain do not compute the same: losses {loss} and {other}.")


def print_training(result: dict[str, Any]) -> None:
    """The rates and ratios, for people."""
    print(
        f"training {result.get('size', '')}: {result['parameters'] / 1e6:.2f} M parameters, "
        f"{result['batch_size']} × {result['context_length']} tokens, full step in float32"
    )
    for name, row in result["contestants"].items():
        if row["outcome"] != "complete":
            print(f"  {name:<22} absent: {row['reason']}")
            continue
        print(
            f"  {name:<22} {1e3 * row['median']:8.2f} ms ({1e3 * row['low']:.2f} to {1e3 * row['high']:.2f})"
            f"  {row['tokens_per_second']:>9,.0f} tokens/s  {row['times_plain']['median']:.2f} × plain"
        )
