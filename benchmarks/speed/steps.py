"""Full training steps: forward, backward, clipping at norm 1 and AdamW, bf16 over float32 weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lmcore import accounting
from lmcore.config import ModelConfig, model_config, replace
from lmcore.device import autocast, device_name, peak_flops
from lmcore.functional import cross_entropy
from lmcore.model import TransformerLM
from lmcore.optimizer import AdamW, gradient_clipping

from .measuring import Built, Contestant, Race, captured, compiled
from .peers import by_flag, llama
from .rows import Cell, Conditions, Row

OPTIMIZER = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MAX_NORM = 1.0
COMPARED_STEPS = 4
"""First steps whose losses are compared."""


def settings(size: str, batch_size: int, context_length: int, contestants: tuple[str, ...]) -> dict[str, Any]:
    """Settings of a step's cell; the vocabulary is that of CS336 A2 (section 1.1.2)."""
    return {
        "size": size,
        "batch_size": batch_size,
        "context_length": context_length,
        "vocab_size": 10_000,
        "precision": "bf16",
        "contestants": list(contestants),
    }


def measure(cell: Cell, conditions: Conditions) -> list[Row]:
    """Times a whole step of each of the cell's contestants on one batch, from the same weights."""
    bench = Bench(cell, conditions)
    tokens = cell.settings["batch_size"] * cell.settings["context_length"]
    chip = device_name(torch.device(conditions.device))
    flops = accounting.training_flops(bench.config, cell.settings["batch_size"])
    peak = peak_flops(chip, cell.settings["precision"])
    race = Race(
        cell,
        conditions,
        [
            Contestant(name, getattr(bench, BUILDERS[name]), BUILDERS[name] == "fused")
            for name in cell.settings["contestants"]
        ],
        alone=False,
        reference=bench.reference(),
        amount=tokens,
        rate_unit="tok/s",
        share=lambda seconds: None if peak is None else flops / seconds / peak,
        share_of="peak of the data sheet",
    )
    return falling_alike(race.rows())


def falling_alike(rows: list[Row]) -> list[Row]:
    """The rows, with how far the loss fell over the first steps noted as a multiple of the first contestant's fall."""
    falls = {row.contestant: row.notes["losses"][0] - row.notes["losses"][-1] for row in rows if "losses" in row.notes}
    for row in rows:
        if row.contestant in falls and (first := next(iter(falls.values()))) != 0:
            row.notes["fall_beside_first"] = round(falls[row.contestant] / first, 4)
    return rows


OURS = "lmcore fused"

BUILDERS = {
    "HF eager": "hf_eager",
    "HF compiled": "hf_compiled",
    "HF compiled + CUDA graph": "hf_graph",
    "lmcore plain": "plain",
    "lmcore compiled": "plain_compiled",
    OURS: "fused",
    "plain, eager": "plain",
    "+ sdpa": "with_sdpa",
    "+ flash attention": "with_flash",
    "+ torch.compile": "with_compile",
    "+ fused loss": "with_fused_loss",
    "+ fused AdamW": "with_fused_adamw",
    "+ one CUDA graph": "fused",
}
"""Names of contestants, and the method of `Bench` that makes each. Those with + are a ladder: each adds to the last."""

LADDER = tuple(BUILDERS)[6:]


