"""The Triton kernels of `kernels.muon`: what `lmcore.optimizer.muon_update` does to every element.

One launch goes through all matrices of one shape.
"""

import triton
import triton.language as tl
from torch import Tensor

from lmcore.fast.kernels.adamw.gpu import BLOCK, WARPS, Table, address, elements_from


@triton.jit
def direction_kernel(
    table, blocks, x, clip, momentum, GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    """Program i: moves block blocks[i, 1] of a matrix's momentum toward the clipped gradient, and looks ahead of it."""
    row = tl.load(blocks + 2 * tl.program_id(0))
    first = tl.load(blocks + 2 * tl.program_id(0) + 1).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    left = elements_from(table, row, first, ALIGNED)
    g = tl.load(address(table, row, 1, first, GRADIENT, ALIGNED) + at, mask=at < left).to(tl.float32) * tl.load(clip)
    g = tl.where(momentum < 1.0, g, 0.0)  # a momentum of one takes nothing, also of what is not finite
    m_at = address(table, row, 2, first, tl.float32, ALIGNED) + at
    m = tl.load(m_at, mask=at < left)
    m += (1 - momentum) * (g - m)
    tl.store(m_at, m, mask=at < left)
    ahead = x + row * (first + left) + first + at
    tl.store(ahead, (m + (1 - momentum) * (g - m)).to(x.dtype.element_ty), mask=at < left)


@triton.jit
def step_kernel(table, blocks, x, scalars, COPY: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Program i: p = p * scalars[0] - x * scalars[1] in block blocks[i, 1] of a matrix, and of its copy."""
    row = tl.load(blocks + 2 * tl.program_id(0))
    first = tl.load(blocks + 2 * tl.program_id(0) + 1).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    left = elements_from(table, row, first, ALIGNED)
    p_at = address(table, row, 0, first, tl.float32, ALIGNED) + at
    step = tl.load(x + row * (first + left) + first + at, mask=at < left).to(tl.float32) * tl.load(scalars + 1)
    p = tl.load(p_at, mask=at < left) * tl.load(scalars) - step
    tl.store(p_at, p, mask=at < left)
    if COPY is not None:
        tl.store(address(table, row, 4, first, COPY, ALIGNED) + at, p.to(COPY), mask=at < left)


class Matrices(Table):
    """Addresses of matrices of one shape, whose momentum stands in the place of AdamW's first moment."""

    def look_ahead(self, x: Tensor, clip: Tensor, momentum: float) -> None:
        """Updates the momentum by the gradients times `clip` (1,); Nesterov's directions go into `x` (n, ...)."""
        for types, _, blocks, _ in self.kinds:
            direction_kernel[(len(blocks),)](
                self.addresses, blocks, x, clip, momentum, BLOCK=BLOCK, num_warps=WARPS, **types
            )

    def step(self, x: Tensor, scalars: Tensor) -> None:
        """Updates the matrices by the orthogonal `x`; `scalars` are those of `lmcore.optimizer.muon_scalars`."""
        for types, copy, blocks, _ in self.kinds:
            step_kernel[(len(blocks),)](
                self.addresses, blocks, x, scalars, COPY=copy, ALIGNED=types["ALIGNED"], BLOCK=BLOCK, num_warps=WARPS
            )
