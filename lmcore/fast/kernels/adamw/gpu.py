"""The Triton kernels of `kernels.adamw`: one launch goes through many tensors by a table of their addresses."""

from collections.abc import Collection

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


@triton.jit(do_not_specialize=["start"])
def update_kernel(
    table, blocks, start, settings, norm,
    CLIP: tl.constexpr, GRADIENT: tl.constexpr, COPY: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program j, i = start + j: `adamw_update` of block blocks[i, 1] of the tensor in row blocks[i, 0]."""
    i = start + tl.program_id(0)
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
    g = tl.where(gain1 > 0.0, g, 0.0)  # an idle update takes nothing of what is not finite
    m = beta1 * m + gain1 * g
    v = beta2 * v + gain2 * g * g
    p = (p - lr_t * tl.div_rn(m, tl.sqrt_rn(v) + eps)) * keep
    tl.store(p_at, p, mask=inside)
    tl.store(m_at, m, mask=inside)
    tl.store(v_at, v, mask=inside)
    if COPY is not None:
        tl.store(address(table, row, 4, first, COPY, ALIGNED) + at, p.to(COPY), mask=inside)


@triton.jit(do_not_specialize=["start", "sums"])
def squares_kernel(
    table, chunks, start, sums,
    GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Program j, i = start + j: sum of squares of PARTS blocks of one gradient, into sums[i]."""
    i = start + tl.program_id(0)
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


class Programs:
    """What each program works on: `table` (programs, 2), the row of a tensor and the index of a piece of it."""

    def __init__(self, rows: list[int], sizes: list[int], parts: list[int], size: int, device: torch.device):
        counts = torch.tensor([-(-sizes[i] // size) for i in rows])
        starts = counts.cumsum(0) - counts
        which = torch.repeat_interleave(torch.tensor(rows), counts)
        index = torch.arange(len(which)) - torch.repeat_interleave(starts, counts)
        self.table = torch.stack((which, index), dim=1).to(torch.int32).to(device)
        self.ranges: dict[int, tuple[int, int]] = {}  # of programs, by part: parts lie side by side
        end = 0
        for i in rows:
            start, _ = self.ranges.get(parts[i], (end, end))
            end += -(-sizes[i] // size)
            self.ranges[parts[i]] = start, end

    def of(self, parts: Collection[int]) -> list[tuple[int, int]]:
        """First program and number of programs of each launch for these parts."""
        chosen: list[tuple[int, int]] = []
        for start, end in (programs for part, programs in self.ranges.items() if part in parts):
            if chosen and chosen[-1][1] == start:
                start = chosen.pop()[0]
            chosen.append((start, end))
        return [(start, end - start) for start, end in chosen if end > start]


class Table:
    """Addresses and settings of all slots on the device, and the launches over them. It keeps no tensor alive.

    One launch serves slots alike in the types of gradient and copy, and in alignment.
    """

    def __init__(self, slots: list[Slot], parts: list[int]):
        device, self.parts = slots[0].p.device, parts
        sizes = [slot.p.numel() for slot in slots]
        addresses = [[0 if t is None else t.data_ptr() for t in slot] for slot in slots]
        self.addresses = torch.tensor([[*row, n] for row, n in zip(addresses, sizes, strict=True)]).to(device)
        self.settings = torch.ones(len(slots), len(Settings._fields), device=device)
        kinds: dict[tuple, list[int]] = {}
        for i in sorted(range(len(slots)), key=lambda i: parts[i]):  # the blocks of a part side by side
            aligned = all(number % 16 == 0 for number in (*addresses[i], sizes[i]))
            kind = slots[i].gradient.dtype, getattr(slots[i].copy, "dtype", None), aligned
            kinds.setdefault(kind, []).append(i)
        self.kinds = []
        for (gradient, copy, aligned), rows in kinds.items():
            programs = [Programs(rows, sizes, parts, size, device) for size in (BLOCK, BLOCK * PARTS)]
            self.kinds.append(({"GRADIENT": TYPES[gradient], "ALIGNED": aligned}, TYPES.get(copy), *programs))
        self.sums = torch.zeros(sum(len(chunks.table) for *_, chunks in self.kinds), device=device)

    def send(self, rows: list[Settings], index: list[int]) -> None:
        """Puts the settings of this step on the device, row `index[i]` for slot i, without waiting for it."""
        settings = torch.tensor(rows, dtype=torch.float32)[index]
        if self.settings.is_cuda:  # PyTorch gives pinned memory to others only after the copies out of it
            settings = settings.pin_memory()
        self.settings.copy_(settings, non_blocking=True)

    def update(self, norm: Tensor | None, parts: Collection[int]) -> None:
        """The update of these parts; with `norm`, gradients are clipped by it."""
        for types, copy, blocks, _ in self.kinds:
            for start, count in blocks.of(parts):
                update_kernel[(count,)](
                    self.addresses, blocks.table, start, self.settings, norm, CLIP=norm is not None, COPY=copy,
                    BLOCK=BLOCK, num_warps=WARPS, **types,
                )  # fmt: skip

    def square(self, parts: Collection[int]) -> None:
        """Sums the squares of the gradients of these parts, piece by piece: the first half of the norm."""
        first = 0
        for types, _, _, chunks in self.kinds:
            for start, count in chunks.of(parts):
                squares_kernel[(count,)](
                    self.addresses, chunks.table, start, self.sums[first:], BLOCK=BLOCK, PARTS=PARTS, num_warps=WARPS,
                    **types,
                )  # fmt: skip
            first += len(chunks.table)

    def join_squares(self, norm: Tensor) -> None:
        """Writes the gradients' joint l2 norm into `norm`, from the sums of the squares of all parts."""
        norm_kernel[(1,)](self.sums, len(self.sums), norm, BLOCK=4096, num_warps=16)
