"""The Triton kernels of `kernels.adamw`: one launch goes through many tensors by a table of their addresses."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmcore.fast.kernels.adamw import Settings, Slot

BLOCK, WARPS = 1024, 4  # elements and warps of one program of the update
PARTS = 16  # blocks that one program of the norm goes through
COLUMNS = tl.constexpr(6)  # of the table: addresses of p, gradient, m, v and copy, and the number of elements
SCALARS = tl.constexpr(len(Settings._fields))
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@triton.jit
def address(table, row, column: tl.constexpr, first, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointer to element `first` of the tensor at (row, column) of the table."""
    pointer = tl.load(table + row * COLUMNS + column).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + first


@triton.jit
def elements_from(table, row, first, ALIGNED: tl.constexpr):
    """Number of elements of the tensor from `first` on."""
    n = tl.load(table + row * COLUMNS + COLUMNS - 1)
    if ALIGNED:
        n = tl.multiple_of(n, 16)  # or the mask would keep loads from being wide
    return n - first


@triton.jit
def update_kernel(
    table, blocks, settings, norm,
    CLIP: tl.constexpr, GRADIENT: tl.constexpr, COPY: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program i: `adamw_update` of block blocks[i, 1] of the tensor in row blocks[i, 0]."""
    i = tl.program_id(0)
    row = tl.load(blocks + 2 * i)
    first = tl.load(blocks + 2 * i + 1).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    inside = at < elements_from(table, row, first, ALIGNED)
    p_at = address(table, row, 0, first, tl.float32, ALIGNED) + at
    m_at = address(table, row, 2, first, tl.float32, ALIGNED) + at
    v_at = address(table, row, 3, first, tl.float32, ALIGNED) + at
    g = tl.load(address(table, row, 1, first, GRADIENT, ALIGNED) + at, mask=inside).to(tl.float32)
    p, m, v = tl.load(p_at, mask=inside), tl.load(m_at, mask=inside), tl.load(v_at, mask=inside)
    scalars = settings + row * SCALARS
    beta1, gain1, beta2, gain2 = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2), tl.load(scalars + 3)
    lr_t, eps, keep = tl.load(scalars + 4), tl.load(scalars + 5), tl.load(scalars + 6)
    if CLIP:
        scale = tl.load(scalars + 7) / (tl.load(norm) + 1e-6)
        g *= tl.where(scale > 1.0, 1.0, scale)  # a norm of NaN stays one, which a minimum would drop
    g = tl.where(gain1 > 0.0, g, 0.0)  # an update by NOTHING takes nothing of what is not finite
    m = beta1 * m + gain1 * g
    v = beta2 * v + gain2 * g * g
    p = (p - lr_t * tl.div_rn(m, tl.sqrt_rn(v) + eps)) * keep
    tl.store(p_at, p, mask=inside)
    tl.store(m_at, m, mask=inside)
    tl.store(v_at, v, mask=inside)
    if COPY is not None:
        tl.store(address(table, row, 4, first, COPY, ALIGNED) + at, p.to(COPY), mask=inside)


@triton.jit(do_not_specialize=["sums"])
def squares_kernel(
    table, chunks, sums,
    GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Program i: sum of squares of PARTS blocks of one gradient, into sums[i]."""
    i = tl.program_id(0)
    row = tl.load(chunks + 2 * i)
    first = tl.load(chunks + 2 * i + 1).to(tl.int64) * (BLOCK * PARTS)
    n = elements_from(table, row, first, ALIGNED)
    pointer = address(table, row, 1, first, GRADIENT, ALIGNED)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        at = part * BLOCK + tl.arange(0, BLOCK)
        g = tl.load(pointer + at, mask=at < n, other=0.0).to(tl.float32)
        total += g * g
    tl.store(sums + i, tl.sum(total, 0))


@triton.jit(do_not_specialize=["count"])
def norm_kernel(sums, count, norm, BLOCK: tl.constexpr):
    """The root of the sum of `count` sums, always in the same order."""
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(sums + at, mask=at < count, other=0.0)
    tl.store(norm, tl.sqrt_rn(tl.sum(total, 0)))


def programs(rows: list[int], sizes: list[int], size: int, device: torch.device) -> Tensor:
    """What each program works on, (programs, 2): the row of a tensor, and the index of a piece of it."""
    counts = torch.tensor([-(-sizes[i] // size) for i in rows])
    starts = counts.cumsum(0) - counts
    which = torch.repeat_interleave(torch.tensor(rows), counts)
    index = torch.arange(len(which)) - torch.repeat_interleave(starts, counts)
    return torch.stack((which, index), dim=1).to(torch.int32).to(device)


class Table:
    """Addresses and settings of all slots on the device, and the launches over them. It keeps no tensor alive.

    One launch serves slots alike in the types of gradient and copy, in alignment, and in having moments.
    """

    def __init__(self, slots: list[Slot]):
        device = slots[0].p.device
        sizes = [slot.p.numel() for slot in slots]
        addresses = [[0 if t is None else t.data_ptr() for t in slot] for slot in slots]
        self.addresses = torch.tensor([[*row, n] for row, n in zip(addresses, sizes, strict=True)]).to(device)
        self.settings = torch.ones(len(slots), len(Settings._fields), device=device)
        kinds: dict[tuple, list[int]] = {}
        for i, slot in enumerate(slots):
            aligned = all(number % 16 == 0 for number in (*addresses[i], sizes[i]))
            kind = slot.m is not None, slot.gradient.dtype, getattr(slot.copy, "dtype", None), aligned
            kinds.setdefault(kind, []).append(i)
        self.kinds = []
        for (updated, gradient, copy, aligned), rows in kinds.items():
            blocks, chunks = (programs(rows, sizes, size, device) for size in (BLOCK, BLOCK * PARTS))
            types = {"GRADIENT": TYPES[gradient], "ALIGNED": aligned}
            self.kinds.append((types, TYPES.get(copy), blocks if updated else None, chunks))
        self.sums = torch.zeros(sum(len(chunks) for *_, chunks in self.kinds), device=device)

    def send(self, rows: list[Settings], index: list[int]) -> None:
        """Puts the settings of this step on the device, row `index[i]` for slot i, without waiting for it."""
        settings = torch.tensor(rows, dtype=torch.float32)[index]
        if self.settings.is_cuda:  # PyTorch gives pinned memory to others only after the copies out of it
            settings = settings.pin_memory()
        self.settings.copy_(settings, non_blocking=True)

    def update(self, norm: Tensor | None) -> None:
        """The update; with `norm`, gradients are clipped by it."""
        for types, copy, blocks, _ in self.kinds:
            if blocks is not None:
                update_kernel[(len(blocks),)](
                    self.addresses, blocks, self.settings, norm, CLIP=norm is not None, COPY=copy, BLOCK=BLOCK,
                    num_warps=WARPS, **types,
                )  # fmt: skip

    def measure(self, norm: Tensor) -> None:
        """Writes the gradients' joint l2 norm into `norm`, from sums of squares, piece by piece."""
        first = 0
        for types, _, _, chunks in self.kinds:
            squares_kernel[(len(chunks),)](
                self.addresses, chunks, self.sums[first:], BLOCK=BLOCK, PARTS=PARTS, num_warps=WARPS, **types
            )
            first += len(chunks)
        norm_kernel[(1,)](self.sums, len(self.sums), norm, BLOCK=4096, num_warps=16)
