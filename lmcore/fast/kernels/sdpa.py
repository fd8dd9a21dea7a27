"""PyTorch's own attention kernels."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional


def fused_causal_attention(
    q: Float[Tensor, "... H T K"], k: Float[Tensor, "... H T K"], v: Float[Tensor, "... H T K"]
) -> Float[Tensor, "... H T K"]:
    """Causal attention by PyTorch's choice of a kernel: FlashAttention in half precision on a GPU, others elsewhere."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
