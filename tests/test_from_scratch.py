"""The rule of the course: of torch.nn and torch.optim, the reference path uses containers and little else."""

import ast
import re
from pathlib import Path

import pytest

import lmcore

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
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    assert not SHORTCUTS & {called.attr for called in calls if isinstance(called, ast.Attribute)}
