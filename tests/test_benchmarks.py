"""benchmarks/: who is compared and how, which target is reached, and the commands at toy sizes."""

import json
import os
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest
import torch
from parallel_runs import free_port

from lmcore.config import model_config
from lmcore.errors import UserError
from lmcore.model import TransformerLM
from lmcore.profiling.timing import Timer
from lmcore.tokenizer import Tokenizer, train_bpe

PROJECT = Path(__file__).parents[1]
RECORD = PROJECT / "results" / "h200" / "speed.json"
RECORDED = json.loads(RECORD.read_text())
sys.path[:0] = [str(PROJECT / "benchmarks"), str(PROJECT / "results")]

import benchmark_cases  # noqa: E402
import kernel_peers  # noqa: E402
import parallel  # noqa: E402
import tokenization  # noqa: E402
from benchmark_cases import OURS, Absent, BenchmarkCase, Conditions, Contestant, blank_row, in_turns, timed_rows  # noqa: E402
from peers import llama, packed  # noqa: E402
from speed import main  # noqa: E402
from tables import fastest, judged, rows_table  # noqa: E402

TOY = Conditions("cpu", True, 0.01, {"copy_bytes_per_second": 1e10, "bf16_flops_per_second": 1e11})
CASE = BenchmarkCase("work", "group", "some work", "", {})


def test_calls_take_turns_each_after_its_reset():
    calls = []
    contestants = {"a": (lambda: calls.append("a"), None), "b": (lambda: calls.append("b"), lambda: calls.append("-"))}
    taken = in_turns(Timer(torch.device("cpu")), contestants, 0.01, least=7)
    assert len(taken["a"]) == len(taken["b"]) >= 7
    timed = "".join(calls)[-3 * len(taken["a"]) :]
    assert timed[:6] in ("a-b-ba", "-baa-b")  # each round in the other order
    in_turns(Timer(torch.device("cpu")), contestants, 0.01, least=7, alone=False)
    assert "bb" not in "".join(calls)
    assert "aaa" in "".join(calls)  # what needs no reset runs back to back


def row(contestant: str, median: float | None, **fields) -> dict:
    """A row as it is in the file."""
    times = dict.fromkeys(("median", "low", "high"), median)
    return blank_row(CASE, contestant, "absent" if median is None else "complete", None) | times | fields


def ending(error: Exception):
    def build() -> Contestant:
        raise error

    return build


def test_rates_and_shares_are_those_of_the_median_and_every_end_is_a_row():
    builders = {
        OURS: lambda: Contestant(lambda: [torch.randn(1000).abs() + 1]),
        "twice": lambda: Contestant(lambda: [2 * torch.ones(1000)]),
        "gone": ending(Absent("not here")), "big": ending(MemoryError("9 GB")), "wrong": ending(ValueError("no")),
    }  # fmt: skip
    rows = timed_rows(CASE, TOY, builders, 10.0, "things/s", 1e-6, "the best", reference=[torch.ones(1000)])
    ours, twice, *others = rows
    assert (ours["ours"], twice["ours"], twice["notes"]) == (True, False, {"relative_error": pytest.approx(1)})
    assert ours["low"] <= ours["median"] <= ours["high"]
    assert ours["rate"] == pytest.approx(10.0 / (ours["median"] / 1e3))
    assert ours["share"] == pytest.approx(1e-6 / (ours["median"] / 1e3))
    ends = [("absent", "not here", None), ("out of memory", "9 GB", None), ("failed", "ValueError: no", None)]
    assert [(row["outcome"], row["reason"], row["median"]) for row in others] == ends
    assert list(ours) == [name for name in RECORDED["rows"][0] if name != "run"]


MEASURED = [
    row("HF eager", 6.0),
    row("SDPA cuDNN", 4.0, rate=100.0),
    row("lmcore plain", 1.0),
    row("FlexAttention", None),
    row("lmcore fused", 2.0, rate=150.0, share=0.5, peak_bytes=10),
]


@pytest.mark.parametrize(
    ("measure", "value"), [("median", 2.0), ("share", 0.5), ("peak_bytes", 10), ("rate over SDPA cuDNN", 1.5)]
)
def test_targets_are_of_our_row_and_our_slower_variants_are_no_peers(measure, value):
    table, target = rows_table(MEASURED), {"row": CASE.row, "measure": measure, "at_most": value}
    assert fastest(table[table["peer"]])["contestant"] == "SDPA cuDNN"
    assert judged(target, table) == target | {"measured": value, "reached": True}
    assert not judged(target | {"at_most": 0.99 * value}, table)["reached"]
    assert not judged({"row": CASE.row, "measure": measure, "at_least": 1.01 * value}, table)["reached"]
    assert judged(target | {"measure": "rate over FlexAttention"}, table)["reached"] is None
    assert judged(target | {"row": "another"}, table)["reached"] is None


def test_a_new_run_makes_the_rows_that_the_tables_show():
    """The names of rows and contestants, their settings and the targets are those of the file."""
    cases = {case.row: case for case in benchmark_cases.all_cases()}
    shown = [row for row in RECORDED["rows"] if row["group"] not in ("study", "elementwise")]
    assert {row["row"] for row in shown} == set(cases)
    assert benchmark_cases.targets() == RECORDED["targets"]
    for row in shown:
        case = cases[row["row"]]
        assert (case.group, case.work, case.settings) == (row["group"], row["work"], row["settings"])
        assert row["contestant"] in (case.settings.get("contestants", [row["contestant"]]) or kernel_peers.losses(None))


def test_hugging_face_has_the_weights_of_our_model():
    pytest.importorskip("transformers")
    model = TransformerLM(model_config("smoke", vocab_size=64, context_length=16))
    tokens = torch.randint(64, (2, 16))
    with torch.no_grad():
        torch.testing.assert_close(llama(model)(input_ids=tokens).logits, model(tokens), rtol=1e-4, atol=1e-5)


def test_the_packed_peer_computes_what_our_model_does():
    model = TransformerLM(model_config("smoke", vocab_size=64, context_length=16))
    tokens = torch.randint(64, (2, 9))
    torch.testing.assert_close(packed(model)[1](tokens), model(tokens), rtol=1e-4, atol=1e-5)


def test_speed_measures_checks_and_resumes(tmp_path, capsys, monkeypatch):
    """Two cases in processes of their own, and the rest in this one, which is faster."""
    out = tmp_path / "speed.json"
    main(out, only=("adamw", "loss"), device="cpu", toy=True)
    begun = json.loads(out.read_text())
    assert {row["row"] for row in begun["rows"]} == {"adamw", "loss"}
    monkeypatch.setattr("speed.run_apart", lambda call, arguments, *_, **__: ("complete", call(*arguments)))
    main(out, device="cpu", toy=True)
    result = json.loads(out.read_text())
    assert [row for row in result["rows"] if row["row"] in ("adamw", "loss")] == begun["rows"]
    absent = set() if util.find_spec("transformers") else {"decode-small-1-generate"}  # nobody else takes part
    first, second = (set(run["cases"]) for run in result["runs"])
    assert second == {case.row for case in benchmark_cases.toy_cases()} - first - absent
    for row in result["rows"]:
        ours = row["contestant"].startswith("lmcore")
        assert row["outcome"] in (["complete"] if ours else ["complete", "absent"]), row
        if row["outcome"] == "complete":
            assert row["notes"].get("relative_error", 0) < 1e-2, row
            assert not ours or abs(row["notes"].get("fall_beside_first", 1) - 1) < 0.05, row
    assert "adamw: torch fused: " in capsys.readouterr().out
    for settings, reason in (({}, "does not hold real sizes"), ({"toy": True, "only": ("no",)}, "no group or case")):
        with pytest.raises(UserError, match=reason):
            main(out, device="cpu", **settings)
    assert json.loads(out.read_text()) == result


def test_an_update_that_does_nothing_has_an_error_of_one(monkeypatch):
    (case,) = (case for case in benchmark_cases.toy_cases() if case.row == "adamw")
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: None)
    errors = {row["contestant"]: row["notes"]["relative_error"] for row in kernel_peers.adamw(case, TOY)}
    assert errors == {"torch fused": pytest.approx(1), OURS: pytest.approx(0, abs=1e-2)}


def test_parallel_takes_turns_and_every_way_has_the_same_losses(tmp_path, monkeypatch):
    """The first of two ranks is this process."""
    out, only, names = tmp_path / "parallel.json", ("tinystories-256x256 in all", "all-reduce"), list(parallel.LMCORE)
    contestants = (names[0], "lmcore fsdp", "NCCL", "lmcore ring")
    launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = [sys.executable, "benchmarks/parallel.py", "--toy", "--out", out, "--times", "2"]
    words += ["--only", *only, "--contestants", *contestants]
    other = subprocess.Popen(words, cwd=PROJECT, env=os.environ | launched | {"RANK": "1"})
    for name, value in (launched | {"RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    parallel.main(out, only, contestants, toy=True, times=2)
    assert other.wait() == 0
    rows = {row["contestant"]: row for row in json.loads(out.read_text())["rows"]}
    assert tuple(rows) == contestants
    assert {(row["ranks"], row["outcome"]) for row in rows.values()} == {(2, "complete")}
    assert all(sorted(row["runs"])[1] == row["seconds"] for row in rows.values())
    explicit, plain = (rows[name]["losses"] for name in contestants[:2])
    assert explicit == plain
    assert explicit[0] > explicit[-1]
    failed, complete = {"outcome": "out of memory"}, {"outcome": "complete", "seconds": 3.0}
    assert parallel.middle([complete, failed]) == failed


def test_tokenizers_take_turns_and_absent_ones_are_rows(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"The {number} cats. <|endoftext|>" for number in range(300)))
    Tokenizer(*train_bpe(text, 280, ["<|endoftext|>"]), ["<|endoftext|>"]).save(tmp_path / "tokenizer")
    tokenization.main(text, str(tmp_path / "tokenizer"), vocab_size=280, turns=2, out=tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    for row in rows:
        there = util.find_spec(row["contestant"].split()[0])
        assert row["outcome"] == ("complete" if there else "absent")
        assert row["reason"] if not there else row["low"] <= row["mb_per_second"] <= row["high"]
    assert {row["contestant"] for row in rows} >= {"lmcore", "tiktoken", "gigatoken to lists", "rustbpe"}
