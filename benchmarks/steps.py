"""Full training steps (forward, backward, clipping, AdamW) of lmcore and of its peers, from the same weights."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from benchmark_cases import OURS, Absent, BenchmarkCase, Conditions, Contestant, Rows, blank_row, timed_rows
from peers import hugging_face, packed
from torch import Tensor, nn
from torch.nn import functional as F

from lmcore.accounting import training_flops
from lmcore.config import OptimizerConfig, TrainConfig, model_config, replace
from lmcore.device import autocast, device_name, peak_flops
from lmcore.errors import require
from lmcore.functional import cross_entropy
from lmcore.model import TransformerLM
from lmcore.profiling.cases import WorkloadConfig
from lmcore.profiling.plausible import refusal
from lmcore.recipes import recipe
from lmcore.train import training_step

COMPARED_STEPS = 4
"""First steps whose losses are compared."""

LMCORE: dict[str, dict[str, Any]] = {"lmcore plain": {}, OURS: {"ops": "fused"}}
"""Steps as `lmcore train` takes them: what each changes in the configuration. Others are Hugging Face's or of torch.nn;
"compiled" and "CUDA graph" in their names say how they run."""


def peer_step(
    model: nn.Module, logits: Callable, config: TrainConfig, device: torch.device, graph: bool, compiled: str | None
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A step as PyTorch's users write it, from a Llama's logits, with fused AdamW and clipping by PyTorch; compiled
    "as a whole", "by layer" or not at all. Returns loss and gradient norm."""
    parameters, o = list(model.parameters()), config.optimizer

    def criterion(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    if compiled == "by layer":
        for layer in getattr(model, "model", model).layers:
            layer.compile(dynamic=False)
        criterion = torch.compile(criterion, dynamic=False)

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        with autocast(device, config.precision):
            found = logits(inputs)
        return criterion(found, targets)

    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": o.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    settings = {"fused": True, "capturable": graph and device.type == "cuda"}
    optimizer = torch.optim.AdamW(groups, lr=o.learning_rate, betas=o.betas, eps=o.eps, **settings)
    loss = torch.compile(loss, dynamic=False) if compiled == "as a whole" else loss

    def step(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad(set_to_none=True)
        value = loss(inputs, targets)
        value.backward()
        norm = nn.utils.clip_grad_norm_(parameters, o.max_grad_norm)
        optimizer.step()
        return value.detach(), norm

    return step


class Bench:
    """A configuration, a random batch, and who can train on it."""

    def __init__(self, config: TrainConfig, device: torch.device, toy: bool = False):
        self.config, self.device, self.toy = config, device, toy
        """At toy sizes nothing is compiled."""
        self.compiled = "by layer" if config.model.num_layers > 12 else "as a whole"
        """Compiling layer by layer takes seconds where a deep model as a whole takes minutes."""
        torch.manual_seed(1)
        shape = (2, config.batch_size, config.model.context_length)
        self.batch = torch.randint(config.model.vocab_size, shape, device=device)

    def model(self, config: TrainConfig) -> TransformerLM:
        """Our model with the weights that every contestant starts from."""
        torch.manual_seed(config.seed)
        return TransformerLM(config.model, device=self.device)

    @torch.no_grad()
    def reference(self) -> Tensor:
        """Loss of the batch in float32, from the plain model, sequence by sequence."""
        model = self.model(replace(self.config, model__attention="sdpa")).eval()
        pairs = zip(*(tokens.split(1) for tokens in self.batch), strict=True)
        return torch.stack([cross_entropy(model(x), y) for x, y in pairs]).mean()

    def build(self, name: str) -> Contestant:
        """A contestant after its first steps, whose losses are noted. Raises `UserError` on what a step cannot do."""
        graph, compiled = "CUDA graph" in name, self.compiled if "compile" in name else None
        if name in LMCORE:
            config = replace(self.config, **LMCORE[name])
            step, reason = training_step(self.model(config), config)
            require(reason is None, f"The fused step does not cover {reason}.")
        else:
            source = self.model(self.config)
            theirs = hugging_face(source) if name.startswith("HF") else packed(source, "float8" in name)
            step = peer_step(*theirs, self.config, self.device, graph, None if self.toy else compiled)

        def run() -> Tensor:
            return step(*self.batch)[0]

        if graph:
            run, losses = captured(run, self.device, COMPARED_STEPS)
        else:
            losses = [run().clone() for _ in range(COMPARED_STEPS)]
        notes: dict[str, Any] = {"losses": [round(loss.item(), 5) for loss in losses]}
        notes |= {"compiled": compiled} if compiled else {}
        return Contestant(run, results=[losses[0].float()], notes=notes)


def captured(
    step: Callable[[], Any], device: torch.device, warmups: int = 3, stream: torch.cuda.Stream | None = None,
    mode: str = "global",
) -> tuple[Callable[[], Any], list]:  # fmt: skip
    """The step as one CUDA graph, and what it returned while it warmed up. Raises `Absent` off CUDA.

    `stream` is where it warms up and is captured (default: a new one), `mode` the capture's error mode.
    """
    if device.type != "cuda":
        raise Absent("CUDA graphs need a CUDA device.")
    with torch.cuda.device(device):
        stream = stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            returned = [step() for _ in range(warmups)]
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):  # its default is of the first device
            step()

    def replay(kept: Callable[[], Any] = step) -> None:  # the graph itself keeps no hold on the tensors it works on
        graph.replay()

    return replay, returned


def bound(config: TrainConfig, ops: str) -> WorkloadConfig:
    """The case that says what a step of this configuration needs at the least, whoever takes it: peers are compiled,
    and their attention may leave out what the mask takes away."""
    model, same = replace(config.model, attention="flash"), {"precision": config.precision, "ops": ops}
    return WorkloadConfig(config.batch_size, model=model, mode="train_step", compile=ops == "plain", **same)


def measure(case: BenchmarkCase, conditions: Conditions) -> Rows:
    """A whole step in bf16 over float32 weights by each of the case's contestants, on one batch and from one start.

    How far the loss fell over the first steps is noted as a multiple of the first contestant's fall.
    """
    s, device = case.settings, torch.device(conditions.device)
    torch.set_float32_matmul_precision("high")
    if "recipe" in s:
        small = {"model": model_config("smoke"), "batch_size": 2, "precision": "fp32"} if conditions.toy else {}
        config = replace(
            recipe(s["recipe"], "random", s["vocab_size"]), ops="plain", compile=not conditions.toy, **small
        )
    else:
        model = model_config(s["size"], context_length=s["context_length"], vocab_size=s["vocab_size"])
        optimizer = OptimizerConfig(learning_rate=1e-4)
        config = TrainConfig(model, optimizer, batch_size=s["batch_size"], precision=s["precision"])
    bench = Bench(config, device, conditions.toy)
    builders = {name: partial(bench.build, name) for name in s["contestants"]}
    peak = peak_flops(device_name(device), config.precision)
    ideal = None if peak is None else training_flops(config.model, config.batch_size) / peak
    rates = (config.tokens_per_step, "tok/s", ideal, "peak of the data sheet")
    rows = timed_rows(case, conditions, builders, *rates, alone=False, reference=[bench.reference()])
    for number, row in enumerate(rows):
        step = bound(config, LMCORE.get(row["contestant"], {}).get("ops", "plain"))
        seconds = None if row["median"] is None else row["median"] / 1e3
        if (reason := refusal(step, row["peak_bytes"], seconds, device_name(device))) is not None:
            rows[number] = blank_row(case, row["contestant"], "failed", reason)
    noted = [row["notes"] for row in rows if "losses" in row["notes"]]
    falls = [notes["losses"][0] - notes["losses"][-1] for notes in noted]
    for notes, fall in zip(noted, falls, strict=True):
        notes["fall_beside_first"] = round(fall / (falls[0] or 1.0), 4)
    return rows
