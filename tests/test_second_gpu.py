"""Our kernels on a GPU that is not the current one, as with --device cuda:1: Triton launches on the current one."""

import pytest
import torch
from attention_cases import assert_close, defined, packed

from lmcore.config import GenerateConfig, ModelConfig, TrainConfig
from lmcore.fast.kernels.attention import flash_attention
from lmcore.fast.kernels.cross_entropy import linear_cross_entropy
from lmcore.functional import cross_entropy
from lmcore.generate import generate
from lmcore.model import TransformerLM
from lmcore.train import AsyncMetrics, training_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]

OTHER = torch.device("cuda", 1)
CONFIG = ModelConfig(97, context_length=32, d_model=64, num_layers=2, num_heads=2, d_ff=96)


def test_attention_and_loss_outside_of_a_training_step():
    for dtype, size in ((torch.float32, 16), (torch.bfloat16, 64)):
        q, k, v, do = packed(2, 300, 2, size, dtype, OTHER)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o = flash_attention(*leaves)
        found = [o.detach(), *torch.autograd.grad(o, leaves, do)]
        assert_close(found, defined(q, k, v, do, True), 1e-5 if dtype == torch.float32 else 1e-2)
    x, weight = (torch.randn(n, 16, device=OTHER, requires_grad=True) for n in (9, 67))
    targets = torch.randint(67, (9,), device=OTHER)
    found = torch.autograd.grad(linear_cross_entropy(x, weight, targets), (x, weight))
    wanted = torch.autograd.grad(cross_entropy(x.double() @ weight.double().T, targets), (x, weight))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_training_and_what_is_read_back():
    """The same losses and norms as on the CPU: with the elementwise kernels, AdamW, and attention with RoPE."""
    config = TrainConfig(model=CONFIG, batch_size=4, ops="fused")
    batches = torch.randint(97, (5, 2, 4, 32))
    found = []
    for device in (torch.device("cpu"), OTHER):
        torch.manual_seed(0)
        step, reason = training_step(TransformerLM(CONFIG).to(device), config)
        assert reason is None
        readback = AsyncMetrics()
        for number, batch in enumerate(batches):
            readback.push(number, 0.0, *step(*batch.to(device)))
        readback.start()
        found.append([(loss, norm) for _, _, loss, norm in readback.read()])
    assert found[1] == [pytest.approx(pair, rel=1e-3) for pair in found[0]]


def test_decoding():
    torch.manual_seed(0)
    model = TransformerLM(CONFIG)
    prompts, config = [[1, 2, 3], [4]], GenerateConfig(max_new_tokens=60, temperature=0.0, ops="fused")
    first = generate(model.to("cuda:0"), prompts, config)  # captures there: the next graph must be of its own device
    assert generate(model.to(OTHER), prompts, config) == first == generate(model.cpu(), prompts, config)
