"""What half precision does to sums, to a small model under autocast, and to layer norm (CS336 A2 section 1.1.5)."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional

from lmcore.device import autocast, select_device
from lmcore.model import RMSNorm
from lmcore.profiling.workload import WorkloadConfig

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

ADDITIONS, ADDEND = 1000, 0.01
"""The handout's sum: a hundredth, a thousand times."""


@dataclass(frozen=True)
class Accumulation:
    """One of the experiments of *mixed_precision_accumulation*: in what the sum is kept, and what is added to it."""

    accumulator: str
    addend: str
    cast: bool = False
    """Whether each addend is first cast to float32 by hand."""

    @property
    def label(self) -> str:
        """What is added to what: "fp16 into fp32, cast"."""
        return f"{self.addend} into {self.accumulator}{', cast' if self.cast else ''}"


EXPERIMENTS = (
    Accumulation("fp32", "fp32"),
    Accumulation("fp16", "fp16"),
    Accumulation("fp32", "fp16"),
    Accumulation("fp32", "fp16", cast=True),
)
"""The handout's four, in its order."""


def partial_sums(experiment: Accumulation) -> list[Tensor]:
    """The sum after 0, 1, … `ADDITIONS` additions, computed as the handout writes it."""
    s = torch.tensor(0, dtype=DTYPES[experiment.accumulator])
    sums = [s.clone()]
    for _ in range(ADDITIONS):
        x = torch.tensor(ADDEND, dtype=DTYPES[experiment.addend])
        if experiment.cast:
            x = x.type(torch.float32)
        s += x
        sums.append(s.clone())
    return sums


def accumulation_table(experiments: Sequence[Accumulation] = EXPERIMENTS) -> pd.DataFrame:
    """A row for each experiment: what it prints, and where its error comes from.

    printed: as `print` shows the sum; result: its value; addend: the stored value of 0.01; representation_error: the
    exact sum of the stored values less 10; accumulation_error: the result less that exact sum; error: both together;
    rounded: additions whose result is not the exact sum of their operands; spacing: distance of neighboring numbers
    of the accumulator at the result; last_step: what the last addition added; worst_error: the largest error of any
    partial sum; same_as: the first experiment all of whose partial sums are the same values.

    Differences are taken in exact arithmetic, with fractions, and only then rounded to a float.
    """
    runs = {number: partial_sums(experiment) for number, experiment in enumerate(experiments, 1)}
    courses = {number: [s.item() for s in sums] for number, sums in runs.items()}
    rows = []
    for (number, sums), experiment in zip(runs.items(), experiments, strict=True):
        stored = torch.tensor(ADDEND, dtype=DTYPES[experiment.addend]).item()
        addend, values = Fraction(stored), [Fraction(value) for value in courses[number]]
        exact, aim = addend * ADDITIONS, Fraction(str(ADDEND)) * ADDITIONS
        rows.append(
            {
                "experiment": number,
                "label": experiment.label,
                "accumulator": experiment.accumulator,
                "addend_type": experiment.addend,
                "cast": experiment.cast,
                "printed": str(sums[-1]),
                "result": courses[number][-1],
                "addend": stored,
                "representation_error": float(exact - aim),
                "accumulation_error": float(values[-1] - exact),
                "error": float(values[-1] - aim),
                "rounded": sum(b != a + addend for a, b in itertools.pairwise(values)),
                "additions": ADDITIONS,
                "spacing": spacing(courses[number][-1], experiment.accumulator),
                "last_step": float(values[-1] - values[-2]),
                "worst_error": float(max((v - k * aim / ADDITIONS for k, v in enumerate(values)), key=abs)),
                "same_as": next(other for other in courses if courses[other] == courses[number]),
            }
        )
    return pd.DataFrame(rows)


def accumulation_course(experiments: Sequence[Accumulation] = EXPERIMENTS) -> pd.DataFrame:
    """Columns experiment, label, additions, error: how far each partial sum is from as many hundredths."""
    step = Fraction(str(ADDEND))
    return pd.DataFrame(
        {
            "experiment": number,
            "label": experiment.label,
            "additions": count,
            "error": float(Fraction(s.item()) - step * count),
        }
        for number, experiment in enumerate(experiments, 1)
        for count, s in enumerate(partial_sums(experiment))
    )


