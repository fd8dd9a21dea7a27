"""Triton kernels of `lmcore.kernels.embedding`. Letters: N tokens, V vocabulary, D d_model.

The sorted tokens are cut into chunks of CHUNK. A token whose run of equal ids lies within a chunk is summed there,
whole. Of a run over several chunks, each chunk sums its part; whoever holds the run's beginning adds up the parts. So a
token that makes up a tenth of a batch costs no program more than a few dozen rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 32
"""Sorted tokens per program."""

COLUMNS = 128
"""Columns per program."""

PARTS = 64
"""Partial sums that are added up at a time."""


@triton.jit
def embedding_chunk_kernel(
    dx_ptr, ids_ptr, order_ptr, gradient_ptr, parts_ptr, num_tokens,
    D: tl.constexpr, ACCUMULATE: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (c, j): the runs of chunk c in COLUMNS columns. parts[c, 0]: a run begun earlier; parts[c, 1]: one that
    begins here and goes on."""
    chunk = tl.program_id(0)
    places = chunk * CHUNK + tl.arange(0, CHUNK)
    there = places < num_tokens
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    ids = tl.load(ids_ptr + places, mask=there, other=-1)
    next_ids = tl.load(ids_ptr + places + 1, mask=places + 1 < num_tokens, other=-1)
    before = tl.load(ids_ptr + chunk * CHUNK - 1, mask=chunk > 0, other=-1)
    rows = tl.load(order_ptr + places, mask=there, other=0)
    inside = there[:, None] & (columns[None, :] < D)
    x = tl.load(dx_ptr + rows[:, None] * D + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    same = (ids[:, None] == ids[None, :]).to(tl.float32)
    sums = tl.dot(same, x, input_precision=PRECISION)  # row i: the sum of all rows of its run in this chunk
    at_end = places == chunk * CHUNK + CHUNK - 1
    last = there & ((ids != next_ids) | at_end)  # of its run, in this chunk
    earlier = last & (ids == before)
    later = last & at_end & (ids == next_ids) & (ids != before)
    whole = last & (earlier == 0) & (later == 0)
    store = gradient_ptr + ids[:, None].to(tl.int64) * D + columns[None, :]
    mask = whole[:, None] & (columns[None, :] < D)
    if ACCUMULATE:
        total = sums + tl.load(store, mask=mask, other=0.0).to(tl.float32)
        tl.store(store, total.to(gradient_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(store, sums.to(gradient_ptr.dtype.element_ty), mask=mask)
    part = parts_ptr + chunk.to(tl.int64) * (2 * D) + columns[None, :] + tl.zeros([CHUNK, 1], tl.int32)
    tl.store(part, sums, mask=earlier[:, None] & (columns[None, :] < D))
    tl.store(part + D, sums, mask=later[:, None] & (columns[None, :] < D))


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
    """See `lmcore.kernels.embedding.embedding_backward_`."""
    num_tokens, d = dx.shape
    chunks = triton.cdiv(num_tokens, CHUNK)
    parts = dx.new_empty(chunks, 2, d, dtype=torch.float32)
    grid = (chunks, triton.cdiv(d, COLUMNS))
    embedding_chunk_kernel[grid](
        dx, sorted_ids, order, gradient, parts, num_tokens, D=d, ACCUMULATE=accumulate, CHUNK=CHUNK, COLUMNS=COLUMNS,
        PRECISION="ieee" if dx.dtype == torch.float32 else "tf32", num_warps=4,  # TF32 holds half precision exactly
    )  # fmt: skip
    embedding_join_kernel[grid](
        sorted_ids, gradient, parts, num_tokens, chunks,
        D=d, ACCUMULATE=accumulate, CHUNK=CHUNK, COLUMNS=COLUMNS, PARTS=PARTS, num_warps=4,
    )  # fmt: skip
    return gradient
