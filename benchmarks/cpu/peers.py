"""What lmcore is compared with in training: the same model by Hugging Face and by torch.nn, fed the same weights."""

from collections.abc import Callable

import torch
from speed.peers import halves, llama
from torch import Tensor, nn
from torch.nn import functional as F

from lmcore.config import ModelConfig, OptimizerConfig
from lmcore.model import TransformerLM

Loss = Callable[[Tensor, Tensor], Tensor]


class PeerStep:
    """A training step as PyTorch's users write it: its fused AdamW and its clipping, around any model's loss."""

    def __init__(self, model: nn.Module, loss: Loss, config: OptimizerConfig):
        self.model, self.loss, self.max_grad_norm = model, loss, config.max_grad_norm
        groups = [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True
        )

    def __call__(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Updates the weights by one batch; returns loss and gradient norm."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(inputs, targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()
        return loss.detach(), norm


def hugging_face(source: TransformerLM) -> tuple[nn.Module, Loss]:
    """`LlamaForCausalLM` with the weights of `source`. Raises ImportError where transformers is not installed."""
    model = llama(source)

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        logits = model(input_ids=inputs).logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return model, loss


class TorchBlock(nn.Module):
    """A pre-norm block of torch.nn's modules with PyTorch's fused attention."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.num_heads = c.num_heads
        self.ln1, self.ln2 = (nn.RMSNorm(c.d_model, eps=1e-5) for _ in range(2))
        self.qkv = nn.Linear(c.d_model, 3 * c.d_model, bias=False)
        self.output_proj = nn.Linear(c.d_model, c.d_model, bias=False)
        self.w13 = nn.Linear(c.d_model, 2 * c.d_ff, bias=False)
        self.w2 = nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(self.ln1(x)).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3).unbind(2)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output_proj(heads.transpose(1, 2).flatten(2))
        gate, up = self.w13(self.ln2(x)).chunk(2, dim=-1)
        return x + self.w2(F.silu(gate) * up)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on (B, H, T, K) that rotates the two halves of a head, with cosines and sines of shape (T, K / 2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class TorchLlama(nn.Module):
    """The same model as `TransformerLM`, written with what torch.nn has, q, k and v as well as w1 and w3 in one."""

    def __init__(self, source: TransformerLM):
        super().__init__()
        c = source.config
        self.token_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(TorchBlock(c) for _ in range(c.num_layers))
        self.ln_final = nn.RMSNorm(c.d_model, eps=1e-5)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        frequencies = c.rope_theta ** (-torch.arange(0, c.d_k, 2) / c.d_k)
        angles = torch.outer(torch.arange(c.context_length), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.load_state_dict(packed(source.state_dict(), c.num_heads))

    def forward(self, token_ids: Tensor) -> Tensor:
        x, length = self.token_embeddings(token_ids), token_ids.shape[-1]
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return self.lm_head(self.ln_final(x))


def packed(state: dict[str, Tensor], num_heads: int) -> dict[str, Tensor]:
    """lmcore's weights under the names of `TorchLlama`."""
    result = {}
    for name, weight in state.items():
        if name.endswith("q_proj.weight"):
            q, k, v = (state[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj"))
            result[name.replace("attn.q_proj", "qkv")] = torch.cat([halves(q, num_heads), halves(k, num_heads), v])
        elif name.endswith("w1.weight"):
            result[name.replace("ffn.w1", "w13")] = torch.cat([weight, state[name.replace("w1", "w3")]])
        elif not name.endswith(("k_proj.weight", "v_proj.weight", "w3.weight")):
            result[name.replace("attn.", "").replace("ffn.", "")] = weight
    return result


def torch_llama(source: TransformerLM) -> tuple[nn.Module, Loss]:
    """`TorchLlama` with the weights of `source`."""
    model = TorchLlama(source)
    return model, lambda inputs, targets: F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
