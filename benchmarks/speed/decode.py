"""Decoding: tokens per second of a batch of sequences, each token from the one before, greedily."""

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from lmcore import accounting
from lmcore.config import model_config
from lmcore.model import TransformerLM

from .measuring import Absent, Built, Clock, Contestant, Plan, Race
from .peers import llama
from .rows import Cell, Conditions, Row


def measure(cell: Cell, conditions: Conditions) -> list[Row]:
    """Times prompt and continuation; the share is that of reading all weights but the embeddings once a token."""
    s, bench = cell.settings, Bench(cell, conditions)
    counts = accounting.parameter_counts(bench.config)
    weights = 2 * (sum(counts.values()) - counts["token_embeddings"])
    ceiling = conditions.ceilings["copy_bytes_per_second"]
    race = Race(
        cell,
        conditions,
        [Contestant(HF, bench.hugging_face), Contestant(OURS, bench.fused, ours=True)],
        alone=False,
        amount=s["batch_size"] * s["new_tokens"],
        rate_unit="tok/s",
        share=lambda seconds: weights * s["new_tokens"] / seconds / ceiling,
        share_of="measured copy",
    )
    return agreeing(race.rows(), bench)


HF, OURS = "HF generate, static cache", "lmcore fused"


class Bench:
    """One model in bf16 and its prompts."""

    def __init__(self, cell: Cell, conditions: Conditions):
        s = self.settings = cell.settings
        self.conditions, self.device = conditions, torch.device(conditions.device)
        self.config = model_config(s["size"], context_length=s["context_length"], vocab_size=s["vocab_size"])
        torch.manual_seed(1)
        self.prompts = torch.randint(s["vocab_size"], (s["batch_size"], s["prompt_tokens"]), device=self.device)
        self.tokens: dict[str, Tensor] = {}
        """Continuations by contestant, (batch, new_tokens)."""

    def model(self) -> TransformerLM:
        """Our model with the weights that everyone decodes from, float32."""
        torch.manual_seed(0)
        return TransformerLM(self.config, device=self.device)

    def hugging_face(self) -> Built:
        if self.device.type != "cuda" and not self.conditions.toy:
            raise Absent("The static cache is measured compiled for a GPU.")
        model = llama(self.model(), torch.bfloat16, use_cache=True).eval()
        settings = {"do_sample": False, "use_cache": True, "cache_implementation": "static", "pad_token_id": 0}
        mask = torch.ones_like(self.prompts)

        def run() -> Tensor:
            new = self.settings["new_tokens"]
            with torch.no_grad():
                return model.generate(
                    self.prompts, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, **settings
                )

        for _ in range(3):  # compiles, then records its graphs
            tokens = run()
        self.tokens[HF] = tokens[:, self.prompts.shape[1] :].clone()
        return Built(run)

    def fused(self) -> Built:
        from lmcore.fused.decoder import FusedDecoder

        s, prompts = self.settings, self.prompts.tolist()
        rows, slots = range(s["batch_size"]), s["prompt_tokens"] + s["new_tokens"]
        decoder = FusedDecoder(self.model(), len(rows), slots, torch.bfloat16)

        def run(new_tokens: int = s["new_tokens"]) -> Tensor:
            decoder.place(rows, prompts)
            return decoder.decode(new_tokens)

        self.tokens[OURS] = run().T.clone()
        return Built(run, notes={"milliseconds_per_token": self._alone(run)})

    def _alone(self, run: Callable[[int], Tensor]) -> float | None:
        """Milliseconds that one more token takes, the prompt left out: from a short and a whole continuation."""
        clock, whole = Clock(self.device, alone=False), self.settings["new_tokens"]
        short = max(1, whole // 4)
        for tokens in (short, whole):  # whatever is made once
            run(tokens)
        seconds = [
            statistics.median(clock(Built(lambda n=n: run(n)), Plan(1, 0, 0)) for _ in range(3)) for n in (short, whole)
        ]
        return round((seconds[1] - seconds[0]) / (whole - short) * 1e3, 5)


def agreeing(rows: list[Row], bench: Bench) -> list[Row]:
    """The rows, with the share of tokens before the first on which a sequence differs from Hugging Face's noted.

    Both round in bf16, each in its own places: where two tokens are about as likely, one may take the other.
    """
    theirs = bench.tokens.get(HF)
    for row in rows:
        tokens = bench.tokens.get(row.contestant)
        if theirs is not None and tokens is not None and row.contestant != HF:
            same = (tokens.to(theirs.device) == theirs).long().cumprod(dim=1)
            row.notes["share_of_tokens_before_a_difference"] = round(same.float().mean().item(), 4)
    return rows
