"""What `trees.py` starts for each tree: builds a case with that tree's lmcore and times it when asked to."""

import json
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

import lmcore
from lmcore.config import model_config
from lmcore.fused.decoder import FusedDecoder
from lmcore.fused.step import FusedStep
from lmcore.kernels.adamw import FusedAdamW
from lmcore.kernels.attention import flash_attention
from lmcore.model import TransformerLM

OPTIMIZER = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def step(size: str, batch_size: int, context_length: int) -> Callable[[], Any]:
    """A fused training step with clipping, bf16 on a GPU."""
    config = model_config(size, context_length=context_length, vocab_size=10_000)
    model = TransformerLM(config, device=DEVICE)
    optimizer = FusedAdamW(model.parameters(), **OPTIMIZER, max_grad_norm=1.0)
    taken = FusedStep(model, optimizer, batch_size, context_length, DTYPE)
    batch = [torch.randint(config.vocab_size, (batch_size, context_length), device=DEVICE) for _ in range(2)]
    return lambda: taken(*batch)


def attention(head_size: int, length: int, heads: int) -> Callable[[], Any]:
    """Causal attention of one sequence, forward and backward."""
    q, k, v, do = (torch.randn(1, heads, length, head_size, device=DEVICE, dtype=DTYPE) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    return lambda: torch.autograd.grad(flash_attention(q, k, v), (q, k, v), do)


def decode(size: str, prompt_tokens: int, new_tokens: int) -> Callable[[], Any]:
    """Greedy decoding of one sequence with the static cache, the prompt included."""
    config = model_config(size, context_length=prompt_tokens + new_tokens, vocab_size=10_000)
    decoder = FusedDecoder(TransformerLM(config, device=DEVICE), 1, config.context_length, DTYPE)
    prompt = torch.randint(config.vocab_size, (1, prompt_tokens)).tolist()
    return lambda: (decoder.place([0], prompt), decoder.decode(new_tokens))


def main(kind: str, settings: dict[str, Any]) -> None:
    """Builds a case; says whose lmcore this is; then answers each number of calls with the seconds of one."""
    answers, sys.stdout = sys.stdout, sys.stderr
    torch.manual_seed(0)
    run = {"step": step, "attention": attention, "decode": decode}[kind](**settings)

    def timed(calls: int) -> float:
        began = perf_counter()
        for _ in range(calls):
            run()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return (perf_counter() - began) / calls

    timed(5)
    print(json.dumps(lmcore.__file__), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(timed(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
