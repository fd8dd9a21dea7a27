"""Exercises: solutions pass, usual mistakes are named, and what would be the answer itself gets no credit."""

import csv
import functools
import math
import re
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import lmcore.functional
from lmcore.errors import UserError
from lmcore.files import read_json
from lmcore.model import RMSNorm, RotaryPositionalEmbedding
from lmcore.tokenizer.bpe import Tokenizer
from lmcore.tokenizer.train import merge_pretokens
from workbook.exercises import checking as checks
from workbook.exercises import ranks
from workbook.exercises.checking import judge
from workbook.exercises.exercise import EXERCISES, difference, slipped
from workbook.exercises.solutions import FILE, solutions

ROOT = Path(__file__).parents[1]
PROBLEMS = ROOT / "workbook" / "report" / "problems.csv"
OF_PROBLEMS = {
    "positionwise_feedforward": "swiglu",
    "scaled_dot_product_attention": "attention",
    "multihead_self_attention": "split_heads attention_layer",
    "transformer_lm": "language_model",
    "transformer_accounting": "xl_parameters xl_weight_gb xl_flops",
    "adamw": "adamw_step",
    "adamw_accounting": "xl_state_gb xl_activations_gb xl_batch adamw_flops xl_training_hours",
    "adamwAccounting": "short_list_batch xl_training_days",
    "learning_rate_schedule": "cosine_schedule",
    "gradient_clipping": "clip_gradients",
    "data_loading": "windows number_of_windows",
    "checkpointing": "checkpoint",
    "training_together": "train_loop",
    "decoding": "temperature top_p draw greedy",
    "tokenizer": "encode_word decode tokenizer",
    "memory_profiling": "residual_mib",
    "flash_forward": "online_softmax flash_forward triton_flash_forward",
    "naive_ddp": "average_gradients ddp",
    "ddp_overlap_individual_parameters": "overlapped_ddp",
    "ddp_overlap_bucketed": "buckets",
    "communication_accounting": "xxl_state_gb xxl_token_mb xxl_devices xxl_tokens_per_device",
    "optimizer_state_sharding": "zero1_step",
    "optimizer_state_sharding_accounting": "zero1_bytes",
    "fsdp": "shard fsdp_gather",
    "fsdp_accounting": "fsdp_bytes",
    "alternate_ring_all_reduce": "ring_all_reduce",
}
"""The exercises of problems that have others than one of their name. experiment_log has none: it is a run folder."""


@pytest.fixture(autouse=True)
def progress(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "progress_file", tmp_path / "exercises.json")


def stub(*_):
    raise NotImplementedError


@pytest.mark.parametrize("name", EXERCISES)
def test_the_answer_is_right_a_stub_is_not_and_usual_mistakes_are_named(name):
    exercise = EXERCISES[name]
    assert judge(exercise, exercise.answer, guarded=False).passed
    empty = {tuple: (stub, stub), int: ..., float: ..., dict: ...}.get(type(exercise.answer), stub)
    assert re.fullmatch("not (written|answered) yet.", judge(exercise, empty).words)
    assert len(exercise.mistakes) >= 2
    assert {words: judge(exercise, wrong, guarded=False).words for words, wrong in exercise.mistakes.items()} == {
        words: words for words in exercise.mistakes
    }


def test_every_problem_of_the_courses_has_an_exercise():
    with PROBLEMS.open(encoding="utf-8") as file:
        problems = [row for row in csv.DictReader(file) if row["handout"].startswith(("CSE599-O A1", "CS336"))]
    asked = {row["problem"] for row in problems if row["tests"] or re.search("ccounting|_calcs", row["problem"])}
    asked = asked - {"experiment_log"} | {"memory_profiling", "alternate_ring_all_reduce"}
    assert {name for problem in asked for name in OF_PROBLEMS.get(problem, problem).split()} <= EXERCISES.keys()
    assert OF_PROBLEMS.keys() <= asked
    assert len(EXERCISES) >= 66