def spacing(value: float, precision: str) -> float:
    """Distance from the power of two at or below |value| to the next number: that of all numbers up to the next one."""
    info = torch.finfo(DTYPES[precision])
    exponent = math.floor(math.log2(max(abs(value), info.tiny)))
    return 2.0**exponent * info.eps


class ToyModel(nn.Module):
    """The model of *benchmarking_mixed_precision* (a), of torch.nn's parts as the handout has it."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.fc1 = nn.Linear(in_features, 10, bias=False)
        self.ln = nn.LayerNorm(10)
        self.fc2 = nn.Linear(10, out_features, bias=False)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.fc1(x))
        x = self.ln(x)
        return self.fc2(x)


TOY_PARTS = {"fc1": "output of `fc1`", "relu": "output of ReLU", "ln": "output of layer norm", "fc2": "logits"}


def toy_dtypes(device: str = "cpu", precision: str = "fp16") -> dict[str, str]:
    """The data types that a training step of `ToyModel` under autocast has, by name of the quantity; found by hooks.

    Parameters and gradients name every type there is among them. Raises `UserError` for a device that is not there.
    """
    place, _ = select_device(device)
    model, found = ToyModel(20, 5).to(place), {}
    for name, module in model.named_children():
        module.register_forward_hook(lambda module, inputs, output, name=name: found.update({name: output.dtype}))
    inputs, targets = torch.randn(8, 20, device=place), torch.arange(8, device=place) % 5
    with autocast(place, precision):
        parameters = _types(model.parameters())
        loss = functional.cross_entropy(model(inputs), targets)
    loss.backward()
    return {
        "parameters inside autocast": parameters,
        **{label: _types([found[name]]) for name, label in TOY_PARTS.items()},
        "loss": _types([loss]),
        "gradients": _types(parameter.grad for parameter in model.parameters()),
    }


def _types(tensors) -> str:
    types = {item if isinstance(item, torch.dtype) else item.dtype for item in tensors}
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in types))


def toy_dtype_rows(config: WorkloadConfig, folder: Path) -> dict[str, list[dict[str, str]]]:
    """`toy_dtypes` in fp16 and bf16 on the accelerator, where there is one, and on the CPU: a task of `run_cases`.

    {"rows": [{device, precision, quantity, dtype}]}. Of the configuration only the device is looked at.
    """
    devices = dict.fromkeys([select_device(config.device)[0].type, "cpu"])
    rows = [
        {"device": device, "precision": precision, "quantity": quantity, "dtype": dtype}
        for device in devices
        for precision in ("fp16", "bf16")
        for quantity, dtype in toy_dtypes(device, precision).items()
    ]
    return {"rows": rows}


def toy_dtype_table(records: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """The rows of `toy_dtype_rows` in these records."""
    return pd.DataFrame([row for record in records.values() for row in record["result"]["rows"]])


def running_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, one number after the other, each partial sum rounded to the type of `x`."""
    total = torch.zeros_like(x[..., :1])
    for column in x.split(1, dim=-1):
        total = total + column
    return total


def plain_sum(x: Tensor) -> Tensor:
    """PyTorch's sum over the last dimension: it adds up in float32 at least and rounds the result to the type."""
    return x.sum(dim=-1, keepdim=True)


def layer_norm_parts(x: Tensor, total: Callable[[Tensor], Tensor] = plain_sum, eps: float = 1e-5) -> dict[str, Tensor]:
    """Layer norm without gain and bias, every step rounded to the type of `x`: mean, variance and output."""
    mean = total(x) / x.shape[-1]
    centered = x - mean
    variance = total(centered.square()) / x.shape[-1]
    return {"mean": mean, "variance": variance, "output": centered / torch.sqrt(variance + eps)}


