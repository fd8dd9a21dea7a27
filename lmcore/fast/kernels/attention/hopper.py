"""FlashAttention-2 on Hopper for half precision, in Gluon: TMA copies, warp specialisation, asynchronous matmuls.

Forward: two warpgroups of consumers with half of the queries each compute, while one producer warp copies tiles of keys
and values into a ring of buffers; barriers in shared memory say which buffers are full and which may be filled again
(Shah et al. 2024, FlashAttention-3, section 3.1). The softmax of one tile of scores runs beside the matmul of the next
one (section 3.2).

Backward: a program has one tile of keys at a time. Two warpgroups of consumers keep dK and dV of half of it each in
registers, while one producer warp copies the tiles of queries. The parts of dQ are added up in global memory, in
float32, by TMA, in the order in which threads hold them, so that no two threads store into one bank at once.

A descriptor holds a tensor's address, shape and strides; one thread asks for a tile, the tensor memory accelerator
(TMA) copies it into shared memory and tells a barrier. What lies outside of the tensor arrives as zeros and is not
written.

What these do not serve, and short sequences, go to `gpu`. The log-sum-exp is that of `gpu`, so that either module's
backward pass takes it.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core as gluon_core
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lmcore.fast.kernels.attention import gpu, lse_rows_of
from lmcore.fast.kernels.attention.gpu import (
    LOG2_E,
    attention_finish_kernel,
    attention_prepare_kernel,
    block_of,
    heads_of_group,
    operand,
    tile_and_head,
)

TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}

ADD = ir.DESCRIPTOR_REDUCE_KIND.ADD  # looked up here, so that another Gluon fails when it is imported

ROWS = gl.constexpr(64)
"""Queries of a warpgroup of consumers, in the backward pass of one step through scores and of a part of dQ."""

PRODUCER_REGISTERS = 24
"""Of a thread: the producer hands the others to the consumers."""

SHORT, LONG = 256, 4096
"""Positions up to which the start of a program matters most, and from which large tiles are worth their start."""

# signatures and calls of kernels are lists of operands: they stay as they are written
# fmt: off


# --- copies and products of tiles


@gluon_core.builtin
def tma_add(tensor_desc, coord, src, _semantic=None):
    """Adds a tile in shared memory to one in global memory, asynchronously (cp.reduce.async.bulk)."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ADD, tensor_desc.handle, coord, src.handle)


@gluon.jit
def barriers(number: gl.constexpr, count: gl.constexpr):
    """So many barriers in shared memory, each of which completes with `count` arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(made.index(i), count=count)
    return made


@gluon.jit
def buffers(number: gl.constexpr, desc):
    """Room in shared memory for so many tiles of a descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [number] + desc.block_shape, desc.layout)  # noqa: RUF005


@gluon.jit
def load_tile(desc, batch, head, row, full, tile):
    """Asks for rows row.. of one head; `full` completes when they have arrived."""
    mbarrier.expect(full, desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [batch, head, row, 0], full, tile)


@gluon.jit
def load_both(desc, other_desc, at, other_at, full, tile, other_tile):
    """Asks for two tiles; `full` completes when both have arrived."""
    mbarrier.expect(full, desc.block_type.nbytes + other_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, at, full, tile)
    tma.async_copy_global_to_shared(other_desc, other_at, full, other_tile)


@gluon.jit
def as_matrix(tile):
    """A 1 × 1 × rows × columns tile as rows × columns."""
    return tile.reshape([tile.shape[2], tile.shape[3]])


