"""A machine on which Triton is not installed: everything is imported, and the fast path runs on its plain twins."""

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil, sys
from importlib.machinery import PathFinder

class WithoutTriton(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "triton" else super().find_spec(name, path, target)

sys.meta_path = [WithoutTriton if finder is PathFinder else finder for finder in sys.meta_path]

import lmcore
from lmcore import cli
from lmcore.kernels.common.support import has_triton

assert not has_triton()
for module in pkgutil.walk_packages(lmcore.__path__, "lmcore."):
    last = module.name.rpartition(".")[2]
    needs_triton = module.name.startswith("lmcore.kernels.") and last.startswith(("gpu", "hopper"))
    if not needs_triton and last != "__main__":
        importlib.import_module(module.name)
data, run = sys.argv[1:]
tiny = ["--model.d-model", "16", "--model.num-heads", "2", "--model.d-ff", "24", "--model.context-length", "16"]
train = ["train", "--preset", "smoke", "--data", data, "--run", run, "--ops", "fused", "--steps", "3", *tiny]
assert cli.main([*train, "--model.attention", "flash", "--precision", "bf16", "--device", "cpu"]) == 0
assert cli.main(["generate", run, "--prompt", "Once", "--max-new-tokens", "4", "--ops", "fused"]) == 0
assert not any(name.partition(".")[0] == "triton" for name in sys.modules)
"""


def test_everything_is_imported_and_the_fast_path_trains_and_generates(embedded_data, tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(embedded_data), str(tmp_path / "run")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "plain operations" not in ran.stdout + ran.stderr  # which is said where the fast path does not cover a model
