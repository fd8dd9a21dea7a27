"""Small models of every shape that the fused step serves, and steps of both kinds over them."""

from functools import partial

import torch
from torch import Tensor

from lmcore.config import ModelConfig, OptimizerConfig, TrainConfig
from lmcore.fast.kernels.adamw import FusedAdamW
from lmcore.fast.step import FusedStep
from lmcore.model import TransformerLM
from lmcore.optimizer import build_optimizer
from lmcore.train import PlainStep

CPU = torch.device("cpu")

SHAPES = {
    "odd": ModelConfig(101, context_length=13, d_model=48, num_layers=3, num_heads=3, d_ff=100),
    "tied": ModelConfig(64, context_length=8, d_model=32, num_layers=2, num_heads=2, d_ff=40, tie_embeddings=True),
    "heads of 80": ModelConfig(130, context_length=20, d_model=160, num_layers=1, num_heads=2, d_ff=96),
    "deep": ModelConfig(40, context_length=6, d_model=16, num_layers=10, num_heads=2, d_ff=24),  # two groups of layers
    "no positions": ModelConfig(33, context_length=9, d_model=34, num_layers=2, num_heads=2, d_ff=7, position="none"),
    "no norms": ModelConfig(40, context_length=7, d_model=24, num_layers=2, num_heads=3, d_ff=20, norm="none"),
}


def batch_of(config: ModelConfig, size: int = 2, device: torch.device = CPU) -> tuple[Tensor, Tensor]:
    ids = torch.randint(config.vocab_size, (size, config.context_length + 1))
    ids[0, :5] = 3  # a token that occurs more than once
    return ids[:, :-1].to(device), ids[:, 1:].to(device)


def model_of(config: ModelConfig, device: torch.device = CPU, seed: int = 0) -> TransformerLM:
    torch.manual_seed(seed)
    model = TransformerLM(config, device=device)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:  # gains that are not 1
                p.add_(0.3 * torch.randn_like(p))
    return model


def relative_error(out: Tensor, expected: Tensor) -> float:
    return ((out.double() - expected.double()).norm() / expected.double().norm()).item()


def fused_step(model: TransformerLM, batch_size: int, dtype=torch.float32, limit=1.0, name="adamw", **options):
    optimizer = build_optimizer(model, OptimizerConfig(name=name), partial(FusedAdamW, max_grad_norm=limit))
    length = model.config.context_length
    return FusedStep(model, optimizer, batch_size, length, dtype, max_grad_norm=limit, **options)


def plain_step(model: TransformerLM, device: torch.device = CPU, precision="fp32", name="adamw", limit=1.0):
    optimizer = OptimizerConfig(name=name, max_grad_norm=limit)
    return PlainStep(model, TrainConfig(model.config, optimizer, precision=precision), device)
