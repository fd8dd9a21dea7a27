"""The rule of the course: of torch.nn and torch.optim, the reference path uses containers and little else.

Held twice: the names that the source mentions (which also sees code that no test runs), and the functions of
torch.nn.functional that a training step really calls (which also sees what hides behind another name).
"""

import ast
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

REFERENCE_PATH = ["functional.py", "model.py", "optimizer.py"]
ALLOWED = {"torch.nn", "torch.nn.Parameter", "torch.nn.Module", "torch.nn.ModuleList", "torch.nn.Sequential"}
ALLOWED |= {"torch.nn.init", "torch.nn.init.trunc_normal_", "torch.optim", "torch.optim.Optimizer"}
RESTRICTED = ("torch.nn", "torch.optim", "torch._C", "torch.ops", "torch.special")
# whole exercises that torch also offers outside torch.nn, as functions and as methods of tensors
SHORTCUTS = {"softmax", "log_softmax", "rms_norm", "layer_norm", "embedding", "dropout", "scaled_dot_product_attention"}


def violations(source: str) -> list[str]:
    """Names that the rule forbids, with their lines."""
    found: list[str] = []
    bindings: dict[str, str] = {}  # what a name of the file stands for: {"F": "torch.nn.functional"}

    def check(name: str, line: int) -> None:
        restricted = any(name == root or name.startswith(f"{root}.") for root in RESTRICTED)
        shortcut = name.startswith("torch.") and name.count(".") == 1 and name.split(".")[1] in SHORTCUTS
        if (restricted and name not in ALLOWED) or shortcut:
            found.append(f"line {line}: {name}")

    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                check(alias.name, node.lineno)
                root = alias.name.split(".")[0]
                bindings[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                check(f"{node.module}.{alias.name}", node.lineno)
                bindings[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:  # a whole dotted name, not a part of one
            parts, root = [], node
            while isinstance(root, ast.Attribute):
                parts.append(root.attr)
                root = root.value
            if isinstance(root, ast.Name) and bindings.get(root.id, "").split(".")[0] == "torch":
                check(".".join([bindings[root.id], *reversed(parts)]), node.lineno)
            elif id(node) in called and parts[0] in SHORTCUTS:
                found.append(f"line {node.lineno}: .{parts[0]}()")
    return found


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


@pytest.mark.parametrize("file", REFERENCE_PATH)
def test_source_names_only_what_the_course_allows(file):
    assert violations((Path(lmcore.__file__).parent / file).read_text(encoding="utf-8")) == []


CAUGHT = [
    "import torch\nlayer = torch.nn.Linear(2, 2)",
    "from torch import nn\nlayer = nn.Embedding(2, 2)",
    "import torch.nn as n\nlayer = n.RMSNorm(2)",
    "import torch.nn.functional as F",
    "from torch.nn import functional",
    "from torch.nn.functional import softmax as s",
    "from torch import nn\ndef f(x):\n    return nn.functional.silu(x)",
    "from torch.optim import AdamW",
    "import torch\nclass A(torch.optim.SGD): ...",
    "from torch import nn\nnn.utils.clip_grad_norm_([], 1)",
    "from torch import nn\nnn.init.normal_(w)",
    "import torch\ny = torch.softmax(x, -1)",
    "import torch\ny = torch._C._nn.linear(x, w)",
    "def f(x):\n    return x.log_softmax(-1)",
    "def f(x):\n    return (x + 1).softmax(-1)",
]
ALLOWED_SOURCES = [
    "from torch import nn\nclass A(nn.Module):\n    w = nn.Parameter(nn.init.trunc_normal_(x))",
    "import torch\ny = torch.exp(x) @ torch.sigmoid(x)",
    "from torch.optim import Optimizer",
    "class A:\n    def f(self, config):\n        self.dropout = config.dropout",
    "from lmcore.functional import softmax\ny = softmax(x, -1)",
]


@pytest.mark.parametrize("snippet", CAUGHT + ALLOWED_SOURCES)
def test_source_check_catches_violations_and_lets_the_rest_pass(snippet):
    assert bool(violations(snippet)) == (snippet in CAUGHT)


@pytest.mark.parametrize("optimizer_name", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("switches", [{}, {"norm": "post", "position": "sinusoidal", "ffn": "silu", "dropout": 0.1}])
def test_training_step_calls_no_library_function(optimizer_name, switches):
    token_ids = torch.zeros(2, 8, dtype=torch.long)
    with RecordLibraryFunctions() as record:
        model = TransformerLM(model_config("smoke", vocab_size=20, context_length=8, **switches))
        optimizer = build_optimizer(model, OptimizerConfig(name=optimizer_name))
        cross_entropy(model(token_ids), token_ids).backward()
        gradient_clipping(model.parameters(), 1.0)
        optimizer.step()
    assert record.called == set()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: nn.Linear(4, 4)(x),
        lambda x: nn.functional.silu(x),
        lambda x: nn.functional.cross_entropy(x, torch.tensor([0, 1])),
        lambda x: torch.softmax(x, -1),
        lambda x: x.log_softmax(-1),
        lambda x: nn.RMSNorm(4)(x),
    ],
)
def test_recording_catches_library_functions(call):
    with RecordLibraryFunctions() as record:
        call(torch.ones(2, 4))
    assert record.called