def test_the_notebooks_solutions_are_the_answers():
    assert read_json(FILE) == solutions(ROOT / "notebooks"), "run `python -m workbook.exercises.solutions`"
    linear, own = EXERCISES["linear"], {}
    exec(linear.source, own)  # word for word the answer, but the reader's own
    assert own["linear"].__code__ == linear.answer.__code__
    assert judge(linear, own["linear"]).passed


def test_a_slip_in_a_text_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="'nothing of it' stands 0 times"):
        slipped("return softmax", ["nothing of it => x"])


def slow_softmax(x, dim):
    time.sleep(0.001)
    x = x - x.max(dim, keepdim=True).values
    return torch.exp(x) / torch.exp(x).sum(dim, keepdim=True)


def slow_attention(q, k, v, mask=None):
    scores = torch.stack([(k * query[..., None, :]).sum(-1) for query in q.unbind(-2)], -2) / q.shape[-1] ** 0.5
    p = slow_softmax(scores if mask is None else scores.masked_fill(~mask, -math.inf), -1)
    return torch.stack([(row[..., None] * v).sum(-2) for row in p.unbind(-2)], -2)


def slow_cross_entropy(logits, targets):
    shifted = logits - logits.max()
    log_p = shifted - torch.log(torch.exp(shifted).sum(-1, keepdim=True))
    losses = [-row[target] for row, target in zip(log_p.flatten(0, -2), targets.flatten(), strict=True)]
    return sum(losses) / len(losses)


def librarys_rmsnorm(x, gain, eps):
    norm = RMSNorm(x.shape[-1], eps)
    norm.weight.data = gain
    return norm(x)


RIGHT = {
    "softmax": slow_softmax,
    "attention": slow_attention,
    "cross_entropy": slow_cross_entropy,
    "linear": lambda x, weight: torch.stack([(x * row).sum(-1) for row in weight], -1),
    "rmsnorm": librarys_rmsnorm,
    "rope": lambda x, positions, theta: RotaryPositionalEmbedding(theta, x.shape[-1], 100_001)(x, positions),
    "train_bpe": lambda counts, num_merges: merge_pretokens(Counter(counts), num_merges)[1],
}


@pytest.mark.parametrize("name", RIGHT)
def test_another_right_solution_passes_however_slow(name):
    assert judge(EXERCISES[name], RIGHT[name], guarded=RIGHT[name].__name__.startswith("slow")).passed


def endless(x, dim):
    while True:
        try:
            x = x + 0
        except Exception:
            continue


def swallowed(x, dim):
    try:
        return x.softmax(dim)
    except BaseException:
        return torch.softmax(x, dim)


def unwatched(x, dim, switch=sys.setprofile):
    switch(None)
    return torch.softmax(x, dim)


def in_a_thread(x, dim):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: torch.softmax(x, dim)).result()


REFUSED = [
    ("calls lmcore", lambda x, dim: lmcore.functional.softmax(x, dim)),
    ("calls lmcore", lambda x, dim: EXERCISES["temperature"].answer(x, 1.0)),
    ("This is the library's", functools.partial(lmcore.functional.softmax)),
    ("calls softmax of a library", lambda x, dim, borrowed=torch.softmax: borrowed(x, dim)),
    ("calls softmax of a library", lambda x, dim: nn.functional.softmax(x, dim)),
    ("calls softmax of a library", lambda x, dim: x.softmax(dim)),
    ("calls Softmax of a library", lambda x, dim: nn.Softmax(dim)(x)),
    ("calls special_softmax of a library", lambda x, dim: torch.special.softmax(x, dim)),
    ("calls softmax.* of a library", lambda x, dim: torch.ops.aten.softmax.int(x, dim)),
    ("calls softmax of a library", lambda x, dim: functools.partial(torch.softmax, dim=dim)(x)),
    ("calls softmax of a library", lambda x, dim: next(map(torch.softmax, [x], [dim]))),
    ("calls softmax of a library", swallowed),
    ("calls softmax of a library", in_a_thread),
    ("calls setprofile", unwatched),
    ("calls setprofile", functools.partial(unwatched, switch=threading.setprofile)),
    ("took longer than 1 s", endless),
    ("raises KeyError", lambda x, dim: {}[dim]),
    (r"has the shape \(\), not \(2, 3\)", lambda x, dim: x.sum()),
    ("is float64, not float32", lambda x, dim: slow_softmax(x.double(), dim)),
    ("is a list, not a tensor", lambda x, dim: x.tolist()),
    ("returns None: is a `return` missing", lambda x, dim: None),
]


