"""Copies of tiles by Hopper's tensor memory accelerator (TMA), in Gluon, Triton's lower level.

A descriptor holds a tensor's address, shape and strides; one thread asks for a tile, the hardware copies it into shared
memory and tells a barrier. What lies outside of the tensor arrives as zeros and is not written.
"""

import torch
import triton
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core as gluon_core
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ALIGNMENT = 16
"""Bytes of which the address and all strides of a tensor must be multiples."""

TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}

ADD = ir.DESCRIPTOR_REDUCE_KIND.ADD  # looked up here, so that another Gluon fails when it is imported


@gluon_core.builtin
def tma_add(tensor_desc, coord, src, _semantic=None):
    """Adds a tile in shared memory to one in global memory, asynchronously (cp.reduce.async.bulk)."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ADD, tensor_desc.handle, coord, src.handle)


@gluon.jit
def load_tile(desc, batch, head, row, full, tile):
    """Asks for rows row.. of one head; `full` completes when they and what else it expects have arrived."""
    tma.async_copy_global_to_shared(desc, [batch, head, row, 0], full, tile)


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


def depth_of(size: int, block: int) -> int:
    """Features that `features_product` takes of a head size filled up to `block`: half of it and a power of two."""
    return min(block, block // 2 + max(16, triton.next_power_of_2(max(1, size - block // 2))))


def strides_of(x: Tensor) -> list[int]:
    """Strides; those of dimensions of one element mean nothing, and are set to one that is aligned."""
    return [x.shape[-1] if size == 1 else stride for size, stride in zip(x.shape[:-1], x.stride(), strict=False)] + [1]


def is_aligned(x: Tensor) -> bool:
    """Whether TMA can copy tiles of this tensor."""
    strides = strides_of(x)[:-1]
    aligned = all(stride > 0 and stride * x.element_size() % ALIGNMENT == 0 for stride in strides)
    return aligned and (x.stride(-1) == 1 or x.shape[-1] == 1) and x.data_ptr() % ALIGNMENT == 0


def tile_descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Tiles of rows × columns of one head of a batch × heads × positions × head size tensor."""
    block = [1, 1, rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, TYPES[x.dtype])
    return TensorDescriptor(x, list(x.shape), strides_of(x), block, layout)


def row_descriptor(x: Tensor, columns: int) -> TensorDescriptor:
    """Pieces of `columns` values of a row of a float32 matrix."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, columns], layout)
