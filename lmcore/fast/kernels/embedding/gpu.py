"""Triton kernels of `lmcore.fast.kernels.embedding`. Letters: N tokens, V vocabulary, D d_model.

The sorted tokens are cut into chunks. A token whose run of equal ids lies within a chunk is summed there, whole. Of a
run over several chunks, each chunk sums its part; whoever holds the run's beginning adds up the parts. So a token that
makes up a tenth of a batch costs no program more than a few dozen rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS, WARPS = 256, 2
"""Columns per program, and the warps that share them."""

TILE = 8
"""Rows of a chunk that are loaded at a time: all loads are under way before the first sum."""

PARTS = 64
"""Partial sums that are added up at a time."""


def tiles_of(num_tokens: int) -> tuple[int, int, int]:
    """Sorted tokens per program, a multiple of TILE; columns and warps of a program that adds up parts.

    Few tokens while that takes to fill the chip, then more, so that fewer runs have parts; chosen on an H200.
    """
    if num_tokens <= 4096:
        return 8, 64, 2
    return (32, 64, 2) if num_tokens < 32_768 else (64, 128, 4)


@triton.jit
def embedding_chunk_kernel(
    dx_ptr, ids_ptr, order_ptr, gradient_ptr, parts_ptr, num_tokens,
    D: tl.constexpr, ACCUMULATE: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (c, j): the runs of chunk c in COLUMNS columns. parts[c, 0]: a run begun earlier; parts[c, 1]: one that
    begins here and goes on."""
    chunk = tl.program_id(0)
    begin = chunk * CHUNK
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < D
    part = parts_ptr + chunk.to(tl.int64) * (2 * D) + columns
    here = tl.load(ids_ptr + begin).to(tl.int32)
    earlier = here == tl.load(ids_ptr + begin - 1, mask=chunk > 0, other=-1).to(tl.int32)
    goes_on = here < 0  # whether the run of the token before goes on with this one: not yet
    sums = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, CHUNK, TILE):
        rows, tokens, ends, old = (), (), (), ()
        for i in tl.static_range(TILE):  # nothing is stored before all loads are under way
            place = begin + first + i
            there = place < num_tokens
            token = tl.load(ids_ptr + place, mask=there, other=-1).to(tl.int32)
            after = tl.load(ids_ptr + place + 1, mask=place + 1 < num_tokens, other=-1).to(tl.int32)
            row = tl.load(order_ptr + place, mask=there, other=0).to(tl.int64)
            rows += (tl.load(dx_ptr + row * D + columns, mask=inside & there, other=0.0),)
            tokens += (token,)
            ends += (there & (token != after),)
            if ACCUMULATE:
                to_add = tl.load(
                    gradient_ptr + token.to(tl.int64) * D + columns, mask=inside & there & (token != after), other=0.0
                )
                old += (to_add,)
        for i in tl.static_range(TILE):
            sums = tl.where(goes_on, sums, 0.0) + rows[i].to(tl.float32)
            tl.store(part, sums, mask=inside & ends[i] & earlier)
            total = sums
            if ACCUMULATE:
                total += old[i].to(tl.float32)
            store = gradient_ptr + tokens[i].to(tl.int64) * D + columns
            tl.store(store, total.to(gradient_ptr.dtype.element_ty), mask=inside & ends[i] & (earlier == 0))
            goes_on = ends[i] == 0
            earlier = earlier & goes_on
    goes_on = goes_on & (begin + CHUNK < num_tokens)
    tl.store(part, sums, mask=inside & goes_on & earlier)
    tl.store(part + D, sums, mask=inside & goes_on & (earlier == 0))


@triton.jit
def embedding_join_kernel(
    ids_ptr, gradient_ptr, parts_ptr, num_tokens, num_chunks,
    D: tl.constexpr, ACCUMULATE: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Program (c, j): the run that begins in chunk c and goes on in the next, if there is one."""
    chunk = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    following = (chunk + 1) * CHUNK
    token = tl.load(ids_ptr + following - 1, mask=following < num_tokens, other=-1)
    after = tl.load(ids_ptr + following, mask=following < num_tokens, other=-2)
    before = tl.load(ids_ptr + chunk * CHUNK - 1, mask=chunk > 0, other=-1)
    if (token == after) & (token != before):
        sums = tl.load(parts_ptr + chunk.to(tl.int64) * (2 * D) + D + columns, mask=columns < D, other=0.0)
        first = chunk + 1
        more = 1
        while more > 0:
            chunks = first + tl.arange(0, PARTS)
            firsts = tl.load(ids_ptr + chunks.to(tl.int64) * CHUNK, mask=chunks < num_chunks, other=-1)
            mine = firsts == token
            mask = mine[:, None] & (columns[None, :] < D)
            parts = tl.load(parts_ptr + chunks[:, None].to(tl.int64) * (2 * D) + columns[None, :], mask=mask, other=0.0)
            sums += tl.sum(parts, axis=0)
            more = tl.where(tl.sum(mine.to(tl.int32), axis=0) == PARTS, 1, 0)
            first += PARTS
        store = gradient_ptr + token.to(tl.int64) * D + columns
        if ACCUMULATE:
            sums += tl.load(store, mask=columns < D, other=0.0).to(tl.float32)
        tl.store(store, sums.to(gradient_ptr.dtype.element_ty), mask=columns < D)


def embedding_backward_(
    dx: Tensor, sorted_ids: Tensor, order: Tensor, gradient: Tensor, accumulate: bool = False
) -> Tensor:
    num_tokens, d = dx.shape
    chunk, joined_columns, joining_warps = tiles_of(num_tokens)
    chunks = triton.cdiv(num_tokens, chunk)
    parts = dx.new_empty(chunks, 2, d, dtype=torch.float32)
    embedding_chunk_kernel[(chunks, triton.cdiv(d, COLUMNS))](
        dx, sorted_ids, order, gradient, parts, num_tokens,
        D=d, ACCUMULATE=accumulate, CHUNK=chunk, TILE=TILE, COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    embedding_join_kernel[(chunks, triton.cdiv(d, joined_columns))](
        sorted_ids, gradient, parts, num_tokens, chunks,
        D=d, ACCUMULATE=accumulate, CHUNK=chunk, COLUMNS=joined_columns, PARTS=PARTS, num_warps=joining_warps,
    )  # fmt: skip
    return gradient
