"""A machine without Triton: everything but its kernels is imported, and the fast path runs in plain PyTorch."""

import subprocess
import sys

WITHOUT_TRITON = """
import importlib, pkgutil, sys
from importlib.machinery import PathFinder

class WithoutTriton(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "triton" else super().find_spec(name, path, target)

sys.meta_path = [WithoutTriton if finder is PathFinder else finder for finder in sys.meta_path]
"""

TRAINS = """
import torch

import lmcore
from lmcore import cli
from lmcore.checkpoint import load_model
from lmcore.fast.kernels.dispatch import has_triton

assert not has_triton()
need_triton = []
for module in pkgutil.walk_packages(lmcore.__path__, "lmcore."):
    if module.name == "lmcore.__main__":
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        assert error.name.partition(".")[0] == "triton", error
        need_triton.append(module.name)
assert need_triton, "no module needs Triton"
for name in need_triton:
    assert name.startswith("lmcore.fast.kernels.") and name.rpartition(".")[2] in ("gpu", "hopper"), name
data, run = sys.argv[1:]
tiny = ["--model.d-model", "16", "--model.num-heads", "2", "--model.d-ff", "24", "--model.context-length", "16"]
train = ["train", "--preset", "smoke", "--data", data, "--run", run, "--ops", "fused", "--steps", "3", *tiny]
assert cli.main([*train, "--model.attention", "flash", "--precision", "bf16", "--device", "cpu"]) == 0
assert cli.main(["generate", run, "--prompt", "Once", "--max-new-tokens", "4", "--ops", "fused"]) == 0
assert load_model(f"{run}/checkpoints/best.safetensors")(torch.tensor([[1, 2, 3]])).isfinite().all()
assert not any(name.partition(".")[0] == "triton" for name in sys.modules)
"""


def test_everything_is_imported_and_the_fast_path_trains_generates_and_is_loaded(embedded_data, tmp_path):
    command = [sys.executable, "-c", WITHOUT_TRITON + TRAINS, embedded_data, tmp_path / "run"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "plain operations" not in ran.stdout + ran.stderr  # which is said where the fast path does not cover a model