@gluon.jit
def store_tile(x, desc, at, tile):
    """Copies a tile to global memory by way of shared memory, once the copy before has left it."""
    tile = tile._reinterpret(desc.dtype, desc.block_shape, desc.layout)
    tma.store_wait(0)
    as_matrix(tile).store(x.to(desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, at, tile)


@gluon.jit
def features_product(a, b, zero, D: gl.constexpr, DEPTH: gl.constexpr):
    """Starts a · bᵀ over the first DEPTH of D features, of which the others are zeros: one matmul, or two."""
    if DEPTH == D:
        return warpgroup_mma(a, b.permute((1, 0)), zero, use_acc=False, is_async=True)
    else:
        left, right = a.slice(0, D // 2, 1), b.slice(0, D // 2, 1)
        token = warpgroup_mma(left, right.permute((1, 0)), zero, use_acc=False, is_async=True)
        left, right = a.slice(D // 2, DEPTH - D // 2, 1), b.slice(D // 2, DEPTH - D // 2, 1)
        return warpgroup_mma(left, right.permute((1, 0)), token, is_async=True)


# --- the forward pass


@gluon.jit
def key_tiles(last_query, length, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """How many tiles of keys the queries up to this one attend to."""
    tiles = gl.cdiv(length, BLOCK_N)
    if CAUSAL:
        tiles = gl.minimum(tiles, gl.cdiv(last_query + 1, BLOCK_N))
    return tiles


@gluon.jit
def forward_producer(q_desc, k_desc, v_desc, rings, place, C: gl.constexpr, BLOCK_N: gl.constexpr, ST: gl.constexpr):
    """Loads the queries, then keys and values from the last tile to the first."""
    q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty = rings
    first, tiles, batch, head = place
    for w in gl.static_range(C):
        load_tile(q_desc, batch, head, first + w * ROWS, q_full.index(w), q_s.index(w))
    for j in range(tiles):
        row = (tiles - 1 - j) * BLOCK_N
        stage = j % ST
        free = ((j // ST) & 1) ^ 1
        mbarrier.wait(k_empty.index(stage), free)
        load_tile(k_desc, batch, head, row, k_full.index(stage), k_s.index(stage))
        mbarrier.wait(v_empty.index(stage), free)
        load_tile(v_desc, batch, head, row, v_full.index(stage), v_s.index(stage))


@gluon.jit
def online_softmax(s, m_i, l_i, scale):
    """One step of the running softmax in base 2: probabilities, new maximum, new sum, factor for what is there."""
    m_new = gl.maximum(m_i, gl.max(s, 1) * scale)
    alpha = gl.exp2(m_i - m_new)
    p = gl.exp2(s * scale - gl.expand_dims(m_new, 1))
    return p, m_new, l_i * alpha + gl.sum(p, 1), alpha


@gluon.jit
def forward_consumer(o_desc, lse_ptr, rings, place, sizes, scale, W: gl.constexpr, C: gl.constexpr,
                     BLOCK_N: gl.constexpr, D: gl.constexpr, DEPTH: gl.constexpr, ST: gl.constexpr,
                     CAUSAL: gl.constexpr):
    """Some of a tile's queries: softmax of one tile of scores while the matmul of the next one runs."""
    q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty = rings
    first, tiles, batch, head = place
    heads, length, lse_rows = sizes
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    ROWS_S: gl.constexpr = gl.SliceLayout(1, S_L)
    ROWS_O: gl.constexpr = gl.SliceLayout(1, O_L)
    dtype: gl.constexpr = o_desc.dtype
    own = tiles
    skip = 0
    if CAUSAL and BLOCK_N % (C * ROWS) != 0:  # the last tiles may be of use to the other warpgroups alone
        own = key_tiles(first + W * ROWS + ROWS - 1, length, BLOCK_N, CAUSAL)
        skip = tiles - own  # fewer than there are buffers
        for j in range(skip):  # a buffer that was given back before it is full would be taken for full in its next turn
            mbarrier.wait(k_full.index(j), 0)
            mbarrier.arrive(k_empty.index(j))
            mbarrier.wait(v_full.index(j), 0)
            mbarrier.arrive(v_empty.index(j))
    offs_m = first + W * ROWS + gl.arange(0, ROWS, layout=ROWS_S)
    q = as_matrix(q_s.index(W))
    m_i = gl.full([ROWS], -float("inf"), gl.float32, layout=ROWS_S)
    l_i = gl.full([ROWS], 0.0, gl.float32, layout=ROWS_S)
    acc = gl.zeros([ROWS, D], gl.float32, layout=O_L)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=S_L)
    mbarrier.wait(q_full.index(W), 0)
    mbarrier.wait(k_full.index(skip), 0)
    s = features_product(q, as_matrix(k_s.index(skip)), zero, D, DEPTH)
    s = warpgroup_mma_wait(0, [s])
    mbarrier.arrive(k_empty.index(skip))
    # only the last tile needs a mask
    offs_n = (own - 1) * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S_L))
    keep = gl.expand_dims(offs_n, 0) < length
    if CAUSAL:
        keep = keep & (gl.expand_dims(offs_n, 0) <= gl.expand_dims(offs_m, 1))
    p, m_i, l_i, alpha = online_softmax(gl.where(keep, s, -1.0e30), m_i, l_i, scale)
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
        p, m_i, l_i, alpha = online_softmax(s, m_i, l_i, scale)
        acc = warpgroup_mma_wait(0, [acc_token])
        mbarrier.arrive(v_empty.index(before))
        acc = acc * gl.expand_dims(gl.convert_layout(alpha, ROWS_O), 1)
        p_operand = gl.convert_layout(p.to(dtype), P_L)
    last = (tiles - 1) % ST
    mbarrier.wait(v_full.index(last), ((tiles - 1) // ST) & 1)
    acc = warpgroup_mma(p_operand, as_matrix(v_s.index(last)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc])
    acc = acc * gl.expand_dims(gl.convert_layout(1.0 / l_i, ROWS_O), 1)
    lse = gl.where(offs_m < length, m_i + gl.log2(l_i), float("inf"))  # no probability behind the last position
    lse_at = lse_ptr + (batch * heads + head).to(gl.int64) * lse_rows + offs_m
    gl.store(lse_at, lse, mask=offs_m < lse_rows)
    if C % 2 == 1 and W == C - 1:  # odd numbers of warpgroups may leave the last 64 rows
        behind = (first + C * ROWS >= length) & (offs_m + ROWS < lse_rows)
        gl.store(lse_at + ROWS, gl.full([ROWS], float("inf"), gl.float32, layout=ROWS_S), mask=behind)
    store_tile(acc, o_desc, [batch, head, first + W * ROWS, 0], q_s.index(W))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["all_heads", "group"])
def attention_forward_kernel(q_desc, k_desc, v_desc, o_desc, lse_ptr, all_heads, heads, group, length, lse_rows, scale,
                             C: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, DEPTH: gl.constexpr,
                             ST: gl.constexpr, CAUSAL: gl.constexpr, REGISTERS: gl.constexpr,
                             PRODUCER_REGISTERS: gl.constexpr):
    """One tile of 64 C queries of one head; of a group of heads those with most keys start first."""
    rings = (
        buffers(C, q_desc), buffers(ST, k_desc), buffers(ST, v_desc),
        barriers(C, 1), barriers(ST, 1), barriers(ST, C), barriers(ST, 1), barriers(ST, C),
    )
    fence_async_shared()
    blocks = gl.cdiv(length, C * ROWS)
    tile, bh = tile_and_head(gl.program_id(0), blocks, all_heads, group)
    first = (blocks - 1 - tile) * C * ROWS
    place = (first, key_tiles(first + C * ROWS - 1, length, BLOCK_N, CAUSAL), bh // heads, bh % heads)
    sizes = (heads, length, lse_rows)
    gl.warp_specialize(  # the last C of three consumers
        [
            (forward_consumer, (o_desc, lse_ptr, rings, place, sizes, scale, C - 3, C, BLOCK_N, D, DEPTH, ST, CAUSAL)),
            (forward_consumer, (o_desc, lse_ptr, rings, place, sizes, scale, C - 2, C, BLOCK_N, D, DEPTH, ST, CAUSAL)),
            (forward_consumer, (o_desc, lse_ptr, rings, place, sizes, scale, C - 1, C, BLOCK_N, D, DEPTH, ST, CAUSAL)),
            (forward_producer, (q_desc, k_desc, v_desc, rings, place, C, BLOCK_N, ST)),
        ][3 - C:],
        [4, 4, 1][3 - C:], [REGISTERS, REGISTERS, PRODUCER_REGISTERS][3 - C:],
    )


# --- the backward pass


@gluon.jit
def publish(claims, turn, program):
    """The producer tells the consumers which tile comes next."""
    _, claimed_s, claimed, seen = claims
    mbarrier.wait(seen.index(turn & 1), ((turn >> 1) & 1) ^ 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    claimed_s.index(turn & 1).store(gl.full([32], program, gl.int32, layout=layout))
    fence_async_shared()
    mbarrier.arrive(claimed.index(turn & 1))


@gluon.jit
def learn(claims, turn):
    """What the producer has published."""
    _, claimed_s, claimed, seen = claims
    mbarrier.wait(claimed.index(turn & 1), (turn >> 1) & 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    program = gl.max(claimed_s.index(turn & 1).load(layout), 0)
    mbarrier.arrive(seen.index(turn & 1))
    return program


@gluon.jit
def tile_of_keys(program, work, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """A tile of keys, its sequence and head, the first tile of queries that attend to it, and how many there are."""
    all_heads, heads, group, length = work
    tile, bh = tile_and_head(program, gl.cdiv(length, BLOCK_N), all_heads, group)
    first = 0
    if CAUSAL:
        first = tile * BLOCK_N // BLOCK_M
    return tile, bh // heads, bh % heads, first, gl.cdiv(length, BLOCK_M) - first


@gluon.jit
def backward_producer(q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, rings, claims, work, BLOCK_M: gl.constexpr,
                      BLOCK_N: gl.constexpr, ST: gl.constexpr, CLAIMS: gl.constexpr, CAUSAL: gl.constexpr):
    """Loads a tile of keys and values and all tiles of queries that attend to it; then may claim the next one."""
    q_s, do_s, k_s, v_s, lse_s, delta_s, kv_full, kv_empty, full, empty = rings
    all_heads, heads, _, length = work
    programs = gl.cdiv(length, BLOCK_N) * all_heads
    program = gl.program_id(0)
    base = 0  # tiles of queries before this one of keys
    turn = 0
    while program < programs:
        tile, batch, head, first, count = tile_of_keys(program, work, BLOCK_M, BLOCK_N, CAUSAL)
        for j in range(count):
            stage, row = (base + j) % ST, (first + j) * BLOCK_M
            mbarrier.wait(empty.index(stage), (((base + j) // ST) & 1) ^ 1)
            at, row_at = [batch, head, row, 0], [batch * heads + head, row]
            load_both(q_desc, lse_desc, at, row_at, full.index(stage), q_s.index(stage), lse_s.index(stage))
            load_both(do_desc, delta_desc, at, row_at, full.index(stage), do_s.index(stage), delta_s.index(stage))
            if j == 0:
                mbarrier.wait(kv_empty, (turn & 1) ^ 1)
                kv_at = [batch, head, tile * BLOCK_N, 0]
                load_both(k_desc, v_desc, kv_at, kv_at, kv_full, k_s.index(0), v_s.index(0))
        base += count
        program = programs
        if CLAIMS:
            program = gl.atomic_add(claims[0], 1) + gl.num_programs(0)
            publish(claims, turn, program)
        turn += 1


@gluon.jit
def part_of(x, i: gl.constexpr, layout: gl.constexpr):
    """The i-th 64 columns of 64 or 128."""
    if x.shape[1] == ROWS:
        return x
    else:
        parts = x.reshape([x.shape[0], 2, ROWS]).permute((0, 2, 1)).split()
        return gl.convert_layout(parts[i], layout)


@gluon.jit
def query_gradients(ds, k, zero, W: gl.constexpr):
    """Starts dS K of this warpgroup: of its own 64 of 128 queries, or its half of the features of 64."""
    if ds.shape[1] > ROWS:
        return warpgroup_mma(ds.slice(W * ROWS, ROWS, 1).permute((1, 0)), k, zero, use_acc=False, is_async=True)
    else:
        columns = k.slice(W * zero.shape[1], zero.shape[1], 1)
        return warpgroup_mma(ds.permute((1, 0)), columns, zero, use_acc=False, is_async=True)


@gluon.jit
def add_query_gradients(dq, dq_desc, row, tile, W: gl.constexpr):
    """Adds this warpgroup's part of a tile of dQ in global memory, once the copy before has left shared memory.

    In the order of registers, slowest first: a warp's 16 rows, 8 columns, a thread, its 2 rows (8 apart), 2 columns.
    """
    flat = dq.reshape([4, 2, 8, dq.shape[1] // 8, 4, 2]).permute((0, 3, 2, 4, 1, 5)).reshape(dq_desc.block_shape)
    tile = tile._reinterpret(dq_desc.dtype, dq_desc.block_shape, dq_desc.layout)
    tma.store_wait(0)
    tile.store(flat)
    fence_async_shared()
    tma_add(dq_desc, [row + W * dq_desc.block_shape[0], 0], tile)


@gluon.jit
def backward_consumer(dq_desc, dk_desc, dv_desc, rings, own_rings, claims, work, scale2, scale, W: gl.constexpr,
                      BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, DEPTH: gl.constexpr,
                      ST: gl.constexpr, CLAIMS: gl.constexpr, CAUSAL: gl.constexpr):
    """Half of a tile of keys (Dao 2023, algorithm 2): its dK and dV stay in registers; dS goes to shared memory for dQ.

    Scores are those of a whole tile of queries; probabilities and dS, of 64 queries at a time, fit into registers.
    """
    q_s, do_s, k_s, v_s, lse_s, delta_s, kv_full, kv_empty, full, empty = rings
    ds_s, dq_s, ds_full = own_rings
    HALF: gl.constexpr = BLOCK_N // 2
    COLUMNS: gl.constexpr = D * BLOCK_M // 128
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    R_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    A_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    Q_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(0, A_L, 2)
    COLS: gl.constexpr = gl.SliceLayout(0, R_L)
    dtype: gl.constexpr = k_s.dtype
    all_heads, heads, _, length = work
    programs = gl.cdiv(length, BLOCK_N) * all_heads
    program = gl.program_id(0)
    k = as_matrix(k_s.index(0))
    k_half = k.slice(W * HALF, HALF, 0)
    v_half = as_matrix(v_s.index(0)).slice(W * HALF, HALF, 0)
    base = 0  # tiles of queries before this tile of keys
    turn = 0
    while program < programs:
        tile, batch, head, first, count = tile_of_keys(program, work, BLOCK_M, BLOCK_N, CAUSAL)
        dk = gl.zeros([HALF, D], gl.float32, layout=A_L)
        dv = gl.zeros([HALF, D], gl.float32, layout=A_L)
        zero = gl.zeros([HALF, BLOCK_M], gl.float32, layout=S_L)
        zero_q = gl.zeros([ROWS, COLUMNS], gl.float32, layout=Q_L)
        keys_at = tile * BLOCK_N + W * HALF
        keys = keys_at + gl.arange(0, HALF, layout=gl.SliceLayout(1, R_L))
        dq_row = (batch * heads + head) * gl.cdiv(length, 128) * (D // 2)  # of 256 values each
        mbarrier.wait(kv_full, turn & 1)
        for j in range(count):
            stage = (base + j) % ST
            now = (base + j) & 1
            q = as_matrix(q_s.index(stage))
            do = as_matrix(do_s.index(stage))
            mbarrier.wait(full.index(stage), ((base + j) // ST) & 1)
            s_token = features_product(k_half, q, zero, D, DEPTH)  # K Qᵀ, scores transposed
            dp_token = features_product(v_half, do, zero, D, DEPTH)  # V dOᵀ
            for i in gl.static_range(BLOCK_M // ROWS):
                lse = lse_s.index(stage).reshape([BLOCK_M]).slice(i * ROWS, ROWS, 0).load(COLS)
                if i == 0:
                    s = warpgroup_mma_wait(1 if DEPTH == D else 2, [s_token])
                p = gl.exp2(part_of(s, i, R_L) * scale2 - gl.expand_dims(lse, 0))
                if CAUSAL:
                    if j * BLOCK_M < BLOCK_N:  # a tile on the diagonal
                        queries = (first + j) * BLOCK_M + i * ROWS + gl.arange(0, ROWS, layout=COLS)
                        p = gl.where(gl.expand_dims(keys, 1) <= gl.expand_dims(queries, 0), p, 0.0)
                elif (tile + 1) * BLOCK_N > length:  # keys behind the last position
                    p = gl.where(gl.expand_dims(keys < length, 1), p, 0.0)
                delta = delta_s.index(stage).reshape([BLOCK_M]).slice(i * ROWS, ROWS, 0).load(COLS)
                p_operand = gl.convert_layout(p.to(dtype), P_L)
                dv = warpgroup_mma(p_operand, do.slice(i * ROWS, ROWS, 0), dv, is_async=True)  # += Pᵀ dO
                if i == 0:
                    dp = warpgroup_mma_wait(1, [dp_token])
                ds = (p * (part_of(dp, i, R_L) - gl.expand_dims(delta, 0))).to(dtype)
                ds_s.index(now).slice(W * HALF, HALF, 0).slice(i * ROWS, ROWS, 1).store(ds)
                dk = warpgroup_mma(gl.convert_layout(ds, P_L), q.slice(i * ROWS, ROWS, 0), dk, is_async=True)
            fence_async_shared()  # products read what the threads have stored
            mbarrier.arrive(ds_full)
            # the other warpgroup arrives here after it has read the last turn's dS, which the next turn overwrites
            mbarrier.wait(ds_full, now)
            dq_token = query_gradients(ds_s.index(now), k, zero_q, W)
            dq, dv, dk = warpgroup_mma_wait(0, [dq_token, dv, dk])
            mbarrier.arrive(empty.index(stage))
            add_query_gradients(dq, dq_desc, dq_row + (first + j) * (BLOCK_M * D // 256), dq_s.index(W), W)
        mbarrier.arrive(kv_empty)
        store_tile(dk * scale, dk_desc, [batch, head, keys_at, 0], dq_s.index(W))
        store_tile(dv, dv_desc, [batch, head, keys_at, 0], dq_s.index(W))
        base += count
        program = programs
        if CLAIMS:
            program = learn(claims, turn)
        turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["all_heads", "group"])
def attention_backward_kernel(q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, dq_desc, dk_desc, dv_desc, counter,
                              all_heads, heads, group, length, scale2, scale, BLOCK_M: gl.constexpr,
                              BLOCK_N: gl.constexpr, D: gl.constexpr, DEPTH: gl.constexpr, ST: gl.constexpr,
                              CLAIMS: gl.constexpr, CAUSAL: gl.constexpr, REGISTERS: gl.constexpr,
                             PRODUCER_REGISTERS: gl.constexpr):
    """One tile of BN keys of one head; with a causal mask a group's first ones have most queries, and start first.

    With CLAIMS programs claim one tile after the other, and load the next one while the last one's results leave.
    """
    DS_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], q_desc.dtype)
    rings = (
        buffers(ST, q_desc), buffers(ST, do_desc), buffers(1, k_desc), buffers(1, v_desc), buffers(ST, lse_desc),
        buffers(ST, delta_desc), barriers(1, 1).index(0), barriers(1, 2).index(0), barriers(ST, 2), barriers(ST, 2),
    )
    ds_s = gl.allocate_shared_memory(q_desc.dtype, [2, BLOCK_N, BLOCK_M], DS_L)
    own_rings = (ds_s, buffers(2, q_desc), barriers(1, 2).index(0))  # a warpgroup's dQ has a q tile's bytes
    claimed_s = gl.allocate_shared_memory(gl.int32, [2, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    claims = (counter, claimed_s, barriers(2, 1), barriers(2, 2))
    fence_async_shared()
    work = (all_heads, heads, group, length)
    gl.warp_specialize(
        [
            (backward_consumer, (dq_desc, dk_desc, dv_desc, rings, own_rings, claims, work, scale2, scale, 0, BLOCK_M,
                                 BLOCK_N, D, DEPTH, ST, CLAIMS, CAUSAL)),
            (backward_consumer, (dq_desc, dk_desc, dv_desc, rings, own_rings, claims, work, scale2, scale, 1, BLOCK_M,
                                 BLOCK_N, D, DEPTH, ST, CLAIMS, CAUSAL)),
            (backward_producer, (q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, rings, claims, work, BLOCK_M,
                                 BLOCK_N, ST, CLAIMS, CAUSAL)),
        ],
        [4, 1], [REGISTERS, PRODUCER_REGISTERS],
    )


# fmt: on


# --- the launches


def depth_of(size: int, block: int) -> int:
    """Features that `features_product` takes of a head size filled up to `block`: half of it and a power of two."""
    return min(block, block // 2 + max(16, triton.next_power_of_2(max(1, size - block // 2))))


def strides_of(x: Tensor) -> list[int]:
    """Strides; those of dimensions of one element mean nothing, and are set to one that is aligned."""
    return [x.shape[-1] if size == 1 else stride for size, stride in zip(x.shape[:-1], x.stride(), strict=False)] + [1]


def tile_descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Tiles of rows × columns of one head of a batch × heads × positions × head size tensor."""
    block = [1, 1, rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, TYPES[x.dtype])
    return TensorDescriptor(x, list(x.shape), strides_of(x), block, layout)


def plain_descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Tiles of rows × columns of a float32 matrix, row after row in shared memory."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], layout)


LAUNCHES: dict[tuple, tuple[Callable, list[TensorDescriptor], tuple]] = {}
"""Compiled forward kernels with their grid, descriptors without a tensor and other arguments, by all that these depend
on: to find a kernel and to check its arguments anew takes longer than it does."""


def based_on(template: TensorDescriptor, x: Tensor | None) -> TensorDescriptor:
    """The descriptor of another tensor like the template's, of which all but the address is checked."""
    made = object.__new__(TensorDescriptor)
    made.__dict__ |= template.__dict__ | {"base": x}
    return made


class Tiles(NamedTuple):
    """Queries and keys of a tile, buffers of a ring, registers of a consumer's thread and, all warps' mean, at launch.

    `claims`, of the backward pass: one program a multiprocessor claims one tile of keys after the other.

    Two warpgroups of consumers fill the multiprocessor's registers with a mean of 168, and half of them with 80; three
    fill them with 128; a single one fills half of them with 128, and a third with 80. Where several programs share a
    multiprocessor, one computes while others start or end.
    """

    queries: int
    keys: int
    stages: int = 2
    registers: int = 240
    mean_registers: int = 168
    claims: bool = False


def forward_tiles(size: int, length: int) -> Tiles:
    """By measurement on the H200; `size` is a power of two.

    A warpgroup skips at most (queries - 64) / keys tiles, rounded up, which must be less than there are buffers.
    """
    if size <= 32:
        return Tiles(128, 64, 2, 104, 80)
    if size == 64:
        return Tiles(192, 128, 2, 160, 128) if length >= LONG else Tiles(64, 64, 2, 136, 80)
    return Tiles(64, 64, 2, 232, 128) if length <= 2 * SHORT else Tiles(128, 128)


def backward_tiles(size: int) -> Tiles:
    """By measurement on the H200; `size` is a power of two."""
    return Tiles(128, 128, claims=True) if size <= 64 else Tiles(64, 128)


def portable_is_faster(q: Tensor, forward: bool) -> bool:
    """Where many small programs beat few large ones: short sequences of small heads, and few programs at all."""
    batch, heads, length, size = q.shape
    few = not forward and triton.cdiv(length, 64) * batch * heads <= gpu.FEW_TILES
    return length <= SHORT and (size <= 32 or (size <= 64 and few))


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, out: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; see `lmcore.fast.kernels.attention.attention_forward`."""
    if portable_is_faster(q, forward=True):
        return gpu.forward(q, k, v, causal, out)
    batch, heads, length, size = q.shape
    rows = lse_rows_of(length)
    lse = torch.empty(batch, heads, rows, device=q.device, dtype=torch.float32)

    key = (q.get_device(), q.dtype, causal, q.shape, q.stride(), k.stride(), v.stride(), out.stride())
    if key in LAUNCHES:
        run, templates, others = LAUNCHES[key]
        run(*map(based_on, templates, (q, k, v, out)), lse, *others)
        return out, lse
    block = block_of(q)
    m, n, stages, registers, mean, _ = forward_tiles(block, length)
    descriptors = [tile_descriptor(x, rows, block) for x, rows in ((q, 64), (k, n), (v, n), (out, 64))]
    others = (
        batch * heads, heads, heads_of_group(q, causal), length, rows, LOG2_E.value / math.sqrt(size), m // 64, n,
        block, depth_of(size, block), stages, causal, registers, PRODUCER_REGISTERS,
    )  # fmt: skip
    grid = (triton.cdiv(length, m) * batch * heads, 1, 1)
    kernel = attention_forward_kernel[grid](*descriptors, lse, *others, num_warps=4, maxnreg=mean)
    LAUNCHES[key] = kernel[grid], [based_on(descriptor, None) for descriptor in descriptors], others
    return out, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool, dq: Tensor, dk: Tensor,
    dv: Tensor, angles: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients into dq, dk and dv. The sum of dQ's parts has no fixed order: its last bits may differ."""
    if portable_is_faster(q, forward=False):
        return gpu.backward(q, k, v, o, lse, do, causal, dq, dk, dv, angles=angles)
    batch, heads, length, size = q.shape
    rows, block = lse.shape[-1], max(32, block_of(q))
    delta, scale = torch.empty_like(lse), 1 / math.sqrt(size)
    # for each 64 queries their features, or one half of these after the other: see `add_query_gradients`
    sums = torch.empty(lse.numel() * block // 256, 256, device=q.device, dtype=torch.float32)
    counter = torch.empty(1, device=q.device, dtype=torch.int32)
    attention_prepare_kernel[(triton.cdiv(rows, 32) * batch * heads,)](
        operand(o), operand(do), delta, sums, counter, heads, length, rows, size, block, 32
    )
    m, n, stages, registers, mean, claims = backward_tiles(block)
    programs = triton.cdiv(length, n) * batch * heads
    if claims:
        programs = min(programs, torch.cuda.get_device_properties(q.device).multi_processor_count)
    attention_backward_kernel[(programs,)](
        tile_descriptor(q, m, block), tile_descriptor(do, m, block), tile_descriptor(k, n, block),
        tile_descriptor(v, n, block), plain_descriptor(lse.flatten(0, 1), 1, m),
        plain_descriptor(delta.flatten(0, 1), 1, m), plain_descriptor(sums, block * m // 512, 256),
        tile_descriptor(dk, n // 2, block), tile_descriptor(dv, n // 2, block), counter, batch * heads, heads,
        heads_of_group(q, causal, backward=True), length, scale * LOG2_E.value, scale, m, n, block,
        depth_of(size, block), stages, claims, causal, registers, PRODUCER_REGISTERS, num_warps=4, maxnreg=mean,
    )  # fmt: skip
    attention_finish_kernel[(triton.cdiv(length, 32) * batch * heads,)](
        sums, operand(dq), operand(dk), angles or (lse, lse), heads, length, rows, scale, size, block, block * m // 128,
        32, angles is not None,
    )  # fmt: skip
    return dq, dk, dv
