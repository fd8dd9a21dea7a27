"""Attention in one kernel, which the plain definition of `lmcore.functional` is measured against."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from lmcore.kernels.attention import flash_attention


def fused_causal_attention(
    Q: Float[Tensor, "... heads seq d_k"],
    K: Float[Tensor, "... heads seq d_k"],
    V: Float[Tensor, "... heads seq d_k"],
    kernel: str = "sdpa",
) -> Float[Tensor, "... heads seq d_k"]:
    """Causal scaled dot-product attention that never writes out the scores (Dao et al. 2022).

    `kernel` is "flash" for our own, or "sdpa" for PyTorch's choice of one: FlashAttention for half precision on a GPU,
    others elsewhere.
    """
    if kernel == "flash":
        return flash_attention(Q, K, V)
    return functional.scaled_dot_product_attention(Q, K, V, is_causal=True)
