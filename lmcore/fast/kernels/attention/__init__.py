"""FlashAttention-2: attention that never materializes its scores, and the choice of the kernels that compute it.

It computes `lmcore.functional.scaled_dot_product_attention`; `reference` explains how. On a GPU with Triton, half
precision runs the kernels of `hopper` where the chip is one, everything else those of `gpu`; float64, head sizes above
128 and other devices run the reference implementation.
"""

import math
import warnings
from functools import lru_cache, partial
from types import ModuleType

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from lmcore.errors import UserError, require
from lmcore.fast.kernels import dispatch
from lmcore.fast.kernels.attention import reference
from lmcore.fast.kernels.dispatch import is_hopper, on_device_of

MAX_HEAD_SIZE = 128
"""Largest head size of the Triton kernels."""

ALIGNMENT = 16
"""Bytes of which addresses and strides must be multiples for the Hopper kernels (TMA)."""

sdpa = partial(functional.scaled_dot_product_attention, is_causal=True)
"""PyTorch's choice of its own kernels for causal attention: FlashAttention in half precision on a GPU."""


def flash_attention(
    q: Float[Tensor, "... H T K"], k: Float[Tensor, "... H T K"], v: Float[Tensor, "... H T K"], causal: bool = True
) -> Float[Tensor, "... H T K"]:
    """softmax(Q Kᵀ / sqrt(K)) V with a causal mask or none, differentiable (Dao 2023).

    Saves Q, K, V, the output and the log-sum-exp of each row for the backward pass. The strides are free. Under
    autocast the inputs are cast to its type. In float32 there are no tensor cores, and plain attention, where it fits,
    can be up to five times as fast (few heads of 128 features: benchmarks/LOG.md); what is saved is memory. The order
    in which parts of dQ are added is not fixed on Hopper, unless `torch.use_deterministic_algorithms` is on: last bits
    may differ. Raises `UserError` if queries, keys and values differ in shape, type or device; plain attention serves
    queries and keys of different lengths.
    """
    if not (q.shape == k.shape == v.shape and q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        kinds = sorted({f"{tuple(x.shape)}, {x.dtype} on {x.device}" for x in (q, k, v)})
        raise UserError(
            "Flash attention takes queries, keys and values (..., H, T, K) of one shape, floating-point type and "
            f"device, not {' and '.join(kinds)}. Plain attention serves fewer queries than keys."
        )
    fits = q.ndim >= 3 and q.is_floating_point()
    require(fits, f"Flash attention takes (..., H, T, K) in floating point, not {tuple(q.shape)} in {q.dtype}.")
    kind = q.device.type
    if torch.is_autocast_enabled(kind) and q.dtype != torch.float64:
        q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
    shape = q.shape
    if q.ndim != 4:
        q, k, v = (x.unsqueeze(0) if x.ndim == 3 else x.flatten(0, -4) for x in (q, k, v))
    return FlashAttention.apply(q, k, v, causal).reshape(shape)


class FlashAttention(torch.autograd.Function):
    """`attention_forward` and `attention_backward` for autograd; as operators, whose calls take ten times as long,
    under `torch.compile` and for tensors without memory."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        ctx.causal, ctx.whole = causal, torch.compiler.is_compiling() or type(q) is not Tensor
        if not ctx.whole:
            q, k, v = aligned(q), aligned(k), aligned(v)
        out, lse = (forward_op if ctx.whole else attention_forward)(q, k, v, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, do: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        if ctx.whole or torch.is_grad_enabled():  # the operator says that it has no gradient of its own
            return *backward_op(q, k, v, out, lse, do, ctx.causal), None
        return *attention_backward(q, k, v, out, lse, aligned(do), ctx.causal), None


def attention_forward(
    q: Float[Tensor, "B H T K"], k: Float[Tensor, "B H T K"], v: Float[Tensor, "B H T K"],
    causal: bool, out: Float[Tensor, "B H T K"] | None = None,
) -> tuple[Float[Tensor, "B H T K"], Float[Tensor, "B H rows"]]:  # fmt: skip
    """The output and the log-sum-exp, outside of autograd; only `attention_backward` reads the latter's layout.

    Tensors are as `aligned` makes them. Without `out` the output lies in memory as (B, T, H, K). Does not synchronise
    with the host, so that a CUDA graph can hold it.
    """
    out = by_position(q) if out is None else out
    if q.numel() == 0:
        return out, log_sum_exp(q)
    if (module := kernels(q)) is reference:
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            return reference.forward(q, k, v, causal, out)
    with on_device_of(q):
        return module.forward(q, k, v, causal, out)


def attention_backward(
    q: Float[Tensor, "B H T K"], k: Float[Tensor, "B H T K"], v: Float[Tensor, "B H T K"],
    o: Float[Tensor, "B H T K"], lse: Float[Tensor, "B H rows"], do: Float[Tensor, "B H T K"], causal: bool,
    dq: Float[Tensor, "B H T K"] | None = None, dk: Float[Tensor, "B H T K"] | None = None,
    dv: Float[Tensor, "B H T K"] | None = None, angles: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of Q, K and V from that of the output, into the given views or new tensors; see `attention_forward`.

    `torch.use_deterministic_algorithms` takes kernels that add in a fixed order. With `angles`, the cosines and sines
    of `lmcore.fast.kernels.rope`, Q and K are those after RoPE, and the gradients those before it.
    """
    dq, dk, dv = (by_position(x) if given is None else given for x, given in ((q, dq), (k, dk), (v, dv)))
    if q.numel() == 0:
        return dq, dk, dv
    fixed_order = torch.are_deterministic_algorithms_enabled()
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False), on_device_of(q):
        return kernels(q, fixed_order).backward(q, k, v, o, lse, do, causal, dq, dk, dv, angles=angles)


