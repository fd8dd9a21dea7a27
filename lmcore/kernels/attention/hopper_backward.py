"""The backward pass of FlashAttention on Hopper, in the manner of `attention_hopper_forward`.

A program has one tile of keys at a time: two warpgroups of consumers keep dK and dV of half of it each in registers,
while one producer warp copies the tiles of queries. The parts of dQ are added up in global memory, in float32, by TMA.
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
from lmcore.kernels.common.hopper import as_matrix, features_product, load_tile, tma_add

# signatures and calls of kernels are lists of operands: they stay as they are written
# fmt: off


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
def tile_of_keys(program, work, BM: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr):
    """A tile of keys, its sequence and head, the first tile of queries that attend to it, and how many there are."""
    all_heads, heads, group, length = work
    tile, bh = tile_and_head(program, gl.cdiv(length, BN), all_heads, group)
    first = 0
    if CAUSAL:
        first = tile * BN // BM
    return tile, bh // heads, bh % heads, first, gl.cdiv(length, BM) - first


@gluon.jit
def backward_producer(q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, q_s, do_s, k_s, v_s, lse_s, delta_s,
                      kv_full, kv_empty, q_full, q_empty, do_full, do_empty, claims, work, BM: gl.constexpr,
                      BN: gl.constexpr, ST: gl.constexpr, KV: gl.constexpr, CAUSAL: gl.constexpr):
    """Loads a tile of keys and values and all tiles of queries that attend to it; then claims the next one."""
    all_heads, heads, _, length = work
    programs = gl.cdiv(length, BN) * all_heads
    program = gl.program_id(0)
    base = 0  # tiles of queries before this one of keys
    turn = 0
    while program < programs:
        tile, batch, head, first, count = tile_of_keys(program, work, BM, BN, CAUSAL)
        own = turn % KV
        for j in range(count):
            stage = (base + j) % ST
            free = (((base + j) // ST) & 1) ^ 1
            row = (first + j) * BM
            mbarrier.wait(q_empty.index(stage), free)
            mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes + lse_desc.block_type.nbytes)
            load_tile(q_desc, batch, head, row, q_full.index(stage), q_s.index(stage))
            tma.async_copy_global_to_shared(
                lse_desc, [batch * heads + head, row], q_full.index(stage), lse_s.index(stage)
            )
            if j == 0:
                mbarrier.wait(kv_empty.index(own), ((turn // KV) & 1) ^ 1)
                mbarrier.expect(kv_full.index(own), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
                load_tile(k_desc, batch, head, tile * BN, kv_full.index(own), k_s.index(own))
                load_tile(v_desc, batch, head, tile * BN, kv_full.index(own), v_s.index(own))
            mbarrier.wait(do_empty.index(stage), free)
            mbarrier.expect(do_full.index(stage), do_desc.block_type.nbytes + delta_desc.block_type.nbytes)
            load_tile(do_desc, batch, head, row, do_full.index(stage), do_s.index(stage))
            tma.async_copy_global_to_shared(
                delta_desc, [batch * heads + head, row], do_full.index(stage), delta_s.index(stage)
            )
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
def backward_consumer(dq_desc, dk_desc, dv_desc, q_s, do_s, k_s, v_s, lse_s, delta_s, ds_s, dq_s, kv_full, kv_empty,
                      q_full, q_empty, do_full, do_empty, ds_full, ds_empty, kv_done, claims, work, scale2, scale,
                      W: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DEPTH: gl.constexpr,
                      ST: gl.constexpr, KV: gl.constexpr, CAUSAL: gl.constexpr):
    """Half of a tile of keys: its dK and dV stay in registers; dS goes through shared memory for dQ.

    dQ of a tile of queries is computed one turn late, from the dS of both warpgroups, so that neither waits for the
    other.
    """
    HALF: gl.constexpr = BN // 2
    COLUMNS: gl.constexpr = D // 2
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    A_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    Q_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(0, A_L, 2)
    COLS: gl.constexpr = gl.SliceLayout(0, S_L)
    dtype: gl.constexpr = k_s.dtype
    all_heads, _, _, length = work
    programs = gl.cdiv(length, BN) * all_heads
    program = gl.program_id(0)
    base = 0  # tiles of queries before this tile of keys
    filled = 0  # tiles of dS before it, of which each tile of keys has one more than tiles of queries
    turn = 0
    while program < programs:
        tile, batch, head, first, count = tile_of_keys(program, work, BM, BN, CAUSAL)
        own = turn % KV
        k = as_matrix(k_s.index(own))
        v = as_matrix(v_s.index(own))
        k_half = k.slice(W * HALF, HALF, 0)
        v_half = v.slice(W * HALF, HALF, 0)
        k_columns = k.slice(W * COLUMNS, COLUMNS, 1)
        dk = gl.zeros([HALF, D], gl.float32, layout=A_L)
        dv = gl.zeros([HALF, D], gl.float32, layout=A_L)
        zero = gl.zeros([HALF, BM], gl.float32, layout=S_L)
        zero_q = gl.zeros([BM, COLUMNS], gl.float32, layout=Q_L)
        keys_at = tile * BN + W * HALF
        keys = keys_at + gl.arange(0, HALF, layout=gl.SliceLayout(1, S_L))
        now = filled & 1
        mbarrier.wait(ds_empty.index(now), ((filled >> 1) & 1) ^ 1)
        ds_s.index(now).slice(W * HALF, HALF, 0).store(gl.zeros([HALF, BM], dtype, layout=S_L))  # "the turn before"
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
            lse = lse_s.index(stage).reshape([BM]).load(COLS)
            s = warpgroup_mma_wait(1 if DEPTH == D else 2, [s_token])
            p = gl.exp2(s * scale2 - gl.expand_dims(lse, 0))
            if CAUSAL:
                if j * BM < BN:  # a tile on the diagonal
                    queries = (first + j) * BM + gl.arange(0, BM, layout=COLS)
                    p = gl.where(gl.expand_dims(keys, 1) <= gl.expand_dims(queries, 0), p, 0.0)
            else:
                if (tile + 1) * BN > length:  # keys behind the last position
                    p = gl.where(gl.expand_dims(keys < length, 1), p, 0.0)
            p_operand = gl.convert_layout(p.to(dtype), P_L)
            delta = delta_s.index(stage).reshape([BM]).load(COLS)
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
            add_query_gradients(dq, dq_desc, dq_s, batch, head, (first + gl.maximum(j - 1, 0)) * BM, W, COLUMNS)
        last = (filled + count) & 1
        mbarrier.wait(ds_full.index(last), ((filled + count) >> 1) & 1)
        dq_token = warpgroup_mma(ds_s.index(last).permute((1, 0)), k_columns, zero_q, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(0, [dq_token])
        mbarrier.arrive(ds_empty.index(last))
        add_query_gradients(dq, dq_desc, dq_s, batch, head, (first + count - 1) * BM, W, COLUMNS)
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
                              all_heads, heads, group, length, scale2, scale, BM: gl.constexpr, BN: gl.constexpr,
                              D: gl.constexpr, DEPTH: gl.constexpr, ST: gl.constexpr, KV: gl.constexpr,
                              CAUSAL: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr):
    """One tile of BN keys of one head; with a causal mask a group's first ones have most queries, and start first.

    With two buffers of keys and values, programs claim one tile after the other, and load the next one meanwhile.
    """
    dtype: gl.constexpr = q_desc.dtype
    DS_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BM], dtype)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(dtype, [ST, 1, 1, BM, D], q_desc.layout)
    do_s = gl.allocate_shared_memory(dtype, [ST, 1, 1, BM, D], do_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [KV, 1, 1, BN, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [KV, 1, 1, BN, D], v_desc.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [ST, 1, BM], lse_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [ST, 1, BM], delta_desc.layout)
    ds_s = gl.allocate_shared_memory(dtype, [2, BN, BM], DS_L)
    dq_s = gl.allocate_shared_memory(gl.float32, [2, 1, 1, BM, D // 2], dq_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [KV, 1], BAR)
    kv_empty = gl.allocate_shared_memory(gl.int64, [KV, 1], BAR)
    kv_done = gl.allocate_shared_memory(gl.int64, [1], BAR)
    q_full = gl.allocate_shared_memory(gl.int64, [ST, 1], BAR)
    q_empty = gl.allocate_shared_memory(gl.int64, [ST, 1], BAR)
    do_full = gl.allocate_shared_memory(gl.int64, [ST, 1], BAR)
    do_empty = gl.allocate_shared_memory(gl.int64, [ST, 1], BAR)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    claimed_s = gl.allocate_shared_memory(gl.int32, [2, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    claimed = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    seen = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    for i in gl.static_range(KV):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=2)
    mbarrier.init(kv_done, count=2)
    for i in gl.static_range(2):
        mbarrier.init(ds_full.index(i), count=2)
        mbarrier.init(ds_empty.index(i), count=2)
        mbarrier.init(claimed.index(i), count=1)
        mbarrier.init(seen.index(i), count=2)
    for i in gl.static_range(ST):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(do_empty.index(i), count=2)
    fence_async_shared()
    claims = (counter, claimed_s, claimed, seen)
    work = (all_heads, heads, group, length)
    gl.warp_specialize(
        [
            (backward_consumer, (dq_desc, dk_desc, dv_desc, q_s, do_s, k_s, v_s, lse_s, delta_s, ds_s, dq_s, kv_full,
                                 kv_empty, q_full, q_empty, do_full, do_empty, ds_full, ds_empty, kv_done, claims, work,
                                 scale2, scale, 0, BM, BN, D, DEPTH, ST, KV, CAUSAL)),
            (backward_consumer, (dq_desc, dk_desc, dv_desc, q_s, do_s, k_s, v_s, lse_s, delta_s, ds_s, dq_s, kv_full,
                                 kv_empty, q_full, q_empty, do_full, do_empty, ds_full, ds_empty, kv_done, claims, work,
                                 scale2, scale, 1, BM, BN, D, DEPTH, ST, KV, CAUSAL)),
            (backward_producer, (q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, q_s, do_s, k_s, v_s, lse_s,
                                 delta_s, kv_full, kv_empty, q_full, q_empty, do_full, do_empty, claims, work, BM, BN,
                                 ST, KV, CAUSAL)),
        ],
        [4, 1], [REGISTERS, PRODUCER_REGISTERS],
    )