class Bench:
    """One model, one batch, and who can train on it."""

    def __init__(self, cell: Cell, conditions: Conditions):
        s = cell.settings
        self.conditions, self.device = conditions, torch.device(conditions.device)
        self.config: ModelConfig = model_config(
            s["size"], context_length=s["context_length"], vocab_size=s["vocab_size"]
        )
        self.batch_size = s["batch_size"]
        self.by_layer = self.config.num_layers > 12
        """Compiling layer by layer takes seconds where a deep model as a whole takes minutes."""
        torch.manual_seed(1)
        shape = (self.batch_size, self.config.context_length)
        self.inputs, self.targets = (torch.randint(self.config.vocab_size, shape, device=self.device) for _ in range(2))
        torch.set_float32_matmul_precision("high")

    def model(self, attention: str = "sdpa") -> TransformerLM:
        """Our model with the weights that every contestant starts from."""
        torch.manual_seed(0)
        return TransformerLM(replace(self.config, attention=attention), device=self.device)

    @torch.no_grad()
    def reference(self) -> Tensor:
        """Loss of the first batch in float32, from the plain model."""
        model = self.model()
        losses = [cross_entropy(model(x), y) for x, y in zip(self.inputs.split(1), self.targets.split(1), strict=True)]
        return torch.stack(losses).mean()

    def hf_eager(self) -> Built:
        return self._hugging_face(compile=False, graph=False)

    def hf_compiled(self) -> Built:
        return self._hugging_face(compile=True, graph=False)

    def hf_graph(self) -> Built:
        return self._hugging_face(compile=True, graph=True)

    def _hugging_face(self, compile: bool, graph: bool) -> Built:
        model = llama(self.model(), attn_implementation=by_flag())
        optimizer = torch.optim.AdamW(
            model.parameters(), **OPTIMIZER, fused=True, capturable=graph and self.device.type == "cuda"
        )

        def clip() -> None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, foreach=True)

        loss = self._loss(lambda x: model(input_ids=x, use_cache=False).logits, model.model.layers, compile)
        return self._built(self._step(loss, optimizer, clip), graph, compile)

    def plain(self) -> Built:
        """The definition, as `lmcore train` runs it by default, but in bf16."""
        return self._plain("plain")

    def plain_compiled(self) -> Built:
        return self._plain("sdpa", compile=True)

    def with_sdpa(self) -> Built:
        return self._plain("sdpa")

    def with_flash(self) -> Built:
        return self._plain("flash")

    def with_compile(self) -> Built:
        return self._plain("flash", compile=True)

    def with_fused_loss(self) -> Built:
        return self._plain("flash", compile=True, fused_loss=True)

    def with_fused_adamw(self) -> Built:
        return self._plain("flash", compile=True, fused_loss=True, fused_adamw=True)

    def _plain(self, attention: str, compile=False, fused_loss=False, fused_adamw=False) -> Built:
        model = self.model(attention)
        parameters, head = list(model.parameters()), model.lm_head.weight
        if fused_adamw:
            from lmcore.kernels.adamw import FusedAdamW

            optimizer, clip = FusedAdamW(parameters, **OPTIMIZER, max_grad_norm=MAX_NORM), lambda: None
        else:
            optimizer, clip = AdamW(parameters, **OPTIMIZER), lambda: gradient_clipping(parameters, MAX_NORM)
        if fused_loss:
            model.lm_head = nn.Identity()  # the loss takes what goes into the output layer, and its weights
        loss = self._loss(model, model.layers, compile, head if fused_loss else None)
        return self._built(self._step(loss, optimizer, clip), compile=compile)

    def fused(self) -> Built:
        from lmcore.fused.step import FusedStep
        from lmcore.kernels.adamw import FusedAdamW

        model = self.model()
        optimizer = FusedAdamW(model.parameters(), **OPTIMIZER, max_grad_norm=MAX_NORM)
        step = FusedStep(model, optimizer, self.batch_size, self.config.context_length, torch.bfloat16)
        return self._built(lambda: step(self.inputs, self.targets)[0])

    def _loss(
        self, scores: Callable[[Tensor], Tensor], layers: nn.ModuleList, compile: bool, head: Tensor | None = None
    ) -> Callable[[], Tensor]:
        """The mean loss of the batch, compiled as a whole or, for a deep model, layer by layer.

        With the weights of the output layer in `head`, `scores` are its inputs, and our loss takes both.
        """
        vocab_size, device = self.config.vocab_size, self.device

        def forward(inputs: Tensor) -> Tensor:
            with autocast(device, "bf16"):
                return scores(inputs)

        def criterion(scores: Tensor, targets: Tensor) -> Tensor:
            return functional.cross_entropy(scores.float().view(-1, vocab_size), targets.view(-1))

        def whole(inputs: Tensor, targets: Tensor) -> Tensor:
            return criterion(forward(inputs), targets)

        if compile and self.by_layer and not self.conditions.toy:
            for layer in layers:
                layer.compile(dynamic=False)
            criterion = compiled(criterion, self.conditions)
        elif compile and head is not None:
            forward = compiled(forward, self.conditions)
        elif compile:
            whole = compiled(whole, self.conditions)
        if head is None:
            return lambda: whole(self.inputs, self.targets)

        from lmcore.kernels.cross_entropy import linear_cross_entropy

        return lambda: linear_cross_entropy(
            forward(self.inputs).flatten(0, 1).bfloat16(), head.bfloat16(), self.targets.flatten()
        )

    def _step(self, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer, clip: Callable) -> Callable:
        def step() -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            value = loss()
            value.backward()
            clip()
            optimizer.step()
            return value.detach()

        return step

    def _built(self, step: Callable[[], Tensor], graph: bool = False, compile: bool = False) -> Built:
        if graph:
            run, losses = captured(step, self.device, COMPARED_STEPS)
        else:
            run, losses = step, [step().clone() for _ in range(COMPARED_STEPS)]
        losses = [loss.float() for loss in losses]
        notes: dict[str, Any] = {"losses": [round(loss.item(), 5) for loss in losses]}
        if compile:
            notes["compiled"] = "by layer" if self.by_layer else "as a whole"
        return Built(run, results=losses[0], notes=notes)
