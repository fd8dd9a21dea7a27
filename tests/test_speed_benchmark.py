"""benchmarks/speed.py: who is compared and how, what is a target reached, and the whole command at toy sizes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lmcore.config import model_config
from lmcore.errors import UserError
from lmcore.model import TransformerLM

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from speed import attention, cells, decode, steps, targets  # noqa: E402
from speed.command import keep, main  # noqa: E402
from speed.measuring import Absent, Built, Clock, Contestant, Race, relative_error  # noqa: E402
from speed.peers import llama  # noqa: E402
from speed.rows import OUTCOMES, Cell, Conditions, Row  # noqa: E402
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
    assert set(OUTCOMES) == {row.outcome for row in rows.values()}
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
    assert targets.times_faster(rows) == 2.0  # lmcore's plain way is no peer
    assert targets.times_faster(rows[:-1]) is None
    for measure, value in {"median": 2.0, "share": 0.5, "peak_bytes": 10, "rate over SDPA cuDNN": 1.5}.items():
        assert targets.measured({"row": "work", "measure": measure}, rows) == value
    assert targets.measured({"row": "work", "measure": "rate over FlexAttention"}, rows) is None
    assert targets.measured({"row": "other", "measure": "median"}, rows) is None
    assert targets.is_reached({"at_most": 2.0}, 2.0)
    assert not targets.is_reached({"at_most": 2.0}, 2.1)
    assert not targets.is_reached({"at_least": 2.0}, 1.9)
    text = "\n".join(lines(rows, [{"row": "work", "measure": "median", "at_most": 1.0, "text": "≤ 1 ms"}]))
    assert "2.00 times as fast" in text
    assert "0.50 × best peer's time" in text
    assert "NOT reached, 2.00 of the target" in text


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
    result = {"rows": [], "runs": [{"cells": []}]}
    keep(result, cell, [lost])
    assert result["rows"] == [lost | {"run": 0}]
    assert result["runs"][0]["cells"] == []
    result["runs"].append({"cells": []})
    keep(result, cell, [done])
    result["runs"].append({"cells": []})
    keep(result, cell, [lost])
    assert result["rows"] == [done | {"run": 1}]
    assert [run["cells"] for run in result["runs"]] == [[], ["loss"], []]


def test_without_time_nothing_is_measured(tmp_path, capsys):
    main(tmp_path / "speed.json", budget=0, device="cpu", toy=True)
    assert capsys.readouterr().out.count("left out") == len(cells.toy_cells())
    assert not list(tmp_path.iterdir())


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
    with pytest.raises(UserError, match="There is no model size"):
        steps.measure(cells.step_cell("huge", 1, 8, (steps.OURS,), 1), TOY)
