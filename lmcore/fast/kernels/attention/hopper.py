"""FlashAttention-2 on Hopper for half precision, in Gluon: TMA copies, warp specialisation, asynchronous matmuls.

Forward: two warpgroups of consumers with half of the queries each compute, while one producer warp copies tiles of keys
and values into a ring of buffers; barriers in shared memory say which buffers are full and which may be filled again
(Shah et al. 2024, FlashAttention-3, section 3.1). The softmax of one tile of scores runs beside the matmul of the next
one (section 3.2).

Backward: a program has one tile of keys at a time. Two warpgroups of consumers keep dK and dV of half of it each in
registers, while one producer warp copies the tiles of queries. The parts of dQ are added up in global memory, in
float32, by TMA.

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
"""Queries of a warpgroup of consumers."""

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
    q.store(acc.to(dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(o_desc, [batch, head, first + W * ROWS, 0], q_s.index(W))
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
                      BLOCK_N: gl.constexpr, ST: gl.constexpr, KV: gl.constexpr, CAUSAL: gl.constexpr):
    """Loads a tile of keys and values and all tiles of queries that attend to it; then claims the next one."""
    q_s, do_s, k_s, v_s, lse_s, delta_s, kv_full, kv_empty, q_full, q_empty, do_full, do_empty = rings
    all_heads, heads, _, length = work
    programs = gl.cdiv(length, BLOCK_N) * all_heads
    program = gl.program_id(0)
    base = 0  # tiles of queries before this one of keys
    turn = 0
    while program < programs:
        tile, batch, head, first, count = tile_of_keys(program, work, BLOCK_M, BLOCK_N, CAUSAL)
        own = turn % KV
        for j in range(count):
            stage = (base + j) % ST
            free = (((base + j) // ST) & 1) ^ 1
            row = (first + j) * BLOCK_M
            mbarrier.wait(q_empty.index(stage), free)
            at, row_at = [batch, head, row, 0], [batch * heads + head, row]
            load_both(q_desc, lse_desc, at, row_at, q_full.index(stage), q_s.index(stage), lse_s.index(stage))
            if j == 0:
                mbarrier.wait(kv_empty.index(own), ((turn // KV) & 1) ^ 1)
                kv_at = [batch, head, tile * BLOCK_N, 0]
                load_both(k_desc, v_desc, kv_at, kv_at, kv_full.index(own), k_s.index(own), v_s.index(own))
            mbarrier.wait(do_empty.index(stage), free)
            load_both(do_desc, delta_desc, at, row_at, do_full.index(stage), do_s.index(stage), delta_s.index(stage))
        base += count
        program = programs
        if KV > 1:
            program = gl.atomic_add(claims[0], 1) + gl.num_programs(0)
            publish(claims, turn, program)
        turn += 1


@gluon.jit
def add_query_gradients(dq, dq_desc, dq_s, batch, head, row, W: gl.constexpr, COLUMNS: gl.constexpr):
    """Adds this warpgroup's columns of a tile of dQ in global memory, once the copy before has left the buffer."""
    tma.store_wait(0)
    as_matrix(dq_s.index(W)).store(dq)
    fence_async_shared()
    tma_add(dq_desc, [batch, head, row, W * COLUMNS], dq_s.index(W))


