"""The Triton kernel of `lmcore.fast.kernels.addition`."""

import triton
import triton.language as tl
from torch import Tensor

PROGRAMS, BLOCK, WARPS = 64, 8192, 16
"""Programs, the elements that each adds at a time, and its warps. Chosen on an H100."""


@triton.jit
def add_kernel(total, more, count, NARROW: tl.constexpr, BLOCK: tl.constexpr):
    """Program i: blocks i, i + number of programs, ... of `count` elements; NARROW ones are added in float32."""
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        a, b = tl.load(total + at, mask=inside), tl.load(more + at, mask=inside)
        if NARROW:
            a, b = a.to(tl.float32), b.to(tl.float32)
        tl.store(total + at, (a + b).to(total.dtype.element_ty), mask=inside)


def add_(total: Tensor, more: Tensor) -> Tensor:
    if total.is_complex():
        return total.add_(more)
    narrow = total.is_floating_point() and total.itemsize < 4
    add_kernel[(PROGRAMS,)](total, more, total.numel(), NARROW=narrow, BLOCK=BLOCK, num_warps=WARPS)
    return total