def uses_triton(q: Tensor) -> bool:
    """Whether Triton's kernels serve inputs like this one."""
    types = (torch.float32, torch.bfloat16, torch.float16)
    return dispatch.runs_triton(q.device) and q.dtype in types and q.shape[-1] <= MAX_HEAD_SIZE


def kernels(q: Tensor, fixed_order: bool = False) -> ModuleType:
    """The module whose `forward` or `backward` serves inputs like this one."""
    if not uses_triton(q):
        return reference
    whole = q.shape[-1] % 8 == 0 and q.shape[-1] >= 16  # TMA copies pieces of 16 bytes
    serves_hopper = q.dtype != torch.float32 and whole and is_hopper(q.device)
    if serves_hopper and not fixed_order and (module := hopper_kernels()) is not None:
        return module
    from lmcore.fast.kernels.attention import gpu

    return gpu


@lru_cache(maxsize=1)
def hopper_kernels() -> ModuleType | None:
    """The kernels in Gluon, or None, said once, with a Triton whose Gluon is another one: it is experimental."""
    try:
        from lmcore.fast.kernels.attention import hopper
    except (ImportError, AttributeError) as error:
        warnings.warn(f"Attention runs on the portable kernels: this Triton's Gluon differs ({error}).", stacklevel=2)
        return None
    return hopper


def by_position(q: Tensor) -> Tensor:
    """An empty tensor of this shape that lies in memory as (B, T, H, K), so that the heads are side by side."""
    return torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


def lse_rows_of(length: int) -> int:
    """Rows of the Triton kernels' log-sum-exp: a multiple of 128."""
    return -(-length // 128) * 128


def log_sum_exp(q: Tensor) -> Tensor:
    """An empty log-sum-exp for these queries."""
    rows = lse_rows_of(q.shape[-2]) if uses_triton(q) else q.shape[-2]
    return torch.empty(*q.shape[:2], rows, device=q.device, dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("lmcore::attention_forward", mutates_args=())
def forward_op(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """`attention_forward` as an operator, which `torch.compile` takes as a whole."""
    q, k, v = (aligned(x) for x in (q, k, v))
    return attention_forward(q, k, v, causal)


forward_op.register_fake(lambda q, k, v, causal: (by_position(q), log_sum_exp(q)))


@torch.library.custom_op("lmcore::attention_backward", mutates_args=())
def backward_op(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`attention_backward` as an operator."""
    q, k, v, o, do = (aligned(x) for x in (q, k, v, o, do))
    return attention_backward(q, k, v, o, lse, do, causal)


backward_op.register_fake(lambda q, k, v, *others: (by_position(q), by_position(k), by_position(v)))


def aligned(x: Tensor) -> Tensor:
    """`x`, copied where its features do not lie side by side, or rows overlap or begin where a copy's would not."""
    if x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0:
        return x
    unit = math.gcd(ALIGNMENT, x.shape[-1] * x.element_size())
    steps = [stride * x.element_size() for size, stride in zip(x.shape[:-1], x.stride(), strict=False) if size > 1]
    fits = x.stride(-1) == 1 and x.data_ptr() % unit == 0 and all(step > 0 and step % unit == 0 for step in steps)
    return x if fits else x.clone(memory_format=torch.contiguous_format)
