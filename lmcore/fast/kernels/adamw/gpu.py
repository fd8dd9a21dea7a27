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


class Kind:
    """The slots that one launch serves: alike in the types of gradient and copy, and in alignment."""

    def __init__(self, key: tuple, rows: list[int], sizes: list[int], parts: list[int], device: torch.device):
        gradient, copy, aligned = key
        self.types = {"GRADIENT": TYPES[gradient], "ALIGNED": aligned}
        self.copy = None if copy is None else TYPES[copy]
        self.blocks = Programs(rows, sizes, parts, BLOCK, device)
        self.chunks = Programs(rows, sizes, parts, BLOCK * PARTS, device)


class Programs:
    """What each program works on: `table` (programs, 2), the row of a tensor and the index of a piece of it."""

    def __init__(self, rows: list[int], sizes: list[int], parts: list[int], size: int, device: torch.device):
        self.table = _pieces(rows, sizes, size, device)
        self.ranges: dict[int, tuple[int, int]] = {}  # of programs, by part: parts lie side by side
        end = 0
        for n, part in zip(sizes, parts, strict=True):
            start, _ = self.ranges.get(part, (end, end))
            end += -(-n // size)
            self.ranges[part] = start, end

    def of(self, parts: Collection[int] | None) -> list[tuple[int, int]]:
        """First program and number of programs of each launch for these parts, or for all."""
        chosen: list[tuple[int, int]] = []
        for part, (start, end) in self.ranges.items():
            if parts is not None and part not in parts:
                continue
            if chosen and chosen[-1][1] == start:
                start = chosen.pop()[0]
            chosen.append((start, end))
        return [(start, end - start) for start, end in chosen if end > start]


class Table:
    """Addresses and settings of all slots on the device, and the launches over them. It keeps no tensor alive."""

    def __init__(self, slots: list[Slot], parts: list[int] | None = None):
        device, parts = slots[0].p.device, parts or [0] * len(slots)
        self.kind_of, self.sizes = _kinds_and_sizes(slots)
        self.parts = parts
        self.addresses = _addresses(slots).to(device)
        self.settings = torch.ones(len(slots), len(Settings._fields), device=device)
        by_kind: dict[tuple, list[int]] = {}
        for i in sorted(range(len(slots)), key=lambda i: parts[i]):  # the blocks of a part side by side
            by_kind.setdefault(self.kind_of[i], []).append(i)
        self.kinds = [
            Kind(key, rows, [self.sizes[i] for i in rows], [parts[i] for i in rows], device)
            for key, rows in by_kind.items()
        ]
        self.sums = torch.zeros(sum(len(kind.chunks.table) for kind in self.kinds), device=device)

    def move(self, slots: list[Slot], parts: list[int]) -> bool:
        """Puts other addresses in place, without waiting for the device; False if kinds or parts are others."""
        alike = (self.kind_of, self.sizes) == _kinds_and_sizes(slots) and self.parts == parts
        if not alike or slots[0].p.device != self.addresses.device:
            return False
        _send(_addresses(slots), self.addresses)
        return True

    def send(self, settings: Tensor) -> None:
        """Puts the (slots, 8) settings of this step on the device, without waiting for it."""
        _send(settings, self.settings)

    def update(self, norm: Tensor | None, parts: Collection[int] | None = None) -> None:
        """The update of all slots or those of some parts; with `norm`, gradients are clipped by it."""
        for kind in self.kinds:
            for start, count in kind.blocks.of(parts):
                update_kernel[(count,)](
                    self.addresses, kind.blocks.table, start, self.settings, norm,
                    CLIP=norm is not None, COPY=kind.copy, BLOCK=BLOCK, num_warps=WARPS, **kind.types,
                )  # fmt: skip

    def square(self, parts: Collection[int] | None = None) -> None:
        """Sums the squares of all gradients or of those of some parts, piece by piece: the first half of the norm."""
        first = 0
        for kind in self.kinds:
            for start, count in kind.chunks.of(parts):
                squares_kernel[(count,)](
                    self.addresses, kind.chunks.table, start, self.sums[first:], BLOCK=BLOCK, PARTS=PARTS,
                    num_warps=WARPS, **kind.types,
                )  # fmt: skip
            first += len(kind.chunks.table)

    def join_squares(self, norm: Tensor) -> None:
        """Writes the gradients' joint l2 norm into `norm`, from the sums of the squares of all parts."""
        norm_kernel[(1,)](self.sums, len(self.sums), norm, BLOCK=4096, num_warps=16)

    def warm_up(self, measured: bool) -> None:
        """Compiles what `launch` will need, by steps over small tensors of the same kinds."""
        device, slots = self.addresses.device, []
        for gradient, copy, aligned in dict.fromkeys(self.kind_of):
            types = [torch.float32, gradient, torch.float32, torch.float32, copy]
            skip = 0 if aligned else 1
            slots.append(Slot(*(t and torch.zeros(16 + skip, dtype=t, device=device)[skip:] for t in types)))
        table, norm = Table(slots), self.settings.new_zeros(()) if measured else None
        if norm is not None:
            table.square()
            table.join_squares(norm)
        table.update(norm)


def _kinds_and_sizes(slots: list[Slot]) -> tuple[list[tuple], list[int]]:
    """Of every slot: types of gradient and copy, whether all addresses and the size are multiples of 16; the size."""
    kinds = []
    for slot in slots:
        aligned = all(t is None or t.data_ptr() % 16 == 0 for t in slot) and slot.p.numel() % 16 == 0
        kinds.append((slot.gradient.dtype, None if slot.copy is None else slot.copy.dtype, aligned))
    return kinds, [slot.p.numel() for slot in slots]


def _addresses(slots: list[Slot]) -> Tensor:
    return torch.tensor([[0 if t is None else t.data_ptr() for t in slot] + [slot.p.numel()] for slot in slots])


def _send(source: Tensor, destination: Tensor) -> None:
    if destination.is_cuda:  # PyTorch gives pinned memory to others only after the copies out of it
        source = source.pin_memory()
    destination.copy_(source, non_blocking=True)


def _pieces(rows: list[int], sizes: list[int], size: int, device: torch.device) -> Tensor:
    """(programs, 2): the row and the index of every piece of `size` elements of the tensors in `rows`."""
    counts = torch.tensor([-(-n // size) for n in sizes])
    starts = counts.cumsum(0) - counts
    which = torch.repeat_interleave(torch.tensor(rows), counts)
    index = torch.arange(len(which)) - torch.repeat_interleave(starts, counts)
    return torch.stack((which, index), dim=1).to(torch.int32).to(device)