@gluon.jit
def backward_consumer(dq_desc, dk_desc, dv_desc, rings, own_rings, claims, work, scale2, scale, W: gl.constexpr,
                      BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
                      DEPTH: gl.constexpr, ST: gl.constexpr, KV: gl.constexpr, CAUSAL: gl.constexpr):
    """Half of a tile of keys: its dK and dV stay in registers; dS goes through shared memory for dQ.

    dQ of a tile of queries is computed one turn late, from the dS of both warpgroups, so that neither waits for the
    other.
    """
    q_s, do_s, k_s, v_s, lse_s, delta_s, kv_full, kv_empty, q_full, q_empty, do_full, do_empty = rings
    ds_s, dq_s, ds_full, ds_empty, kv_done = own_rings
    HALF: gl.constexpr = BLOCK_N // 2
    COLUMNS: gl.constexpr = D // 2
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    A_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    Q_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(0, A_L, 2)
    COLS: gl.constexpr = gl.SliceLayout(0, S_L)
    dtype: gl.constexpr = k_s.dtype
    all_heads, _, _, length = work
    programs = gl.cdiv(length, BLOCK_N) * all_heads
    program = gl.program_id(0)
    base = 0  # tiles of queries before this tile of keys
    filled = 0  # tiles of dS before it, of which each tile of keys has one more than tiles of queries
    turn = 0
    while program < programs:
        tile, batch, head, first, count = tile_of_keys(program, work, BLOCK_M, BLOCK_N, CAUSAL)
        own = turn % KV
        k = as_matrix(k_s.index(own))
        v = as_matrix(v_s.index(own))
        k_half = k.slice(W * HALF, HALF, 0)
        v_half = v.slice(W * HALF, HALF, 0)
        k_columns = k.slice(W * COLUMNS, COLUMNS, 1)
        dk = gl.zeros([HALF, D], gl.float32, layout=A_L)
        dv = gl.zeros([HALF, D], gl.float32, layout=A_L)
        zero = gl.zeros([HALF, BLOCK_M], gl.float32, layout=S_L)
        zero_q = gl.zeros([BLOCK_M, COLUMNS], gl.float32, layout=Q_L)
        keys_at = tile * BLOCK_N + W * HALF
        keys = keys_at + gl.arange(0, HALF, layout=gl.SliceLayout(1, S_L))
        now = filled & 1
        mbarrier.wait(ds_empty.index(now), ((filled >> 1) & 1) ^ 1)
        # "the turn before"
        ds_s.index(now).slice(W * HALF, HALF, 0).store(gl.zeros([HALF, BLOCK_M], dtype, layout=S_L))
        fence_async_shared()
        mbarrier.arrive(ds_full.index(now))
        mbarrier.wait(kv_full.index(own), (turn // KV) & 1)
        for j in range(count):
            stage = (base + j) % ST
            phase = ((base + j) // ST) & 1
            now = (filled + j + 1) & 1
            old = now ^ 1
            q = as_matrix(q_s.index(stage))
            do = as_matrix(do_s.index(stage))
            mbarrier.wait(q_full.index(stage), phase)
            s_token = features_product(k_half, q, zero, D, DEPTH)
            mbarrier.wait(do_full.index(stage), phase)
            dp_token = features_product(v_half, do, zero, D, DEPTH)
            lse = lse_s.index(stage).reshape([BLOCK_M]).load(COLS)
            s = warpgroup_mma_wait(1 if DEPTH == D else 2, [s_token])
            p = gl.exp2(s * scale2 - gl.expand_dims(lse, 0))
            if CAUSAL:
                if j * BLOCK_M < BLOCK_N:  # a tile on the diagonal
                    queries = (first + j) * BLOCK_M + gl.arange(0, BLOCK_M, layout=COLS)
                    p = gl.where(gl.expand_dims(keys, 1) <= gl.expand_dims(queries, 0), p, 0.0)
            else:
                if (tile + 1) * BLOCK_N > length:  # keys behind the last position
                    p = gl.where(gl.expand_dims(keys < length, 1), p, 0.0)
            p_operand = gl.convert_layout(p.to(dtype), P_L)
            delta = delta_s.index(stage).reshape([BLOCK_M]).load(COLS)
            dp = warpgroup_mma_wait(0, [dp_token])
            dv_token = warpgroup_mma(p_operand, do, dv, is_async=True)
            ds = (p * (dp - gl.expand_dims(delta, 0))).to(dtype)
            mbarrier.wait(ds_empty.index(now), (((filled + j + 1) >> 1) & 1) ^ 1)
            ds_s.index(now).slice(W * HALF, HALF, 0).store(ds)
            fence_async_shared()
            mbarrier.arrive(ds_full.index(now))
            dk_token = warpgroup_mma(gl.convert_layout(ds, P_L), q, dk, is_async=True)
            mbarrier.wait(ds_full.index(old), ((filled + j) >> 1) & 1)
            dq_token = warpgroup_mma(ds_s.index(old).permute((1, 0)), k_columns, zero_q, use_acc=False, is_async=True)
            dv = warpgroup_mma_wait(2, [dv_token])
            mbarrier.arrive(do_empty.index(stage))
            dk = warpgroup_mma_wait(1, [dk_token])
            mbarrier.arrive(q_empty.index(stage))
            dq = warpgroup_mma_wait(0, [dq_token])
            mbarrier.arrive(ds_empty.index(old))
            # in the first turn it adds zeros: a row before the first would be an illegal instruction
            add_query_gradients(dq, dq_desc, dq_s, batch, head, (first + gl.maximum(j - 1, 0)) * BLOCK_M, W, COLUMNS)
        last = (filled + count) & 1
        mbarrier.wait(ds_full.index(last), ((filled + count) >> 1) & 1)
        dq_token = warpgroup_mma(ds_s.index(last).permute((1, 0)), k_columns, zero_q, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(0, [dq_token])
        mbarrier.arrive(ds_empty.index(last))
        add_query_gradients(dq, dq_desc, dq_s, batch, head, (first + count - 1) * BLOCK_M, W, COLUMNS)
        tma.store_wait(0)
        mbarrier.arrive(kv_done)  # both have read K: its buffer can take dK
        mbarrier.wait(kv_done, turn & 1)
        k_half.store((dk * scale).to(dtype))
        v_half.store(dv.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dk_desc, [batch, head, keys_at, 0], k_s.index(own).slice(W * HALF, HALF, 2))
        tma.async_copy_shared_to_global(dv_desc, [batch, head, keys_at, 0], v_s.index(own).slice(W * HALF, HALF, 2))
        tma.store_wait(0)
        mbarrier.arrive(kv_empty.index(own))
        base += count
        filled += count + 1
        program = programs
        if KV > 1:
            program = learn(claims, turn)
        turn += 1


@gluon.jit(do_not_specialize=["all_heads", "group"])
def attention_backward_kernel(q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, dq_desc, dk_desc, dv_desc, counter,
                              all_heads, heads, group, length, scale2, scale, BLOCK_M: gl.constexpr,
                              BLOCK_N: gl.constexpr, D: gl.constexpr, DEPTH: gl.constexpr, ST: gl.constexpr,
                              KV: gl.constexpr, CAUSAL: gl.constexpr, REGISTERS: gl.constexpr,
                             PRODUCER_REGISTERS: gl.constexpr):
    """One tile of BN keys of one head; with a causal mask a group's first ones have most queries, and start first.

    With two buffers of keys and values, programs claim one tile after the other, and load the next one meanwhile.
    """
    DS_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], q_desc.dtype)
    rings = (
        buffers(ST, q_desc), buffers(ST, do_desc), buffers(KV, k_desc), buffers(KV, v_desc), buffers(ST, lse_desc),
        buffers(ST, delta_desc), barriers(KV, 1), barriers(KV, 2), barriers(ST, 1), barriers(ST, 2), barriers(ST, 1),
        barriers(ST, 2),
    )
    ds_s = gl.allocate_shared_memory(q_desc.dtype, [2, BLOCK_N, BLOCK_M], DS_L)
    own_rings = (ds_s, buffers(2, dq_desc), barriers(2, 2), barriers(2, 2), barriers(1, 2).index(0))
    claimed_s = gl.allocate_shared_memory(gl.int32, [2, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    claims = (counter, claimed_s, barriers(2, 1), barriers(2, 2))
    fence_async_shared()
    work = (all_heads, heads, group, length)
    gl.warp_specialize(
        [
            (backward_consumer, (dq_desc, dk_desc, dv_desc, rings, own_rings, claims, work, scale2, scale, 0, BLOCK_M,
                                 BLOCK_N, D, DEPTH, ST, KV, CAUSAL)),
            (backward_consumer, (dq_desc, dk_desc, dv_desc, rings, own_rings, claims, work, scale2, scale, 1, BLOCK_M,
                                 BLOCK_N, D, DEPTH, ST, KV, CAUSAL)),
            (backward_producer, (q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, rings, claims, work, BLOCK_M,
                                 BLOCK_N, ST, KV, CAUSAL)),
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


def row_descriptor(x: Tensor, columns: int) -> TensorDescriptor:
    """Pieces of `columns` values of a row of a float32 matrix."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, columns], layout)


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

    `key_buffers`, of the backward pass: with two, one program a multiprocessor claims one tile of keys after the other,
    and loads the next one meanwhile.

    Two warpgroups of consumers fill the multiprocessor's registers with a mean of 168, and half of them with 80; three
    fill them with 128; a single one fills half of them with 128, and a third with 80. Where several programs share a
    multiprocessor, one computes while others start or end.
    """

    queries: int
    keys: int
    stages: int = 2
    registers: int = 240
    mean_registers: int = 168
    key_buffers: int = 1


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
    if size <= 32:
        return Tiles(128, 128)
    return Tiles(64, 128, key_buffers=2 if size == 64 else 1)


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
    sums = torch.empty(batch, heads, length, size, device=q.device, dtype=torch.float32)
    counter = torch.empty(1, device=q.device, dtype=torch.int32)
    attention_prepare_kernel[(triton.cdiv(rows, 32) * batch * heads,)](
        operand(o), operand(do), delta, operand(sums), counter, heads, length, rows, size, block_of(q), 32
    )
    m, n, stages, registers, mean, buffers = backward_tiles(block)
    programs = triton.cdiv(length, n) * batch * heads
    if buffers > 1:
        programs = min(programs, torch.cuda.get_device_properties(q.device).multi_processor_count)
    attention_backward_kernel[(programs,)](
        tile_descriptor(q, m, block), tile_descriptor(do, m, block), tile_descriptor(k, n, block),
        tile_descriptor(v, n, block), row_descriptor(lse.flatten(0, 1), m), row_descriptor(delta.flatten(0, 1), m),
        tile_descriptor(sums, m, block // 2), tile_descriptor(dk, n // 2, block),
        tile_descriptor(dv, n // 2, block), counter, batch * heads, heads,
        heads_of_group(q, causal, backward=True), length, scale * LOG2_E.value, scale, m, n, block,
        depth_of(size, block), stages, buffers, causal, registers, PRODUCER_REGISTERS, num_warps=4, maxnreg=mean,
    )  # fmt: skip
    attention_finish_kernel[(triton.cdiv(length, 32) * batch * heads,)](
        operand(sums), operand(dq), operand(dk), angles or (lse, lse), heads, length, scale, size, block_of(q), 32,
        angles is not None,
    )  # fmt: skip
    return dq, dk, dv
