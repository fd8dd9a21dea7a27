"""benchmarks/speed.py: who is compared and how, what is a target reached, and the whole command at toy sizes."""

import json
import math
import re
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest
import torch

from lmcore.config import model_config
from lmcore.errors import UserError
from lmcore.model import TransformerLM
from lmcore.profiling.kernels.measuring import Absent, Contestant
from lmcore.workbook.report.kernels.speed import judged, table_of
from lmcore.workbook.report.kernels.speed_answers import BESIDE_TARGETS

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import cells  # noqa: E402
import decode  # noqa: E402
import kernel_peers  # noqa: E402
import steps  # noqa: E402
from cells import OURS, Cell, Conditions, blank_row, timed_rows  # noqa: E402
from peers import llama  # noqa: E402
from speed import keep, lines, main  # noqa: E402
from steps import KERNELS, LMCORE, PEERS  # noqa: E402

TOY = Conditions("cpu", True, 0.01, {"copy_bytes_per_second": 1e10, "bf16_flops_per_second": 1e11})
CELL = Cell("work", "group", "some work", "", {}, 1)


def row(contestant: str, median: float | None, **fields) -> dict:
    """A row as it is in the file."""
    times = dict.fromkeys(("median", "low", "high"), median)
    return blank_row(CELL, contestant, "absent" if median is None else "complete", None) | times | fields


def test_rates_and_shares_are_those_of_the_median():
    def gone() -> Contestant:
        raise Absent("not here")

    builders = {OURS: lambda: Contestant(lambda: torch.randn(1000)), "gone": gone}
    ours, other = timed_rows(CELL, TOY, builders, 10.0, "things/s", 1e-6, "the best")
    assert (ours["ours"], other["ours"]) == (True, False)
    assert ours["low"] <= ours["median"] <= ours["high"]
    assert ours["rate"] == pytest.approx(10.0 / (ours["median"] / 1e3))
    assert ours["share"] == pytest.approx(1e-6 / (ours["median"] / 1e3))
    assert ours["repeats"] >= 7
    assert {name: other[name] for name in ("outcome", "reason", "median", "rate_unit", "notes")} == {
        "outcome": "absent", "reason": "not here", "median": None, "rate_unit": None, "notes": {},
    }  # fmt: skip
    recorded = json.loads((BENCHMARKS.parent / "results" / "h200" / "speed.json").read_text())["rows"]
    assert list(ours) == [name for name in recorded[0] if name != "run"]


def test_ratios_are_to_the_best_peer_and_targets_to_our_row():
    rows = [
        row("HF eager", 6.0),
        row("SDPA cuDNN", 4.0, rate=100.0),
        row("lmcore plain", 1.0),
        row("FlexAttention", None),
        row("lmcore fused", 2.0, rate=150.0, share=0.5, peak_bytes=10),
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
    for target in cells.targets():
        cell = found[target["row"]]
        other = target["measure"].partition(" over ")[2]
        assert not other or other in cell.settings["contestants"]
    known = {"attention": kernel_peers.CONTESTANTS, "decode": decode.BUILDERS}
    for cell in [*found.values(), *cells.toy_cells()]:
        for name in cell.settings.get("contestants", ()):
            peer = name.startswith(tuple(PEERS)) and cell.group == "step"
            assert peer or name in known.get(cell.group, {**LMCORE, **KERNELS}), (cell.row, name)


def test_a_new_run_makes_the_rows_of_the_recorded_one():
    """The names of rows and contestants, their settings and the targets are those of the file."""
    recorded = json.loads((BENCHMARKS.parent / "results" / "h200" / "speed.json").read_text())
    assert cells.targets() == recorded["targets"]
    made = {part.row: part for cell in cells.cells() for part in cell.parts or [cell]}
    for row in recorded["rows"]:
        cell = made[row["row"]]
        assert (cell.group, cell.work, cell.settings) == (row["group"], row["work"], row["settings"])
        assert row["contestant"] in cell.settings.get("contestants", [row["contestant"]])
    assert {row["row"] for row in recorded["rows"]} == set(made)


def test_every_row_without_a_target_is_told_of_where_it_is_missing():
    rows = [part.row for cell in cells.cells() for part in cell.parts or [cell]]
    beside = set(rows) - {target["row"] for target in cells.targets()}
    found = {name: [words for pattern, words in BESIDE_TARGETS.items() if re.fullmatch(pattern, name)] for name in rows}
    assert all(len(found[name]) == (name in beside) for name in rows), found
    assert {words for one in found.values() for words in one} == set(BESIDE_TARGETS.values())


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
    begun = json.loads(out.read_text())
    assert {row["row"] for row in begun["rows"]} == {"adamw", "loss"}
    monkeypatch.setattr("speed.run_apart", lambda call, arguments, *_, **__: ("complete", call(*arguments)))
    main(out, device="cpu", toy=True)
    result = json.loads(out.read_text())
    kept = [row for row in result["rows"] if row["row"] in ("adamw", "loss")]
    assert kept == begun["rows"]
    absent = set() if util.find_spec("transformers") else {"decode-small-1-generate"}  # nobody else takes part
    first, second = (set(run["cells"]) for run in result["runs"])
    assert first == {"adamw", "loss"}
    assert second == {cell.row for cell in cells.toy_cells()} - first - absent
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
    monkeypatch.setattr("speed.run_apart", lambda *_, **__: ("complete", place | {"device": "cuda:1"}))
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
        steps.measure(cells.step_cell("huge", 1, 8, (OURS,), 1), TOY)
