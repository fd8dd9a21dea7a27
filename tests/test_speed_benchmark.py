"""benchmarks/speed.py: who is compared and how, what is a target reached, and the whole command at toy sizes."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lmcore.config import model_config
from lmcore.errors import UserError
from lmcore.model import TransformerLM
from lmcore.workbook.report.kernels.speed import judged, table_of
from lmcore.workbook.report.kernels.speed_answers import BESIDE_TARGETS

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from speed import attention, cells, decode, steps, targets  # noqa: E402
from speed.command import keep, main  # noqa: E402
from speed.measuring import Absent, Built, Clock, Contestant, Race, relative_error  # noqa: E402
from speed.peers import llama  # noqa: E402
from speed.rows import Cell, Conditions, Row  # noqa: E402
from speed.table import lines  # noqa: E402

TOY = Conditions("cpu", True, 0.01, {"copy_bytes_per_second": 1e10, "bf16_flops_per_second": 1e11})
CELL = Cell("work", "group", "some work", "", {}, 1)


def row(contestant: str, median: float | None, ours: bool = False, **fields) -> dict:
    """A row as it is in the file."""
    outcome = "absent" if median is None else "complete"
    times = dict.fromkeys(("median", "low", "high"), median)
    return Row("work", "group", "some work", {}, contestant, ours, outcome=outcome, **times, **fields).to_json()


def test_events_are_recorded_where_the_work_is(monkeypatch):
    """With cuda:1 the current stream is still that of cuda:0, where nothing happens."""
    recorded = []

    class Event:
        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self, stream=None):
            recorded.append(stream)

        def elapsed_time(self, end):
            return 6.0

    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device=None: f"stream of {device}")
    clock = Clock(torch.device("cpu"), alone=False)
    clock.device = torch.device("cuda", 1)
    assert clock._events(Built(lambda: recorded.append("work")), calls=2, flushes=0) == 3e-3
    assert recorded == ["stream of cuda:1", "work", "work", "stream of cuda:1"]


def test_contestants_take_turns_and_every_end_is_a_row():
    calls = []

    def raising(error: Exception):
        def build() -> Built:
            raise error

        return build

    def later() -> Built:
        def run() -> None:
            calls.append("later")
            if len([call for call in calls if call == "later"]) > 6:  # builds and warms up, then fails
                raise ValueError("later")

        return Built(run)

    race = Race(
        CELL,
        TOY,
        [
            Contestant("a", lambda: Built(lambda: calls.append("a"), results=torch.tensor([1.0, 2.0])), ours=True),
            Contestant("b", lambda: Built(lambda: calls.append("b"), results=torch.tensor([1.0, 2.2]))),
            Contestant("gone", raising(Absent("not here"))),
            Contestant("big", raising(torch.OutOfMemoryError("too big"))),
            Contestant("wrong", raising(ValueError("wrong"))),
        ],
        reference=torch.tensor([1.0, 2.0]),
        amount=10.0,
        rate_unit="things/s",
    )
    rows = {row.contestant: row for row in race.rows()}
    assert [row.outcome for row in rows.values()] == ["complete", "complete", "absent", "out of memory", "failed"]
    assert rows["gone"].reason == "not here"
    assert rows["wrong"].reason == "ValueError: wrong"
    a, b = rows["a"], rows["b"]
    assert a.ours
    assert not b.ours
    assert a.low <= a.median <= a.high
    assert a.rate == pytest.approx(10.0 / (a.median / 1e3))
    assert a.notes["relative_error"] == 0
    assert b.notes["relative_error"] == pytest.approx(0.2 / 5**0.5, rel=1e-5)
    timed = calls[-2 * a.repeats :]  # each round in the other order
    assert timed[:4] in (["a", "b", "b", "a"], ["b", "a", "a", "b"])
    ended = Race(CELL, TOY, [Contestant("later", later)]).rows()
    assert ended[0].outcome == "failed"


def test_a_reset_comes_before_every_timed_call():
    calls = []
    Race(CELL, TOY, [Contestant("a", lambda: Built(lambda: calls.append(1), reset=lambda: calls.append(0)))]).rows()
    assert calls == [0, 1] * (len(calls) // 2)


def test_an_error_that_is_not_finite_is_infinite():
    wanted = torch.ones(3)
    assert relative_error(torch.tensor([1.0, float("nan"), 1.0]), wanted) == float("inf")
    assert relative_error([wanted, 2 * wanted], [wanted, wanted]) == pytest.approx(1.0)


def test_ratios_are_to_the_best_peer_and_targets_to_our_row():
    rows = [
        row("HF eager", 6.0),
        row("SDPA cuDNN", 4.0, rate=100.0),
        row("lmcore plain", 1.0),
        row("FlexAttention", None),
        row("lmcore fused", 2.0, ours=True, rate=150.0, share=0.5, peak_bytes=10),
    ]
    table = table_of(rows)
    for measure, value in {"median": 2.0, "share": 0.5, "peak_bytes": 10, "rate over SDPA cuDNN": 1.5}.items():
        assert judged({"measure": measure, "at_most": value}, table) == {
            "measure": measure, "at_most": value, "measured": value, "reached": True,
        }  # fmt: skip
        assert not judged({"measure": measure, "at_most": 0.99 * value}, table)["reached"]
        assert not judged({"measure": measure, "at_least": 1.01 * value}, table)["reached"]
    assert judged({"measure": "rate over FlexAttention", "at_least": 1}, table)["reached"] is None
    assert judged({"measure": "median", "at_most": 1}, table[:0])["reached"] is None
    text = "\n".join(lines(rows, [{"row": "work", "measure": "median", "at_most": 1.0, "text": "≤ 1 ms"}]))
    assert "2.00 times as fast" in text  # as HF and cuDNN: lmcore's plain way is no peer
    assert "0.50 × best peer's time" in text
    assert "NOT reached, 2.00 of the target" in text
    assert "times as fast" not in "\n".join(lines(rows[:-1], []))


def test_every_target_is_of_a_cell_and_compares_with_a_contestant_of_it():
    found = {cell.row: cell for cell in cells.cells()}
    assert len(found) == len(cells.cells())
    for target in targets.TARGETS:
        cell = found[target["row"]]
        other = target["measure"].partition(" over ")[2]
        assert not other or other in cell.settings["contestants"]
    known = {
        "attention": set(attention.WAYS),
        "step": set(steps.BUILDERS),
        "study": set(steps.BUILDERS),
        "decode": {decode.GENERATE, decode.GRAPH, decode.OURS},
    }
    for cell in [*found.values(), *cells.toy_cells()]:
        assert set(cell.settings.get("contestants", ())) <= known.get(cell.group, set())


def test_every_row_without_a_target_is_told_of_where_it_is_missing():
    rows = []
    for cell in cells.cells():
        names = {
            "sweep": lambda n, s=cell.settings: cells.attention_row(s["head_size"], n, s["passes"]),
            "memory": lambda n, head=cell.row: f"{head}-{n}",
        }.get(cell.group)
        rows += [names(length) for length in cell.settings["lengths"]] if names else [cell.row]
    beside = set(rows) - {target["row"] for target in targets.TARGETS}
    found = {name: [words for pattern, words in BESIDE_TARGETS.items() if re.fullmatch(pattern, name)] for name in rows}
    assert all(len(found[name]) == (name in beside) for name in rows), found
    assert {words for one in found.values() for words in one} == set(BESIDE_TARGETS.values())


def test_attention_flops_are_those_of_its_products():
    s = attention.settings(64, 128, "forward", batch_size=2, heads=3)
    full = 2 * 3 * 2 * (2 * 128 * 128 * 64)  # two products for each head, 2 FLOPs a multiplication
    assert attention.flops(s | {"causal": False}) == full
    assert attention.flops(s) == full / 2
    assert attention.flops(s | {"passes": "both"}) == 3.5 * full / 2


def test_hugging_face_has_the_weights_of_our_model():
    pytest.importorskip("transformers")
    model = TransformerLM(model_config("smoke", vocab_size=64, context_length=16))
    tokens = torch.randint(64, (2, 16))
    with torch.no_grad():
        torch.testing.assert_close(llama(model)(input_ids=tokens).logits, model(tokens), rtol=1e-4, atol=1e-5)


def test_the_command_measures_checks_and_goes_on_where_it_ended(tmp_path, capsys, monkeypatch):
    """Two cells in processes of their own, and the rest in this one, which is faster."""
    out = tmp_path / "speed.json"
    main(out, only=("optimizer", "loss"), device="cpu", toy=True)
    first = json.loads(out.read_text())
    assert {row["row"] for row in first["rows"]} == {"adamw", "loss"}
    monkeypatch.setattr("speed.command.run_apart", lambda call, arguments, *_, **__: ("complete", call(*arguments)))
    main(out, device="cpu", toy=True)
    result = json.loads(out.read_text())
    kept = [row for row in result["rows"] if row["row"] in ("adamw", "loss")]
    assert kept == first["rows"]
    assert [len(run["cells"]) for run in result["runs"]] == [2, len(cells.toy_cells()) - 2]
    assert result["ceilings"]["copy_bytes_per_second"] > 0
    for row in result["rows"]:
        assert row["outcome"] in ("complete", "absent"), row
        if row["outcome"] == "complete":
            assert row["repeats"] >= 7
            assert row["notes"].get("relative_error", 0) < 1e-2, row
        if row["contestant"].startswith("lmcore"):
            assert row["outcome"] == "complete", row
            assert abs(row["notes"].get("fall_beside_first", 1) - 1) < 0.05, row
    assert "times as fast as the best peer" in capsys.readouterr().out


def test_rows_know_their_run_and_a_failure_does_not_displace_a_measurement():
    cell = Cell("loss", "loss", "work", "", {}, 1)
    done, lost = ({"row": "loss", "outcome": outcome} for outcome in ("complete", "failed"))
    runs = [{"environment": {"commit": name}, "ceilings": {"copy": name}, "cells": []} for name in "abc"]
    result = {"rows": [], "runs": runs[:1], "provenance": {}, "ceilings": {}}
    keep(result, cell, [lost])
    assert result["rows"] == [lost | {"run": 0}]
    result["runs"].append(runs[1])
    keep(result, cell, [done])
    result["runs"].append(runs[2])
    keep(result, cell, [lost])
    assert result["rows"] == [done | {"run": 1}]
    assert [run["cells"] for run in result["runs"]] == [[], ["loss"], []]
    assert (result["provenance"], result["ceilings"]) == ({"commit": "b"}, {"copy": "b"})  # of what was measured


def test_a_cell_of_many_rows_that_failed_as_a_whole_leaves_nothing_once_it_succeeds():
    cell = Cell("sweep", "sweep", "work", "", {}, 1)
    result = {"rows": [], "runs": [{"environment": {}, "ceilings": {}, "cells": []}]}
    keep(result, cell, [{"row": "sweep", "contestant": "all", "outcome": "failed"}])
    rows = [{"row": f"length-{n}", "contestant": "a", "outcome": "complete"} for n in (1, 2)]
    keep(result, cell, rows)
    assert result["rows"] == [row | {"run": 0} for row in rows]


def test_without_time_nothing_is_measured(tmp_path, capsys):
    main(tmp_path / "speed.json", budget=0, device="cpu", toy=True)
    said = capsys.readouterr().out
    assert said.count("left out, as 0 s are left") == len(cells.toy_cells())
    assert said.endswith("nothing was measured\n")
    assert not list(tmp_path.iterdir())


def test_another_machines_measurements_are_left_alone(tmp_path, monkeypatch):
    place = {"device": "cuda:0", "environment": {"device": "NVIDIA H200"}, "ceilings": {}}
    runs = [place | {"cells": ["adamw"]}]
    out = tmp_path / "speed.json"
    out.write_text(json.dumps({"rows": [], "runs": runs, "toy": True}))
    with pytest.raises(UserError, match=r"holds measurements of NVIDIA H200 \(cuda\), not .* \(cpu\): choose another"):
        main(out, device="cpu", toy=True)
    assert json.loads(out.read_text())["runs"] == runs
    monkeypatch.setattr("speed.command.run_apart", lambda *_, **__: ("complete", place | {"device": "cuda:1"}))
    main(out, budget=0, toy=True)


def test_bad_requests_are_refused_in_one_sentence(tmp_path):
    out = tmp_path / "speed.json"
    command = [sys.executable, str(BENCHMARKS / "speed.py"), "--toy", "--only", "nonsense", "--out", str(out)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr.startswith("There is no group or cell nonsense; choose from ")
    assert ran.stderr.count("\n") == 1
    assert not out.exists()
    out.write_text('{"rows": [], "runs": [], "toy": false}')
    with pytest.raises(UserError, match="holds real sizes"):
        main(out, device="cpu", toy=True)
    for damaged in ('{"rows": []}', '{"rows": [], "toy": true}', '{"rows": [1], "toy": true, "runs": []}', "[]"):
        out.write_text(damaged)
        with pytest.raises(UserError, match="is not a result of this benchmark"):
            main(out, device="cpu", toy=True)
        assert out.read_text() == damaged
    for budget in (-1.0, math.inf, math.nan):
        with pytest.raises(UserError, match="--budget is a number of seconds from 0 on"):
            main(out, budget=budget, device="cpu", toy=True)
    with pytest.raises(UserError, match="There is no model size"):
        steps.measure(cells.step_cell("huge", 1, 8, (steps.OURS,), 1), TOY)
