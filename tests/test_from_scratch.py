"""The rule of the course: of torch.nn and torch.optim, the reference path uses containers and little else.

Held twice: the names that the source mentions (which also sees code that no test runs), and the functions of
torch.nn.functional that a training step really calls (which also sees what hides behind another name).
"""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, get_overridable_functions

import lmcore
from lmcore.config import OptimizerConfig, model_config
from lmcore.functional import cross_entropy
from lmcore.model import TransformerLM
from lmcore.optimizer import build_optimizer, gradient_clipping

ALLOWED = {"nn.Parameter", "nn.Module", "nn.ModuleList", "nn.Sequential", "nn.init.trunc_normal_", "optim.Optimizer"}
# whole exercises that torch also offers outside torch.nn, as functions and as methods of tensors
SHORTCUTS = {"softmax", "log_softmax", "rms_norm", "layer_norm", "embedding", "dropout", "scaled_dot_product_attention"}


@pytest.mark.parametrize("file", ["functional.py", "model.py", "optimizer.py"])
def test_source_names_only_what_the_course_allows(file):
    source = (Path(lmcore.__file__).parent / file).read_text(encoding="utf-8")
    assert set(re.findall(r"\b(?:nn|optim)\.[a-zA-Z_.]*\w", source)) <= ALLOWED
    imported = re.findall(r"^ *(?:from|import) (torch.*)", source, re.MULTILINE)
    plain = {"torch", "torch import nn", "torch import Tensor", "torch import Tensor, nn"}
    assert set(imported) <= plain | {"torch.utils.checkpoint import checkpoint", "torch.optim import Optimizer"}


class RecordLibraryFunctions(TorchFunctionMode):
    """Collects the functions of torch.nn.functional, and the same exercises elsewhere in torch, that are called."""

    def __init__(self):
        super().__init__()
        overridable = get_overridable_functions()
        self.watched = set(overridable[torch.nn.functional])
        self.watched |= {f for space in (torch, torch.Tensor) for f in overridable[space] if f.__name__ in SHORTCUTS}
        self.called: set[str] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in self.watched:
            self.called.add(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("switches", [{}, {"norm": "post", "position": "sinusoidal", "ffn": "silu", "dropout": 0.1}])
def test_training_step_calls_no_library_function(switches):
    token_ids = torch.zeros(2, 8, dtype=torch.long)
    with RecordLibraryFunctions() as record:
        model = TransformerLM(model_config("smoke", vocab_size=20, context_length=8, **switches))
        cross_entropy(model(token_ids), token_ids).backward()
        gradient_clipping(model.parameters(), 1.0)
        for name in ("adamw", "muon", "sgd"):
            build_optimizer(model, OptimizerConfig(name=name)).step()
    assert record.called == set()


@pytest.mark.parametrize("call", [nn.Linear(4, 4), lambda x: torch.softmax(x, -1), lambda x: x.log_softmax(-1)])
def test_recording_catches_library_functions(call):
    with RecordLibraryFunctions() as record:
        call(torch.ones(2, 4))
    assert record.called
