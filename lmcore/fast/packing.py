"""The matrices of a model side by side: what a step multiplies by, and where it leaves their gradients.

Projections of the same input are stacked, so that one matmul serves them all, and layers lie one behind the other, so
that one batched matmul gives a gradient for several layers. Letters: L layers, D d_model, F d_ff, V vocabulary.
"""

import torch
from torch import Tensor, nn

from lmcore.model import TransformerLM

HEAD_ROWS = 64
"""The output embedding is padded to a multiple of this: cuBLAS is several times slower where V is odd."""


class PackedMatrices:
    """One tensor per kind of matrix of `model`, all zero, in `dtype` on the model's device.

    `qkv` (L, 3D, D) holds W_q, W_k and W_v; `out` (L, D, D) the output projection; `w13` (L, 2F, D) W1 and W3; `w2`
    (L, D, F); `head` (V rounded up, D), whose rows beyond V stay zero; `embedding` (V, D), which is part of `head`
    when embeddings are tied. `views` maps each matrix of the model to its place. With `slots` there is room for so many
    layers instead of L, and layer l is at `slot(l)`; `embedding` has as many rows as `ranks` can share evenly.
    """

    def __init__(self, model: TransformerLM, dtype: torch.dtype, slots: int | None = None, ranks: int = 1):
        c = model.config
        self.slots = slots or c.num_layers
        rows = -(-c.vocab_size // ranks) * ranks
        place = {"device": model.lm_head.weight.device, "dtype": dtype}
        self.qkv = torch.zeros(self.slots, 3 * c.d_model, c.d_model, **place)
        self.out = torch.zeros(self.slots, c.d_model, c.d_model, **place)
        self.w13 = torch.zeros(self.slots, 2 * c.d_ff, c.d_model, **place)
        self.w2 = torch.zeros(self.slots, c.d_model, c.d_ff, **place)
        self.head = torch.zeros(-(-rows // HEAD_ROWS) * HEAD_ROWS, c.d_model, **place)
        self.embedding = self.head[:rows] if c.tie_embeddings else torch.zeros(rows, c.d_model, **place)
        self.views = self._views(model)

    def slot(self, layer: int) -> int:
        """Where a layer's matrices are."""
        return layer % self.slots

    def of_layers(self, layers: range) -> list[Tensor]:
        """The matrices of consecutive layers, one contiguous tensor per kind."""
        return [kind[layers.start : layers.stop] for kind in (self.qkv, self.out, self.w13, self.w2)]

    def _views(self, model: TransformerLM) -> dict[nn.Parameter, Tensor]:
        views = {model.token_embeddings.weight: self.embedding}
        views[model.lm_head.weight] = self.head[: len(self.embedding)]
        for number, layer in enumerate(model.layers):
            index, attention, ffn = self.slot(number), layer.attn, layer.ffn
            projections = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
            views |= zip(projections, self.qkv[index].chunk(3), strict=True)
            views |= zip([ffn.w1.weight, ffn.w3.weight], self.w13[index].chunk(2), strict=True)
            views[attention.output_proj.weight] = self.out[index]
            views[ffn.w2.weight] = self.w2[index]
        return views


def norm_weights_of(model: TransformerLM) -> list[nn.Parameter]:
    """The weights of all norms in the order of the forward pass: 2L + 1 parameters (D,)."""
    return [norm.weight for layer in model.layers for norm in (layer.ln1, layer.ln2)] + [model.ln_final.weight]
