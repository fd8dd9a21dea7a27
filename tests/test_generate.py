"""Decoding against brute-force definitions: the loop, the cache, the stop rules."""

from random import Random

import pytest
import torch
from tokenizer_reference import BYTES

from lmcore.config import GenerateConfig, ModelConfig, replace
from lmcore.device import autocast
from lmcore.errors import UserError
from lmcore.generate import CachedForward, generate, generate_text
from lmcore.model import TransformerLM
from lmcore.sampling import sample_next

EOT = BYTES.eot_id
CONTEXT = 12


def build(seed: int = 0, **changes) -> TransformerLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 257, "context_length": CONTEXT, "d_model": 32, "num_layers": 2, "num_heads": 4, "d_ff": 48}
    return TransformerLM(ModelConfig(**sizes | changes))


@pytest.fixture(scope="module")
def model() -> TransformerLM:
    return build()


def always(token: int, vocab_size: int = 257) -> TransformerLM:
    """A model that gives `token` all the probability: its output weights point along the constant final vector."""
    model = build(vocab_size=vocab_size)
    with torch.no_grad():
        model.token_embeddings.weight.fill_(1.0)
        for layer in model.layers:
            layer.attn.output_proj.weight.zero_()
            layer.ffn.w2.weight.zero_()
        model.lm_head.weight.zero_()
        model.lm_head.weight[token] = 10.0
    return model


# ---------------------------------------------------------------------------------------------- the loop


