"""The forward pass of FlashAttention on Hopper: TMA copies, warp specialisation, asynchronous matrix products.

Two warpgroups of consumers with half of the queries each compute, while one producer warp copies tiles of keys and
values into a ring of buffers; barriers in shared memory say which buffers are full and which may be filled again (Shah
et al. 2024, FlashAttention-3, section 3.1). The softmax of one tile of scores runs beside the product of the next one
(section 3.2).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lmcore.kernels.attention.gpu_forward import tile_and_head
from lmcore.kernels.common.hopper import as_matrix, features_product, load_tile

# signatures and calls of kernels are lists of operands: they stay as they are written
# fmt: off


ROWS = gl.constexpr(64)
"""Queries of a warpgroup of consumers."""


@gluon.jit
def key_tiles(last_query, length, BN: gl.constexpr, CAUSAL: gl.constexpr):
    """How many tiles of keys the queries up to this one attend to."""
    tiles = gl.cdiv(length, BN)
    if CAUSAL:
        tiles = gl.minimum(tiles, gl.cdiv(last_query + 1, BN))
    return tiles


@gluon.jit
def forward_producer(q_desc, k_desc, v_desc, rings, place, C: gl.constexpr, BN: gl.constexpr, ST: gl.constexpr):
    """Loads the queries, then keys and values from the last tile to the first."""
    q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty = rings
    first, tiles, batch, head = place
    for w in gl.static_range(C):
        mbarrier.expect(q_full.index(w), q_desc.block_type.nbytes)
        load_tile(q_desc, batch, head, first + w * ROWS, q_full.index(w), q_s.index(w))
    for j in range(tiles):
        row = (tiles - 1 - j) * BN
        stage = j % ST
        free = ((j // ST) & 1) ^ 1
        mbarrier.wait(k_empty.index(stage), free)
        mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
        load_tile(k_desc, batch, head, row, k_full.index(stage), k_s.index(stage))
        mbarrier.wait(v_empty.index(stage), free)
        mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
        load_tile(v_desc, batch, head, row, v_full.index(stage), v_s.index(stage))


@gluon.jit
def online_softmax(s, m, total, scale):
    """One step of the running softmax in base 2: probabilities, new maximum, new sum, factor for what is there."""
    new = gl.maximum(m, gl.max(s, 1) * scale)
    alpha = gl.exp2(m - new)
    p = gl.exp2(s * scale - gl.expand_dims(new, 1))
    return p, new, total * alpha + gl.sum(p, 1), alpha


@gluon.jit
def forward_consumer(o_desc, lse_ptr, rings, place, sizes, scale, W: gl.constexpr, C: gl.constexpr, BN: gl.constexpr,
                     D: gl.constexpr, DEPTH: gl.constexpr, ST: gl.constexpr, CAUSAL: gl.constexpr):
    """Some of a tile's queries: softmax of one tile of scores while the product of the next one runs."""
    q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty = rings
    first, tiles, batch, head = place
    heads, length, lse_rows = sizes
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    ROWS_S: gl.constexpr = gl.SliceLayout(1, S_L)
    ROWS_O: gl.constexpr = gl.SliceLayout(1, O_L)
    dtype: gl.constexpr = o_desc.dtype
    own = tiles
    skip = 0
    if CAUSAL and BN % (C * ROWS) != 0:  # the last tiles may be of use to the other warpgroups alone
        own = key_tiles(first + W * ROWS + ROWS - 1, length, BN, CAUSAL)
        skip = tiles - own  # fewer than there are buffers
        for j in range(skip):  # a buffer that was given back before it is full would be taken for full in its next turn
            mbarrier.wait(k_full.index(j), 0)
            mbarrier.arrive(k_empty.index(j))
            mbarrier.wait(v_full.index(j), 0)
            mbarrier.arrive(v_empty.index(j))
    rows = first + W * ROWS + gl.arange(0, ROWS, layout=ROWS_S)
    q = as_matrix(q_s.index(W))
    m = gl.full([ROWS], -float("inf"), gl.float32, layout=ROWS_S)
    total = gl.full([ROWS], 0.0, gl.float32, layout=ROWS_S)
    acc = gl.zeros([ROWS, D], gl.float32, layout=O_L)
    zero = gl.zeros([ROWS, BN], gl.float32, layout=S_L)
    mbarrier.wait(q_full.index(W), 0)
    mbarrier.wait(k_full.index(skip), 0)
    s = features_product(q, as_matrix(k_s.index(skip)), zero, D, DEPTH)
    s = warpgroup_mma_wait(0, [s])
    mbarrier.arrive(k_empty.index(skip))
    keys = (own - 1) * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, S_L))  # only the last tile needs a mask
    keep = gl.expand_dims(keys, 0) < length
    if CAUSAL:
        keep = keep & (gl.expand_dims(keys, 0) <= gl.expand_dims(rows, 1))
    p, m, total, alpha = online_softmax(gl.where(keep, s, -1.0e30), m, total, scale)
    p_operand = gl.convert_layout(p.to(dtype), P_L)
    for j in range(skip + 1, tiles):
        stage = j % ST
        before = (j - 1) % ST
        mbarrier.wait(k_full.index(stage), (j // ST) & 1)
        s_token = features_product(q, as_matrix(k_s.index(stage)), zero, D, DEPTH)
        mbarrier.wait(v_full.index(before), ((j - 1) // ST) & 1)
        acc_token = warpgroup_mma(p_operand, as_matrix(v_s.index(before)), acc, is_async=True)
        s = warpgroup_mma_wait(1, [s_token])
        mbarrier.arrive(k_empty.index(stage))
        p, m, total, alpha = online_softmax(s, m, total, scale)
        acc = warpgroup_mma_wait(0, [acc_token])
        mbarrier.arrive(v_empty.index(before))
        acc = acc * gl.expand_dims(gl.convert_layout(alpha, ROWS_O), 1)
        p_operand = gl.convert_layout(p.to(dtype), P_L)
    last = (tiles - 1) % ST
    mbarrier.wait(v_full.index(last), ((tiles - 1) // ST) & 1)
    acc = warpgroup_mma(p_operand, as_matrix(v_s.index(last)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc])
    acc = acc * gl.expand_dims(gl.convert_layout(1.0 / total, ROWS_O), 1)
    lse = gl.where(rows < length, m + gl.log2(total), float("inf"))  # no probability behind the last position
    lse_at = lse_ptr + (batch * heads + head).to(gl.int64) * lse_rows + rows
    gl.store(lse_at, lse, mask=rows < lse_rows)
    if C % 2 == 1 and W == C - 1:  # odd numbers of warpgroups may leave the last 64 rows
        behind = (first + C * ROWS >= length) & (rows + ROWS < lse_rows)
        gl.store(lse_at + ROWS, gl.full([ROWS], float("inf"), gl.float32, layout=ROWS_S), mask=behind)
    q.store(acc.to(dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(o_desc, [batch, head, first + W * ROWS, 0], q_s.index(W))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["all_heads", "group"])
def attention_forward_kernel(q_desc, k_desc, v_desc, o_desc, lse_ptr, all_heads, heads, group, length, lse_rows, scale,
                             C: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DEPTH: gl.constexpr, ST: gl.constexpr,
                             CAUSAL: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr):
    """One tile of 64 C queries of one head; of a group of heads those with most keys start first."""
    dtype: gl.constexpr = q_desc.dtype
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(dtype, [C, 1, 1, ROWS, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [ST, 1, 1, BN, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [ST, 1, 1, BN, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [C, 1], BAR)
    k_full = gl.allocate_shared_memory(gl.int64, [ST, 1], BAR)
    k_empty = gl.allocate_shared_memory(gl.int64, [ST, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [ST, 1], BAR)
    v_empty = gl.allocate_shared_memory(gl.int64, [ST, 1], BAR)
    for w in gl.static_range(C):
        mbarrier.init(q_full.index(w), count=1)
    for i in gl.static_range(ST):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=C)
        mbarrier.init(v_empty.index(i), count=C)
    fence_async_shared()
    blocks = gl.cdiv(length, C * ROWS)
    tile, bh = tile_and_head(gl.program_id(0), blocks, all_heads, group)
    first = (blocks - 1 - tile) * C * ROWS
    batch = bh // heads
    head = bh % heads
    tiles = key_tiles(first + C * ROWS - 1, length, BN, CAUSAL)
    rings = (q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty)
    place = (first, tiles, batch, head)
    sizes = (heads, length, lse_rows)
    if C == 1:
        gl.warp_specialize(
            [
                (forward_consumer, (o_desc, lse_ptr, rings, place, sizes, scale, 0, C, BN, D, DEPTH, ST, CAUSAL)),
                (forward_producer, (q_desc, k_desc, v_desc, rings, place, C, BN, ST)),
            ],
            [1], [PRODUCER_REGISTERS],
        )
    elif C == 2:
        gl.warp_specialize(
            [
                (forward_consumer, (o_desc, lse_ptr, rings, place, sizes, scale, 0, C, BN, D, DEPTH, ST, CAUSAL)),
                (forward_consumer, (o_desc, lse_ptr, rings, place, sizes, scale, 1, C, BN, D, DEPTH, ST, CAUSAL)),
                (forward_producer, (q_desc, k_desc, v_desc, rings, place, C, BN, ST)),
            ],
            [4, 1], [REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (forward_consumer, (o_desc, lse_ptr, rings, place, sizes, scale, 0, C, BN, D, DEPTH, ST, CAUSAL)),
                (forward_consumer, (o_desc, lse_ptr, rings, place, sizes, scale, 1, C, BN, D, DEPTH, ST, CAUSAL)),
                (forward_consumer, (o_desc, lse_ptr, rings, place, sizes, scale, 2, C, BN, D, DEPTH, ST, CAUSAL)),
                (forward_producer, (q_desc, k_desc, v_desc, rings, place, C, BN, ST)),
            ],
            [4, 4, 1], [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )
