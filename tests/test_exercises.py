"""Exercises: solutions pass, usual mistakes are named, and what would be the answer itself gets no credit."""

import csv
import functools
import math
import re
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import lmcore.functional
from lmcore.errors import UserError
from lmcore.files import read_json
from lmcore.model import RMSNorm, RotaryPositionalEmbedding
from lmcore.tokenizer.train import merge_pretokens
from workbook.exercises import checking as checks
from workbook.exercises import ranks
from workbook.exercises.checking import judge
from workbook.exercises.exercise import EXERCISES, difference, slipped

PROJECT = Path(__file__).parents[1]
MISTAKES = [(name, words) for name, exercise in EXERCISES.items() for words in exercise.mistakes]
ACCOUNTING = {
    "transformer_accounting": "xl_parameters xl_weight_gb xl_flops",
    "adamw_accounting": "xl_state_gb xl_activations_gb xl_batch adamw_flops xl_training_hours",
    "adamwAccounting": "ungated_batch ungated_training_days",
    "memory_profiling": "residual_mib",
    "communication_accounting": "xxl_state_gb xxl_token_mb xxl_devices xxl_tokens_per_device",
    "optimizer_state_sharding_accounting": "zero1_bytes",
    "fsdp_accounting": "fsdp_bytes",
    "data_parallel_calcs": "data_parallel_calcs",
    "fsdp_calcs": "fsdp_calcs",
    "tp_calcs": "tp_calcs",
    "fsdp_tp_calcs": "fsdp_tp_calcs",
}
CODED = {
    "positionwise_feedforward": "swiglu",
    "scaled_dot_product_attention": "attention",
    "multihead_self_attention": "split_heads attention_layer",
    "transformer_lm": "language_model",
    "adamw": "adamw_step",
    "learning_rate_schedule": "cosine_schedule",
    "gradient_clipping": "clip_gradients",
    "data_loading": "windows",
    "checkpointing": "checkpoint",
    "training_together": "train_loop",
    "decoding": "temperature top_p draw greedy",
    "tokenizer": "encode_word decode tokenizer",
    "flash_forward": "online_softmax flash_forward triton_flash_forward",
    "naive_ddp": "average_gradients ddp",
    "ddp_overlap_individual_parameters": "overlapped_ddp",
    "ddp_overlap_bucketed": "buckets",
    "optimizer_state_sharding": "zero1_step",
    "fsdp": "shard fsdp_gather",
    "alternate_ring_all_reduce": "ring_all_reduce",
}
STUDIES = {"experiment_log"}
"""Coded, but by a run folder, not by a function."""


@pytest.fixture(autouse=True)
def progress(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "progress_file", tmp_path / "exercises.json")


def stub(*_):
    raise NotImplementedError


@pytest.mark.parametrize("name", EXERCISES)
def test_the_answer_is_right_and_a_stub_is_not(name):
    exercise = EXERCISES[name]
    assert judge(exercise, exercise.answer, guarded=False).passed
    empty = {tuple: (stub, stub), int: ..., float: ..., dict: ...}.get(type(exercise.answer), stub)
    verdict = judge(exercise, empty)
    assert (verdict.passed, "yet" in verdict.words) == (False, True)
    assert len(exercise.mistakes) >= 2


@pytest.mark.parametrize(("name", "words"), MISTAKES)
def test_a_usual_mistake_is_named(name, words):
    verdict = judge(EXERCISES[name], EXERCISES[name].mistakes[words], guarded=False)
    assert (verdict.passed, verdict.words) == (False, words)


def test_every_problem_of_the_courses_has_an_exercise():
    with (PROJECT / "workbook/report/problems.csv").open(encoding="utf-8") as file:
        problems = [row for row in csv.DictReader(file) if row["handout"].startswith(("CSE599-O A1", "CS336"))]
    coded = {row["problem"] for row in problems if row["tests"]} - STUDIES
    asked = {row["problem"] for row in problems if re.search("ccounting|_calcs", row["problem"])} | {"memory_profiling"}
    exercises = {name: CODED.get(name, name) for name in coded} | {name: ACCOUNTING[name] for name in asked}
    missing = {name: words for name, words in exercises.items() if not set(words.split()) <= EXERCISES.keys()}
    assert not missing
    assert len(EXERCISES) >= 66


def test_a_slip_in_a_text_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="'nothing of it' stands 0 times in softmax"):
        slipped(lmcore.functional.softmax, ["nothing of it => x"])


def the_librarys_norm(x, gain, eps):
    norm = RMSNorm(x.shape[-1], eps)
    norm.weight.data = gain
    return norm(x)


def slow_softmax(x, dim):
    time.sleep(0.001)
    x = x - x.max(dim, keepdim=True).values
    return torch.exp(x) / torch.exp(x).sum(dim, keepdim=True)


def slow_attention(q, k, v, mask=None):
    rows = []
    for i in range(q.shape[-2]):
        scores = (k * q[..., i : i + 1, :]).sum(-1) / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~(mask[i] if mask.ndim > 1 else mask), -math.inf)
        rows.append((slow_softmax(scores, -1)[..., None] * v).sum(-2))
    return torch.stack(rows, -2)


def slow_ddp(model, backward):
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.distributed.broadcast(flat, 0)
    nn.utils.vector_to_parameters(flat, model.parameters())
    backward()
    gradients = [torch.zeros_like(flat) for _ in range(2)]
    torch.distributed.all_gather(gradients, torch.cat([p.grad.flatten() for p in model.parameters()]))
    for p, part in zip(model.parameters(), torch.stack(gradients).mean(0).split([12, 4, 4, 1]), strict=True):
        p.grad = part.view_as(p)


def slow_cross_entropy(logits, targets):
    shifted = logits - logits.max()
    log_p = shifted - torch.log(torch.exp(shifted).sum(-1, keepdim=True))
    losses = [-row[target] for row, target in zip(log_p.flatten(0, -2), targets.flatten(), strict=True)]
    return sum(losses) / len(losses)


RIGHT = {
    "softmax": slow_softmax,
    "attention": slow_attention,
    "cross_entropy": slow_cross_entropy,
    "rmsnorm": lambda x, gain, eps: (x.double() * (x.double().pow(2).mean(-1, True) + eps).rsqrt() * gain).to(x.dtype),
    "linear": lambda x, weight: torch.stack([(x * row).sum(-1) for row in weight], -1),
    "merge_pair": lambda word, pair: merge_from(word, pair, 0),
    "ddp": slow_ddp,
}
LIBRARY = {
    "rmsnorm": the_librarys_norm,
    "rope": lambda x, positions, theta: RotaryPositionalEmbedding(theta, x.shape[-1], 100_001)(x, positions),
    "train_bpe": lambda counts, num_merges: merge_pretokens(Counter(counts), num_merges)[1],
}


def merge_from(word, pair, at):
    if at >= len(word):
        return ()
    joined = word[at : at + 2] == pair
    return ((b"".join(pair) if joined else word[at]), *merge_from(word, pair, at + 1 + joined))


@pytest.mark.parametrize("name", RIGHT)
def test_another_right_solution_passes_however_slow(name):
    assert judge(EXERCISES[name], RIGHT[name]).words.startswith("right in ")


@pytest.mark.parametrize("name", LIBRARY)
def test_a_chapters_answer_is_the_librarys(name):
    assert judge(EXERCISES[name], LIBRARY[name], guarded=False).passed


def endless(x, dim):
    while True:
        try:
            x = x + 0
        except Exception:
            continue


def in_a_thread(x, dim):
    results = []
    thread = threading.Thread(target=lambda: results.append(torch.softmax(x, dim)))
    thread.start()
    thread.join()
    return results[0]


def swallowed(x, dim):
    try:
        return x.softmax(dim)
    except BaseException:
        return torch.softmax(x, dim)


def unwatched(x, dim):
    sys.setprofile(None)
    return torch.softmax(x, dim)


def threads_unwatched(x, dim):
    threading.setprofile(None)
    return in_a_thread(x, dim)


REFUSED = {
    "lmcore": ("calls lmcore", lambda x, dim: lmcore.functional.softmax(x, dim)),
    "later": ("calls lmcore", lambda x, dim: EXERCISES["temperature"].answer(x, 1.0)),
    "alias": ("calls softmax of a library", lambda x, dim, borrowed=torch.softmax: borrowed(x, dim)),
    "functional": ("calls softmax of a library", lambda x, dim: nn.functional.softmax(x, dim)),
    "method": ("calls softmax of a library", lambda x, dim: x.softmax(dim)),
    "class": ("calls Softmax of a library", lambda x, dim: nn.Softmax(dim)(x)),
    "special": ("calls special_softmax of a library", lambda x, dim: torch.special.softmax(x, dim)),
    "operator": ("calls softmax.* of a library", lambda x, dim: torch.ops.aten.softmax.int(x, dim)),
    "partial": ("calls softmax of a library", lambda x, dim: functools.partial(torch.softmax, dim=dim)(x)),
    "map": ("calls softmax of a library", lambda x, dim: next(map(torch.softmax, [x], [dim]))),
    "swallowed": ("calls softmax of a library", swallowed),
    "unwatched": ("calls setprofile", unwatched),
    "threads unwatched": ("calls setprofile", threads_unwatched),
    "endless": ("took longer than 1 s", endless),
    "error": ("raises KeyError", lambda x, dim: {}[dim]),
    "shape": (r"has the shape \(\), not \(2, 3\)", lambda x, dim: x.sum()),
    "dtype": ("is float64, not float32", lambda x, dim: slow_softmax(x.double(), dim)),
    "list": ("is a list, not a tensor", lambda x, dim: x.tolist()),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_solutions_get_a_sentence(case):
    words, solution = REFUSED[case]
    verdict = judge(replace(EXERCISES["softmax"], seconds=1.0), solution)
    assert not verdict.passed
    assert re.search(words, verdict.words)
    assert sys.getprofile() is None


def test_a_thread_is_watched(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda *_: None)
    assert "calls softmax of a library" in judge(EXERCISES["softmax"], in_a_thread).words


def test_what_an_earlier_check_gave_back_may_be_called():
    attention = EXERCISES["attention"]

    def with_the_librarys_softmax(q, k, v, mask=None):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        return lmcore.functional.softmax(scores if mask is None else scores.masked_fill(~mask, -math.inf), -1) @ v

    def with_both(q, k, v, mask=None):
        return with_the_librarys_softmax(q, k, v, mask) + 0 * torch.softmax(v, -1)

    assert judge(attention, with_the_librarys_softmax).passed
    assert "calls softmax of a library" in judge(attention, with_both).words
    assert "write your own" in judge(attention, attention.answer).words


def test_ranks_are_guarded_too():
    def wrapped(model, backward):
        nn.parallel.DistributedDataParallel(model)

    assert "calls DistributedDataParallel of a library" in judge(EXERCISES["ddp"], wrapped).words


def test_without_triton_a_sentence_says_so(monkeypatch):
    monkeypatch.setattr(ranks, "find_spec", lambda name: None)
    verdict = judge(EXERCISES["triton_flash_forward"], lambda *_: None)
    assert "Triton is not installed" in verdict.words


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


def test_own_beside_theirs():
    beside = checks.compare("softmax", slow_softmax, torch.softmax)
    assert list(beside.index) == ["yours", "lmcore", "PyTorch"]
    assert beside.loc["yours", "seconds"] > 0.003 > beside.loc["PyTorch", "seconds"]
    assert (beside["error"] < 1e-2).all()  # of bfloat16
    assert beside.loc["PyTorch", "bytes"] < beside.loc["yours", "bytes"]


def test_a_guess_is_shown_beside_what_was_measured(capsys):
    checks.predict("share", 0.5)
    checks.reveal("share", 0.2)
    checks.reveal("unasked", 3.0)
    said = ["share: you expect 0.5.", "share: 0.2; you expected 0.5, 2.5 times too much.", "unasked: 3."]
    assert capsys.readouterr().out.splitlines() == said


def test_numbers_compare_within_the_tolerance():
    assert difference({"a": [1.0, math.nan]}, {"a": [1.0 + 1e-7, math.nan]}, 1e-5) is None
    assert difference({"a": [1.0, 2.0]}, {"a": [1.0, 3.0]}, 1e-5) == "a: Item 1: The result is 2, not 3."
    assert difference([1], [1, 2], 1e-5) == "The result has 1 items, not 2."