RUNNING, ROUNDED, WIDENED, RMS = "running sums", "wide sums", "float32 inside", "our RMSNorm"
"""Ways to compute a norm: all in the type; sums in float32 and every result in the type; PyTorch's `layer_norm`, which
widens to float32 and rounds the output only; and `lmcore.model.RMSNorm`, which does the same."""

SCALES = tuple(2.0**k for k in range(-14, 14, 2))
OFFSETS = (0.0, 1.0, 4.0, 16.0, 64.0)


def layer_norm_table(
    scales: Sequence[float] = SCALES, offsets: Sequence[float] = OFFSETS, width: int = 1024, rows: int = 32
) -> pd.DataFrame:
    """How far norms of rows of `width` are from float64, by precision, width, scale and offset of the inputs.

    Inputs are scale * (z + offset) with z standard normal, rounded to the precision; the reference takes the rounded
    ones. Each scale is tried without offset, each offset at scale 1. Columns: precision, scale, offset, width, method
    (see `RUNNING` and the rest), mean_error (in standard deviations), variance_error (relative), overflow and underflow
    (whether any variance came out infinite or zero), error (root of the squared error of all outputs over the squared
    outputs). Where a method does not show its mean and variance, these are None. Computed on the CPU.
    """
    z = torch.randn(rows, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    places = [(scale, 0.0) for scale in scales] + [(1.0, offset) for offset in offsets if offset]
    return pd.DataFrame(
        row
        for precision, dtype in DTYPES.items()
        for scale, offset in places
        for row in _norm_rows((scale * (z + offset)).to(dtype), precision, scale, offset)
    )


def _norm_rows(x: Tensor, precision: str, scale: float, offset: float) -> list[dict]:
    place = {"precision": precision, "scale": scale, "offset": offset, "width": x.shape[-1]}
    right, rms = layer_norm_parts(x.double()), RMSNorm(x.shape[-1])
    rows = []
    for method, total in ((RUNNING, running_sum), (ROUNDED, plain_sum)):
        parts = layer_norm_parts(x, total)
        variance, deviation = parts["variance"].double(), right["variance"].sqrt()
        rows.append(
            place
            | {
                "method": method,
                "mean_error": ((parts["mean"].double() - right["mean"]).abs() / deviation).max().item(),
                "variance_error": (variance / right["variance"] - 1).abs().max().item(),
                "overflow": not bool(variance.isfinite().all()),
                "underflow": bool((variance == 0).any()),
                "error": _distance(parts["output"], right["output"]),
            }
        )
    unseen = {"mean_error": None, "variance_error": None, "overflow": None, "underflow": None}
    widened = functional.layer_norm(x, x.shape[-1:])
    ours, exact = rms(x), x.double() / torch.sqrt(x.double().square().mean(dim=-1, keepdim=True) + rms.eps)
    rows.append(place | {"method": WIDENED} | unseen | {"error": _distance(widened, right["output"])})
    rows.append(place | {"method": RMS} | unseen | {"error": _distance(ours, exact)})
    return rows


def _distance(ours: Tensor, right: Tensor) -> float:
    return ((ours.double() - right).norm() / right.norm()).item()


def epsilon_table(eps: float = 1e-5) -> pd.DataFrame:
    """What becomes of layer norm's `eps` in each precision.

    stored: its value; relative_error; subnormal: whether it has lost digits by being below the smallest normal number;
    reach: the variance from which on adding `eps` changes nothing, twice the last power of two that it changes, as
    spacing is the same up to the next one; largest: the largest number; unit_roundoff: largest relative error of
    rounding.
    """
    rows = []
    for precision, dtype in DTYPES.items():
        info, stored = torch.finfo(dtype), torch.tensor(eps, dtype=dtype)
        powers = (torch.tensor(2.0**k, dtype=dtype) for k in range(10, -40, -1))
        rows.append(
            {
                "precision": precision,
                "stored": stored.item(),
                "relative_error": abs(stored.item() / eps - 1),
                "subnormal": stored.item() < info.tiny,
                "reach": next((2 * power.item() for power in powers if power + stored != power), 0.0),
                "largest": info.max,
                "unit_roundoff": info.eps / 2,
            }
        )
    return pd.DataFrame(rows)
