"""The kernels of a decoding step: the plain versions against float64 definitions, Triton's against the plain ones."""

import itertools
import math

import pytest
import torch

from lmcore.config import GenerateConfig
from lmcore.fast.decoder import SPLITS
from lmcore.fast.kernels import decode as plain
from lmcore.functional import scaled_dot_product_attention, silu
from lmcore.model import RMSNorm, RotaryPositionalEmbedding
from lmcore.profiling.kernels import relative_error as error
from lmcore.sampling import next_token_distribution

HALF = pytest.param(torch.bfloat16, id="bf16")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of weights in that dtype; the sums are in float32 everywhere."""


@pytest.fixture(scope="module")
def gpu():
    return pytest.importorskip("lmcore.fast.kernels.decode.gpu", reason="Triton is not installed")


@pytest.fixture(params=["plain", "kernel"])
def either(request, device):
    """The plain version on the CPU, and Triton's kernels where they run."""
    return (plain, torch.device("cpu")) if request.param == "plain" else (request.getfixturevalue("gpu"), device)


def draw(seed: int, device: torch.device):
    """Fresh random tensors of a seed."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator).to(device)


def normed(x: torch.Tensor) -> torch.Tensor:
    return RMSNorm(x.shape[-1], device=x.device, dtype=torch.float64)(x.double()).detach()


# ---------------------------------------------------------------------------------------------- matrix products

SHAPES = [(1, 48, 10), (3, 33, 7), (10, 48, 50), (9, 32, 600)]
"""Rows, D, F: sums in registers, and tiles, of which several programs share the last."""


def split_scratch(rows, d_model, device):
    """What `linear_add` takes to split the inputs among programs."""
    return torch.full((SPLITS, rows, d_model), math.nan, device=device), torch.zeros(
        rows * d_model, device=device, dtype=torch.int32
    )


def check_products(module, rows, d_model, d_ff, dtype, device, seed=0, scale=1.0):
    """The three products against their float64 definitions; `linear_add` adds to ones."""
    tensor = draw(seed, device)
    x, hidden = (scale * tensor(rows, d_model)).to(dtype), tensor(rows, d_ff).to(dtype)
    matrix, down = (tensor(2 * d_ff, d_model) / math.sqrt(d_model)).to(dtype), tensor(d_model, d_ff).to(dtype)
    y = normed(x) @ matrix.double().T
    gate, up = y.chunk(2, dim=-1)
    copy = torch.full((rows, d_model), math.nan, device=device, dtype=dtype)
    for function, expected, inputs, others in (
        (module.norm_linear, y, (x, matrix), ()),
        (module.norm_swiglu, silu(gate) * up, (x, matrix), ()),
        (module.linear_add, 1 + hidden.double() @ down.double().T, (hidden, down), (copy,)),
    ):
        for scratch in ((), split_scratch(rows, d_model, device)) if others else ((),):
            out = torch.ones(expected.shape, device=device)
            function(*inputs, out, *others, *scratch)
            for found in (out, *others):
                assert error(found, expected) < TOLERANCE[dtype]
            assert not scratch or not scratch[1].any(), "counts are zero again"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_the_definitions(either, shape, dtype):
    module, device = either
    if module is not plain and device.type == "cpu" and dtype == torch.bfloat16 and shape[0] > 8:
        pytest.skip("the interpreter multiplies bfloat16 tiles as if they were integers")
    for scale in (1.0, 1e-12, 1e12) if dtype == torch.float32 and shape == SHAPES[0] else (1.0,):
        check_products(module, *shape, dtype, device, scale=scale)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 17, 64, 100])
@pytest.mark.parametrize(("d_model", "d_ff"), [(512, 1344), (768, 3072), (2560, 10240), (80, 96)])
def test_product_kernels_at_real_sizes(gpu, rows, d_model, d_ff, dtype):
    check_products(gpu, rows, d_model, d_ff, dtype, torch.device("cuda"), seed=rows)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, 16, 64])
def test_products_are_the_same_every_time(gpu, rows):
    tensor = draw(4, torch.device("cuda"))
    x, w = tensor(rows, 768).bfloat16(), tensor(10_000, 768).bfloat16()
    for outputs, function in ((10_000, gpu.norm_linear), (2304, gpu.norm_linear), (5000, gpu.norm_swiglu)):
        first = torch.empty(rows, outputs, device="cuda")
        function(x, w, first)
        for _ in range(300):
            again = torch.full_like(first, math.nan)
            function(x, w, again)
            assert torch.equal(first, again)
    hidden, down, found = tensor(rows, 3072).bfloat16(), tensor(768, 3072).bfloat16(), []
    scratch = split_scratch(rows, 768, hidden.device)
    for _ in range(300):
        found.append(torch.zeros(rows, 768, device="cuda"))
        gpu.linear_add(hidden, down, found[-1], torch.empty_like(x), *scratch)
    assert all(torch.equal(found[0], other) for other in found)


# ---------------------------------------------------------------------------------------------- attention


def check_attention(module, rows, heads, head_size, slots, parts, dtype, device, seed=0):
    """Attention against the definitions of the model, row by row, in float64."""
    tensor, width = draw(seed, device), heads * head_size
    rope = RotaryPositionalEmbedding(10_000.0, head_size, slots, device=device)
    before = [tensor(rows, heads, slots, head_size).to(dtype) for _ in range(2)]
    keys, values = (x.clone() for x in before)
    qkv = tensor(rows, 3 * width)
    positions = torch.randint(slots, (rows,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    positions[0], positions[-1] = 0, slots - 1  # (of one row: the last)
    out = torch.full((rows, width), math.nan, device=device, dtype=dtype)
    scratch = [torch.full((parts, rows, each), math.nan, device=device) for each in (width, heads)] if parts > 1 else []
    module.attend(qkv, rope.cos, rope.sin, keys, values, positions.to(device), out, *scratch)
    for row, position in enumerate(positions.tolist()):
        q, k, v = qkv[row].double().view(3, heads, 1, head_size)
        at = torch.tensor([position], device=device)
        new = [rope(k, at).to(dtype).double(), v.to(dtype).double()]
        seen = [torch.cat((cache[row, :, :position].double(), x), 1) for cache, x in zip(before, new, strict=True)]
        expected = scaled_dot_product_attention(rope(q, at), *seen).flatten()
        assert error(out[row], expected) < TOLERANCE[dtype]
        others = torch.arange(slots, device=device) != position
        for cache, old, x in zip((keys, values), before, new, strict=True):
            assert error(cache[row, :, position], x[:, 0]) < TOLERANCE[dtype], "the new one is in its slot"
            assert torch.equal(cache[row][:, others], old[row][:, others]), "no other slot has changed"


ATTENTION = [(1, 2, 24, 9, 1), (3, 1, 16, 1100, 1), (2, 1, 80, 300, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_attention_is_the_definition(either, case, dtype):
    module, device = either
    check_attention(module, *case, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 2, 4, 16])
@pytest.mark.parametrize("case", [(1, 12, 64, 256), (4, 32, 80, 3000), (20, 4, 128, 1000), (2, 16, 32, 5000)], ids=str)
def test_attention_kernel_at_real_sizes(gpu, case, parts):
    for seed, dtype in itertools.product(range(3), (torch.float32, torch.bfloat16)):
        check_attention(gpu, *case, parts, dtype, torch.device("cuda"), seed)


# ---------------------------------------------------------------------------------------------- the next token

LARGEST = 1 - 2**-24
"""Of the uniform numbers below 1 in float32."""


def state(rows: int, vocab: int, device: torch.device) -> plain.Sequences:
    """Rows at different steps, one not in its last slot."""
    tokens = torch.full((4, rows), -7, dtype=torch.int32, device=device)
    steps = torch.arange(rows, dtype=torch.int32, device=device) * 3
    positions = torch.full((rows,), 9, dtype=torch.int32, device=device)
    positions[0] = 2
    x, copy = torch.zeros(2, rows, 24, device=device)
    return plain.Sequences(tokens, steps, positions, draw(5, device)(vocab, 24), x, copy, num_slots=10)


def check_state(after, chosen: list[int], rows: int, vocab: int, device: torch.device):
    tokens, steps, positions, embedding, x, *_ = state(rows, vocab, device)
    for row, token in enumerate(chosen):
        tokens[int(steps[row]) % 4, row] = token
        x[row] = embedding[max(token, 0)]
    expected = (tokens, steps + 1, (positions + 1).clamp(max=9), embedding, x, x)
    for found, wanted in zip(after[:6], expected, strict=True):
        assert torch.equal(found, wanted)


def test_greedy_takes_the_first_of_the_largest_and_marks_what_is_not_finite(either):
    """So does a draw from the likeliest alone."""
    module, device = either
    logits = draw(2, device)(6, 67)
    logits[0, [5, 9]] = 50.0
    logits[1, 66] = 99.0  # an id that is not to be taken
    logits[2, 3], logits[3, 4], logits[4, 5] = math.nan, math.inf, -math.inf
    logits[5, 65] = math.nan
    chosen = [5, int(logits[1, :60].argmax()), -1, -1, -1, int(logits[5, :60].argmax())]
    wide = torch.zeros(1, 8200, device=device)
    wide[0, [5, 5 + 8192]] = 50.0  # in one place of two blocks
    for scores, num_ids, expected in ((logits, 60, chosen), (wide, 8200, [5])):
        likeliest = GenerateConfig(top_k=1), torch.full((4, len(scores)), LARGEST, device=device)
        for take, options in ((module.greedy, ()), (module.sampled, likeliest)):
            after = state(*scores.shape, device)
            take(scores, num_ids, *options, after)
            check_state(after, expected, *scores.shape, device)


OPTIONS = [
    {"temperature": 0.3}, {"temperature": 1e-30}, {"top_k": 5}, {"top_k": 1000}, {"top_p": 0.7}, {"top_p": 1e-6},
    {"temperature": 1.4, "top_k": 20, "top_p": 0.5},
]  # fmt: skip
SETTINGS = [GenerateConfig(**options) for options in OPTIONS]


def allowed(logits: torch.Tensor, u: torch.Tensor, config: GenerateConfig, slack: float) -> list[set[int]]:
    """The token of each row for u, and those of numbers within rounding of it: an interval of u for each token."""
    q, ids = next_token_distribution(logits.double(), config)
    ends = q.cumsum(dim=-1)
    near = (ends > u.double().unsqueeze(-1) - slack) & (ends - q < u.double().unsqueeze(-1) + slack) & (q > 0)
    return [set(row_ids[row_near].tolist()) for row_ids, row_near in zip(ids, near, strict=True)]


def check_sampled(module, logits, u, config, num_ids, slack=1e-6):
    rows, vocab = logits.shape
    after = state(rows, vocab, logits.device)
    at = after[1].long() % 4
    uniforms = torch.rand(4, rows).to(logits.device)
    uniforms[at, torch.arange(rows)] = u
    module.sampled(logits, num_ids, config, uniforms, after)
    chosen = after[0][at, torch.arange(rows)].tolist()
    for token, possible in zip(chosen, allowed(logits[:, :num_ids], u, config, slack), strict=True):
        assert token in possible
    check_state(after, chosen, rows, vocab, logits.device)


@pytest.mark.parametrize("config", SETTINGS, ids=str)
def test_sampling_draws_from_the_distribution(either, config):
    module, device = either
    logits = draw(1, device)(5, 67)
    logits[1::2] = (9 * logits[1::2]).round()  # some are equal
    logits[0, 66] = math.nan  # of an id that is not to be taken
    u = torch.tensor([0.0, 0.3, 0.6, 0.9, LARGEST], device=device)
    check_sampled(module, logits, u, config, 60)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [257, 10_000, 16_000, 50_257])
@pytest.mark.parametrize("config", SETTINGS, ids=str)
def test_sampling_at_real_sizes(vocab, config):
    for seed in range(5):
        logits = 3 * draw(seed, torch.device("cuda"))(8, vocab)
        # rounding may keep or drop the token at the edge of the nucleus, which moves all others by its probability
        check_sampled(plain, logits.bfloat16().float(), torch.rand(8).cuda(), config, vocab - 5, slack=1e-3)
