"""Fused attention of PyTorch, which the plain definition of `lmcore.functional` is measured against."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional


def fused_causal_attention(
    Q: Float[Tensor, "... heads seq d_k"], K: Float[Tensor, "... heads seq d_k"], V: Float[Tensor, "... heads seq d_v"]
) -> Float[Tensor, "... heads seq d_v"]:
    """Causal scaled dot-product attention in one kernel that never writes out the scores (Dao et al. 2022).

    Which kernel is PyTorch's choice: FlashAttention for half precision on a GPU, others elsewhere.
    """
    return functional.scaled_dot_product_attention(Q, K, V, is_causal=True)