def naive(model, prompt, config, eot_id=None):
    """One sequence, the whole window at every step, plain Python."""
    window, output, generator = list(prompt), [], torch.Generator().manual_seed(config.seed)
    while len(output) < config.max_new_tokens:
        with torch.no_grad():
            logits = model(torch.tensor([window]))[:, -1]
        token = sample_next(logits, config, [generator]).item()
        if token == eot_id:
            break
        output.append(token)
        window.append(token)
        if len(window) > model.config.context_length:
            window = window[-(model.config.context_length // 2) :]
    return output


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_cache_of_grouped_heads_is_as_much_smaller(kv_heads):
    model, config = build(num_kv_heads=kv_heads), GenerateConfig(max_new_tokens=20, temperature=0)
    assert generate(model, PROMPTS, config) == generate(model, PROMPTS, replace(config, kv_cache=False))
    forward = CachedForward(model, num_rows=2, num_slots=CONTEXT)
    with torch.no_grad():
        forward([0, 1], [[1, 2], [3]])
    assert {cache.keys.shape for cache in forward.caches} == {(2, kv_heads, CONTEXT, 8)}


SETTINGS = [
    GenerateConfig(max_new_tokens=30, temperature=0),
    GenerateConfig(max_new_tokens=30, temperature=0.8, top_p=0.9, top_k=50, seed=11),
]
PROMPTS = [[1, 2, 3], [9], list(range(20, 20 + CONTEXT)), [4] * (CONTEXT - 1), [200, 100, 3, 50, 60]]


@pytest.mark.parametrize("config", SETTINGS, ids=["greedy", "sampled"])
def test_rows_of_a_batch_are_those_of_the_naive_loop_beyond_the_context(model, config):
    """Each with a stream of random numbers of its own, alone as beside others; the global one is left alone."""
    before = torch.get_rng_state()
    batch = generate(model, PROMPTS, config)
    assert batch == generate(model, PROMPTS, replace(config, kv_cache=False))
    assert torch.equal(torch.get_rng_state(), before)
    for row, prompt in enumerate(PROMPTS):
        alone = replace(config, seed=config.seed + row)
        assert generate(model, [prompt], alone) == [batch[row]] == [naive(model, prompt, alone)]


ARCHITECTURES = [
    {}, {"position": "none"}, {"position": "sinusoidal"}, {"norm": "post", "dropout": 0.5},
    {"context_length": 1}, {"context_length": 2}, {"context_length": 3},
]  # fmt: skip


@pytest.mark.parametrize("changes", ARCHITECTURES, ids=str)
def test_cache_equals_no_cache_for_every_architecture_and_any_batch(changes):
    model, random = build(seed=1, **changes), Random(str(changes))
    for temperature in (0.0, 0.7, 1.3, 1.3):
        lengths = [random.randint(1, model.config.context_length) for _ in range(random.randint(2, 5))]
        prompts = [random.choices(range(257), k=length) for length in lengths]
        config = GenerateConfig(max_new_tokens=15, temperature=temperature, seed=random.randrange(1000))
        assert generate(model, prompts, config, 3) == generate(model, prompts, replace(config, kv_cache=False), 3)


def test_the_cache_saves_the_work_that_it_is_for():
    model, fed = build(), []
    model.register_forward_pre_hook(lambda module, arguments: fed.append(arguments[0].shape[1]))
    generate(model, [[1, 2, 3]], GenerateConfig(max_new_tokens=CONTEXT))
    # the prompt, single tokens until the window is full, then its last half once, and single tokens again
    assert fed == [3, *[1] * (CONTEXT - 3), CONTEXT // 2, 1]


def test_logits_are_those_that_each_token_is_drawn_from(model):
    seen = []
    greedy = GenerateConfig(max_new_tokens=CONTEXT, temperature=0, ops="fused")
    (ids,) = generate(model, [[1, 2, 3]], greedy, num_ids=99, on_logits=seen.append)
    assert ids == [logits.argmax().item() for logits in seen]
    assert {logits.shape for logits in seen} == {(1, 99)}


def test_precision_is_autocast_around_the_forward_passes():
    model, seen, config = build(), set(), GenerateConfig(max_new_tokens=20, seed=3)
    with autocast(torch.device("cpu"), "bf16"):
        expected = generate(model, PROMPTS, config)
    model.lm_head.register_forward_hook(lambda module, given, out: seen.add(out.dtype))
    assert generate(model, PROMPTS, replace(config, precision="bf16")) == expected
    assert seen == {torch.bfloat16}


# ---------------------------------------------------------------------------------------------- stopping


def test_end_of_text_ends_a_row_and_is_not_part_of_it(model):
    config = GenerateConfig(max_new_tokens=60, seed=2)
    free = generate(model, PROMPTS, config)
    eot = free[0][10]
    stopped = generate(model, PROMPTS, config, eot_id=eot)
    for whole, row in zip(free, stopped, strict=True):
        assert row == (whole[: whole.index(eot)] if eot in whole else whole)
    assert len(stopped[0]) <= 10


def test_a_row_can_be_empty_and_the_maximum_holds(model):
    config = GenerateConfig(max_new_tokens=5)
    assert generate(always(EOT), [[1], [2]], config, eot_id=EOT) == [[], []]
    assert generate(always(65), [[1]], config, eot_id=EOT) == [[65] * 5]
    assert generate(model, [], config) == []
    assert generate(model, [[]], config, eot_id=EOT) == generate(model, [[EOT]], config, eot_id=EOT)  # a new document


def test_prompts_that_cannot_be_continued(model):
    for prompt, words in (
        ([0] * (CONTEXT + 1), f"Prompt 1 has {CONTEXT + 1} tokens; the model's context_length is {CONTEXT}"),
        ([3, 257], "Prompt 1 holds ids that are not from 0 to 256"),
        ([], "Prompt 1 is empty"),
    ):
        with pytest.raises(UserError, match=words):
            generate(model, [[1], prompt])


# ---------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize("data", ["aé€😀\ufffd\n b".encode(), b"a\xf0\x9f\x98a\xff\xe2\x82"], ids=["text", "noise"])
def test_streamed_pieces_are_whole_characters_and_join_to_the_text(monkeypatch, data):
    """A character comes with the last of its tokens; bytes that are none become U+FFFD, at the latest at the end."""
    model, left, pieces = build(context_length=32), iter(data), []
    monkeypatch.setattr("lmcore.generate.sample_next", lambda *_: torch.tensor([next(left)]))
    config = GenerateConfig(max_new_tokens=len(data))
    (made,) = generate_text(model, BYTES, ["x"], config, stream=lambda _, piece: pieces.append(piece))
    assert "".join(pieces) == made.text == data.decode(errors="replace")
    if data[-1] == ord("b"):
        assert pieces == list(data.decode())


def test_generate_text_says_what_was_made_and_why_it_stopped():
    config, tokenizer, pieces = GenerateConfig(max_new_tokens=4), BYTES, []
    (ended,) = generate_text(always(EOT), tokenizer, ["hi"], config)
    assert (ended.prompt, ended.text, ended.ids, ended.stop) == ("hi", "", [], "end_of_text")
    (full,) = generate_text(always(65), tokenizer, ["hi"], config)
    assert (full.text, full.ids, full.stop) == ("AAAA", [65] * 4, "max_new_tokens")
    (continued,) = generate_text(always(EOT), tokenizer, [""], config, stop_at_end_of_text=False)
    assert (continued.text, continued.stop) == ("<|endoftext|>" * 4, "max_new_tokens")
    rows = generate_text(build(), tokenizer, ["é", ""], config, stream=lambda *piece: pieces.append(piece))
    assert [row.text for row in rows] == ["".join(piece for n, piece in pieces if n == row) for row in (0, 1)]


def test_padding_of_the_vocabulary_is_never_sampled():
    padded = always(299, vocab_size=300)
    assert generate(padded, [[1]], GenerateConfig(max_new_tokens=3)) == [[299] * 3]
    (row,) = generate_text(padded, BYTES, ["a"], GenerateConfig(max_new_tokens=30), stop_at_end_of_text=False)
    assert len(row.ids) == 30
    assert max(row.ids) <= EOT
    with pytest.raises(UserError, match="The tokenizer has 257 tokens, the model knows 200"):
        generate_text(build(vocab_size=200), BYTES, ["a"])


@pytest.mark.gpu
def test_on_a_gpu_as_on_the_cpu(model):
    config = GenerateConfig(max_new_tokens=40, seed=4, top_p=0.9)
    expected = generate(model, PROMPTS, config)
    on_gpu = build().cuda()
    assert generate(on_gpu, PROMPTS, config) == expected
    with autocast(torch.device("cuda"), "bf16"):
        assert [len(row) for row in generate(on_gpu, PROMPTS, config)] == [40] * len(PROMPTS)
