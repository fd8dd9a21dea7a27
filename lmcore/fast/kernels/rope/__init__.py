"""Rotary position embedding of queries and keys where they lie, side by side with the values (section 3.5.3)."""

from types import ModuleType

from torch import Tensor

from lmcore.fast.kernels.common.support import on_device_of, runs_triton
from lmcore.fast.kernels.rope import reference


def rope_(qkv: Tensor, cos: Tensor, sin: Tensor, seq_length: int, inverse: bool = False) -> Tensor:
    """Rotates the queries and keys in `qkv` (N, 3D) in place, by the angle of their position; returns `qkv`.

    A row holds q, k and v of all heads one after the other; row n has position n modulo `seq_length`. `cos` and `sin`
    are (at least seq_length, K / 2) in float32 as in `lmcore.model.RotaryPositionalEmbedding`: feature pairs (2i,
    2i + 1) of a head turn by angle i. `inverse` turns back, which is the backward pass: a rotation's inverse is its
    transpose. (The fused step turns gradients back within attention's backward pass.) Computed in at least float32.
    """
    with on_device_of(qkv):
        return kernels(qkv).rope_(qkv, cos, sin, seq_length, inverse)


def kernels(x: Tensor) -> ModuleType:
    """The module whose functions serve tensors like this one."""
    if not runs_triton(x.device):
        return reference
    from lmcore.fast.kernels.rope import gpu

    return gpu