@pytest.mark.parametrize(("words", "solution"), REFUSED)
def test_other_solutions_get_a_sentence(words, solution):
    verdict = judge(replace(EXERCISES["softmax"], seconds=1.0), solution)
    assert not verdict.passed
    assert re.search(words, verdict.words)
    assert sys.getprofile() is None


def test_what_an_earlier_check_gave_back_may_be_called():
    def with_the_librarys_softmax(q, k, v, mask=None, more=lambda v: 0):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores if mask is None else scores.masked_fill(~mask, -math.inf)
        return lmcore.functional.softmax(scores, -1) @ v + more(v)

    attention = EXERCISES["attention"]
    assert judge(attention, with_the_librarys_softmax).passed
    with_both = functools.partial(with_the_librarys_softmax, more=lambda v: torch.softmax(v, -1))
    assert "calls softmax of a library" in judge(attention, with_both).words
    assert "This is the library's" in judge(EXERCISES["tokenizer"], type("Mine", (Tokenizer,), {})).words


def test_two_processes_are_guarded_and_without_triton_a_sentence_says_so(monkeypatch):
    verdict = judge(EXERCISES["ddp"], lambda model, backward: nn.parallel.DistributedDataParallel(model))
    assert "calls DistributedDataParallel of a library" in verdict.words
    monkeypatch.setattr(ranks, "find_spec", lambda name: None)
    fresh = replace(EXERCISES["triton_flash_forward"])
    assert "Triton is not installed" in judge(fresh, lambda *_: None).words


def test_a_check_gives_back_what_the_notebook_goes_on_with(capsys):
    before = torch.random.get_rng_state()
    assert checks.check("softmax", slow_softmax) is slow_softmax
    assert checks.check("softmax", torch.exp) is EXERCISES["softmax"].answer
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "✓ softmax: right in 3 cases."
    assert said[1].startswith("✗ softmax: ")
    assert said[1].endswith("What follows uses the library's.")
    assert checks.status().loc["01_build", "solved"].startswith("0 of ")  # the last word counts
    checks.check("softmax", slow_softmax)
    assert checks.status().loc["01_build", "solved"].startswith("1 of ")
    assert list(checks.status().index) == sorted({exercise.notebook for exercise in EXERCISES.values()})
    assert torch.equal(torch.random.get_rng_state(), before)
    with pytest.raises(UserError, match="There is no exercise 'sofmax'"):
        checks.check("sofmax", slow_softmax)


def test_notebooks_that_run_at_once_lose_nothing():
    threads = [threading.Thread(target=checks.keep, args=(str(name),), kwargs={"solved": True}) for name in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_json(checks.progress_file) == {str(name): {"solved": True} for name in range(20)}


def test_a_guess_is_shown_beside_what_was_measured(capsys):
    checks.predict("share", 0.5)
    checks.reveal("share", 0.2)
    checks.predict("time", 5.0)
    checks.reveal("time", 2.0)
    checks.reveal("unasked", 3.0)
    said = ["share: 0.2; you expected 0.5, 0.3 away.", "time: 2; you expected 5, 2.5 times too much.", "unasked: 3."]
    assert [line for line in capsys.readouterr().out.splitlines() if "expect " not in line] == said


def test_numbers_compare_within_the_tolerance():
    assert difference(torch.tensor(1.5, dtype=torch.bfloat16, requires_grad=True), 1.5, 1e-5) is None
    assert difference({"a": [1.0, math.nan]}, {"a": [1.0 + 1e-7, math.nan]}, 1e-5) is None
    assert difference({"a": [1.0, 2.0]}, {"a": [1.0, 3.0]}, 1e-5) == "a: Item 1: The result is 2, not 3."
    assert difference([1], [1, 2], 1e-5) == "The result has 1 items, not 2."
