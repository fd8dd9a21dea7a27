"""Decoding: tokens per second of a batch of sequences, each token from the one before, greedily."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lmcore import accounting
from lmcore.config import model_config
from lmcore.model import TransformerLM

from .measuring import Absent, Built, Clock, Contestant, Plan, Race, captured, compiled
from .peers import llama
from .rows import Cell, Conditions, Row


def measure(cell: Cell, conditions: Conditions) -> list[Row]:
    """Times the continuation of a prompt; the share is that of reading all weights but the embeddings once a token.

    Reading the prompt is not in it; the rate of the whole call is in the notes.
    """
    s, bench = cell.settings, Bench(cell, conditions)
    counts = accounting.parameter_counts(bench.config)
    weights = 2 * (sum(counts.values()) - counts["token_embeddings"])
    ceiling = conditions.ceilings["copy_bytes_per_second"]
    race = Race(
        cell,
        conditions,
        [Contestant(name, bench.builders[name], name == OURS) for name in s["contestants"]],
        alone=False,
        amount=s["batch_size"] * s["new_tokens"],
        rate_unit="tok/s",
        share=lambda seconds: weights * s["new_tokens"] / seconds / ceiling,
        share_of="measured copy",
    )
    return agreeing(race.rows(), bench)


GENERATE, GRAPH, OURS = "HF generate, static cache", "HF static cache, compiled + CUDA graph", "lmcore fused"


class Bench:
    """One model in bf16 and its prompts."""

    def __init__(self, cell: Cell, conditions: Conditions):
        s = self.settings = cell.settings
        self.conditions, self.device = conditions, torch.device(conditions.device)
        self.config = model_config(s["size"], context_length=s["context_length"], vocab_size=s["vocab_size"])
        torch.manual_seed(1)
        self.prompts = torch.randint(s["vocab_size"], (s["batch_size"], s["prompt_tokens"]), device=self.device)
        self.builders = {GENERATE: self.hf_generate, GRAPH: self.hf_graph, OURS: self.fused}
        self.tokens: dict[str, Tensor] = {}
        """Continuations by contestant, (batch, new_tokens)."""

    def model(self) -> TransformerLM:
        """Our model with the weights that everyone decodes from, float32."""
        torch.manual_seed(0)
        return TransformerLM(self.config, device=self.device)

    def hf_generate(self) -> Built:
        """`generate` as documented for a static cache: it compiles its own decoding step. The prompt is timed too."""
        if self.device.type != "cuda" and not self.conditions.toy:
            raise Absent("The static cache is measured compiled for a GPU.")
        model = self._llama()
        settings = {"do_sample": False, "use_cache": True, "cache_implementation": "static", "pad_token_id": 0}
        mask = torch.ones_like(self.prompts)

        def run() -> Tensor:
            with torch.no_grad():
                tokens = model.generate(
                    self.prompts, attention_mask=mask, max_new_tokens=self.settings["new_tokens"], **settings
                )
            return tokens[:, self.prompts.shape[1] :]

        for _ in range(2):  # compiles, then records its graphs
            run()
        return self._built(GENERATE, None, run)

    def hf_graph(self) -> Built:
        """A loop of one's own around the same model and cache: a compiled greedy step in one CUDA graph."""
        model, new = self._llama(), self.settings["new_tokens"]
        from transformers import StaticCache

        cache = StaticCache(config=model.config, max_cache_len=self.prompts.shape[1] + new)
        forward = compiled(model, self.conditions)
        token = self.prompts[:, :1].clone()
        tokens = torch.empty(len(token), new, dtype=torch.long, device=self.device)

        @torch.no_grad()
        def step() -> None:
            logits = forward(input_ids=token, past_key_values=cache, use_cache=True).logits
            token.copy_(logits[:, -1].argmax(-1, keepdim=True))

        @torch.no_grad()
        def begin() -> None:
            cache.reset()
            logits = model(input_ids=self.prompts, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            token.copy_(logits[:, -1].argmax(-1, keepdim=True))

        begin()
        replay = step if self.conditions.toy else captured(step, self.device)[0]

        def run() -> Tensor:
            for place in range(new):
                tokens[:, place : place + 1] = token
                replay()
            return tokens

        return self._built(GRAPH, begin, run)

    def _llama(self) -> nn.Module:
        torch.set_float32_matmul_precision("high")
        return llama(self.model(), torch.bfloat16, use_cache=True).eval()

    def fused(self) -> Built:
        from lmcore.fused.decoder import FusedDecoder

        s, prompts = self.settings, self.prompts.tolist()
        rows, slots = range(s["batch_size"]), s["prompt_tokens"] + s["new_tokens"]
        decoder = FusedDecoder(self.model(), len(rows), slots, torch.bfloat16)
        return self._built(OURS, lambda: decoder.place(rows, prompts), lambda: decoder.decode(s["new_tokens"]).T)

    def _built(self, name: str, begin: Callable[[], Any] | None, run: Callable[[], Tensor]) -> Built:
        built = Built(run, reset=begin)
        built.call()  # whatever is made once
        if begin is not None:
            begin()
        self.tokens[name] = run().clone()
        clock = Clock(self.device, alone=False)
        seconds = statistics.median(clock(Built(built.call), Plan(1, 0, 0)) for _ in range(3))
        tokens = self.settings["batch_size"] * self.settings["new_tokens"]
        built.notes["tokens_per_second_with_prompt"] = round(tokens / seconds, 1)
        return built


def agreeing(rows: list[Row], bench: Bench) -> list[Row]:
    """The rows, with the share of tokens before the first on which a sequence differs from the first contestant's.

    All round in bf16, each in its own places: where two tokens are about as likely, one may take the other.
    """
    first = next(iter(bench.tokens.values()), None)
    for row in rows:
        if row.contestant in bench.tokens:
            same = (bench.tokens[row.contestant].to(first.device) == first).long().cumprod(dim=1)
            row.notes["share_of_tokens_before_a_difference"] = round(same.float().mean().item(), 4)
    return rows
