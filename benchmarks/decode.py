"""Decoding: tokens per second of a batch of sequences, each token from the one before, greedily."""

import statistics
from collections.abc import Callable
from functools import partial
from timeit import default_timer
from typing import Any

import torch
from benchmark_cases import GENERATE, GRAPH, OURS, BenchmarkCase, Conditions, Contestant, Rows, timed_rows
from peers import llama
from steps import captured
from torch import Tensor, nn

from lmcore.accounting import parameter_counts
from lmcore.config import model_config
from lmcore.fast.decoder import FusedDecoder
from lmcore.model import TransformerLM


class Bench:
    """One model in bf16 and its prompts."""

    def __init__(self, case: BenchmarkCase, conditions: Conditions):
        s, self.conditions, self.device = case.settings, conditions, torch.device(conditions.device)
        self.new = s["new_tokens"]
        self.config = model_config(s["size"], context_length=s["context_length"], vocab_size=s["vocab_size"])
        torch.manual_seed(1)
        self.prompts = torch.randint(s["vocab_size"], (s["batch_size"], s["prompt_tokens"]), device=self.device)
        self.tokens: dict[str, Tensor] = {}
        """Continuations by contestant, (batch, new_tokens)."""

    def build(self, name: str) -> Contestant:
        """The contestant, after a first continuation; the rate with the prompt is noted."""
        built = BUILDERS[name](self)
        built.call()  # whatever is made once
        self.tokens[name] = built.call().clone()
        seconds = []
        for _ in range(3):
            began = default_timer()
            built.call().cpu()
            seconds.append(default_timer() - began)
        rate = len(self.prompts) * self.new / statistics.median(seconds)
        built.notes["tokens_per_second_with_prompt"] = round(rate, 1)
        return built

    def model(self) -> TransformerLM:
        """Our model with the weights that everyone decodes from, float32."""
        torch.manual_seed(0)
        return TransformerLM(self.config, device=self.device)

    def llama(self) -> nn.Module:
        """Hugging Face's model with them."""
        torch.set_float32_matmul_precision("high")
        return llama(self.model(), torch.bfloat16, use_cache=True).eval()

    def hf_generate(self) -> Contestant:
        """`generate` as documented for a static cache: it compiles its own decoding step. The prompt is timed too."""
        model, mask = self.llama(), torch.ones_like(self.prompts)
        settings = {"do_sample": False, "use_cache": True, "cache_implementation": "static", "pad_token_id": 0}

        @torch.no_grad()
        def run() -> Tensor:
            tokens = model.generate(self.prompts, attention_mask=mask, max_new_tokens=self.new, **settings)
            return tokens[:, self.prompts.shape[1] :]

        run()  # compiles; the next call records its graphs
        return Contestant(run)

    def hf_graph(self) -> Contestant:
        """A loop of one's own around the same model and cache: a compiled greedy step in one CUDA graph."""
        model = self.llama()
        from transformers import StaticCache

        cache = StaticCache(config=model.config, max_cache_len=self.prompts.shape[1] + self.new)
        forward = self.conditions.compiled(model)
        token = self.prompts[:, :1].clone()
        tokens = torch.empty(len(token), self.new, dtype=torch.long, device=self.device)

        @torch.no_grad()
        def step(forward: Callable = forward, inputs: Tensor = token, **settings: Any) -> None:
            logits = forward(input_ids=inputs, past_key_values=cache, use_cache=True, **settings).logits
            token.copy_(logits[:, -1].argmax(-1, keepdim=True))

        def begin() -> None:
            cache.reset()
            step(model, self.prompts, logits_to_keep=1)

        begin()
        replay = step if self.conditions.toy else captured(step, self.device)[0]

        def run() -> Tensor:
            for place in range(self.new):
                tokens[:, place : place + 1] = token
                replay()
            return tokens

        return Contestant(run, reset=begin)

    def fused(self) -> Contestant:
        """Our decoder."""
        prompts, rows = self.prompts.tolist(), range(len(self.prompts))
        decoder = FusedDecoder(self.model(), len(rows), self.prompts.shape[1] + self.new, torch.bfloat16)
        return Contestant(lambda: decoder.decode(self.new).T, reset=lambda: decoder.place(rows, prompts))


BUILDERS = {GENERATE: Bench.hf_generate, GRAPH: Bench.hf_graph, OURS: Bench.fused}


def measure(case: BenchmarkCase, conditions: Conditions) -> Rows:
    """The continuation of a prompt; the share is that of reading all weights but the embeddings once a token.

    Reading the prompt is not in it; the rate of the whole call is in the notes, and so is the share of tokens before
    the first on which a sequence differs from the first contestant's. All round in bf16, each in its own places: where
    two tokens are about as likely, one may take the other.
    """
    s, bench = case.settings, Bench(case, conditions)
    counts = parameter_counts(bench.config)
    weights = 2 * (sum(counts.values()) - counts["token_embeddings"])
    builders = {name: partial(bench.build, name) for name in s["contestants"]}
    ideal = weights * bench.new / conditions.peak_rates["copy_bytes_per_second"]
    amount = s["batch_size"] * bench.new
    rows = timed_rows(case, conditions, builders, amount, "tok/s", ideal, "measured copy", alone=False)
    first = next(iter(bench.tokens.values()), None)
    for row in rows:
        if row["contestant"] in bench.tokens:
            same = (bench.tokens[row["contestant"]].to(first.device) == first).long().cumprod(dim=1)
            row["notes"]["share_of_tokens_before_a_difference"] = round(same.float().mean().item(), 4)
    return rows
