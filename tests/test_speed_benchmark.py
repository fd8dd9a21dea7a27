"""benchmarks/speed.py: who is compared and how, what is a target reached, and the whole command at toy sizes."""

import json
import math
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
from lmcore.profiling.kernels.speed import fastest, judged, read_speed, rows_table

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
RECORDED = json.loads((BENCHMARKS.parent / "results" / "h200" / "speed.json").read_text())
sys.path.insert(0, str(BENCHMARKS))

import benchmark_cases  # noqa: E402
import decode  # noqa: E402
import kernel_peers  # noqa: E402
import steps  # noqa: E402
from benchmark_cases import OURS, BenchmarkCase, Conditions, blank_row, timed_rows  # noqa: E402
from peers import llama  # noqa: E402
from speed import keep, lines, main  # noqa: E402
from steps import KERNELS, LMCORE, PEERS  # noqa: E402

TOY = Conditions("cpu", True, 0.01, {"copy_bytes_per_second": 1e10, "bf16_flops_per_second": 1e11})
CASE = BenchmarkCase("work", "group", "some work", "", {}, 1)


def row(contestant: str, median: float | None, **fields) -> dict:
    """A row as it is in the file."""
    times = dict.fromkeys(("median", "low", "high"), median)
    return blank_row(CASE, contestant, "absent" if median is None else "complete", None) | times | fields


def test_rates_and_shares_are_those_of_the_median():
    def gone() -> Contestant:
        raise Absent("not here")

    builders = {OURS: lambda: Contestant(lambda: torch.randn(1000)), "gone": gone}
    ours, other = timed_rows(CASE, TOY, builders, 10.0, "things/s", 1e-6, "the best")
    assert (ours["ours"], other["ours"]) == (True, False)
    assert ours["low"] <= ours["median"] <= ours["high"]
    assert ours["rate"] == pytest.approx(10.0 / (ours["median"] / 1e3))
    assert ours["share"] == pytest.approx(1e-6 / (ours["median"] / 1e3))
    assert ours["repeats"] >= 7
    assert {name: other[name] for name in ("outcome", "reason", "median", "rate_unit", "notes")} == {
        "outcome": "absent", "reason": "not here", "median": None, "rate_unit": None, "notes": {},
    }  # fmt: skip
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
def test_targets_are_of_our_row(measure, value):
    table, target = rows_table(MEASURED), {"row": CASE.row, "measure": measure, "at_most": value}
    assert judged(target, table) == target | {"measured": value, "reached": True}
    assert not judged(target | {"at_most": 0.99 * value}, table)["reached"]
    assert not judged({"row": CASE.row, "measure": measure, "at_least": 1.01 * value}, table)["reached"]
    assert judged(target | {"measure": "rate over FlexAttention"}, table)["reached"] is None
    assert judged(target | {"row": "another"}, table)["reached"] is None


def test_our_slower_variants_are_no_peers():
    table = rows_table(MEASURED)
    assert fastest(table[table["peer"]])["contestant"] == "SDPA cuDNN"
    assert fastest(table[table["contestant"] == "FlexAttention"]) is None


def test_the_record_is_read_with_its_settings_as_columns(tmp_path):
    file = BENCHMARKS.parent / "results" / "h200" / "speed.json"
    rows = read_speed(file).rows
    assert len(rows) == len(RECORDED["rows"])
    assert set(rows.loc[rows["group"] == "attention", "head_size"]) == {64, 128}
    with pytest.raises(UserError, match=r"benchmarks/speed\.py` measures it"):
        read_speed(tmp_path / "speed.json")
    (tmp_path / "speed.json").write_text('{"rows": []}')
    with pytest.raises(UserError, match="holds no speed measurements"):
        read_speed(tmp_path / "speed.json")


def test_ratios_are_to_the_best_peer():
    text = "\n".join(lines(MEASURED, [{"row": "work", "measure": "median", "at_most": 1.0, "text": "≤ 1 ms"}]))
    assert "2.00 times as fast" in text  # as HF and cuDNN: lmcore's plain way is no peer
    assert "0.50 × best peer's time" in text
    assert "NOT reached, 2.00 of the target" in text
    assert "times as fast" not in "\n".join(lines(MEASURED[:-1], []))


def test_every_target_is_of_a_cell_and_compares_with_a_contestant_of_it():
    found = {case.row: case for case in benchmark_cases.all_cases()}
    assert len(found) == len(benchmark_cases.all_cases())
    for target in benchmark_cases.targets():
        case = found[target["row"]]
        other = target["measure"].partition(" over ")[2]
        assert not other or other in case.settings["contestants"]
    known = {"attention": kernel_peers.CONTESTANTS, "decode": decode.BUILDERS}
    for case in [*found.values(), *benchmark_cases.toy_cases()]:
        for name in case.settings.get("contestants", ()):
            peer = name.startswith(tuple(PEERS)) and case.group == "step"
            assert peer or name in known.get(case.group, {**LMCORE, **KERNELS}), (case.row, name)


ROWS = {part.row: part for case in benchmark_cases.all_cases() for part in case.parts or [case]}


def test_a_new_run_makes_the_rows_of_the_recorded_one():
    """The names of rows and contestants, their settings and the targets are those of the file."""
    assert benchmark_cases.targets() == RECORDED["targets"]
    for row in RECORDED["rows"]:
        case = ROWS[row["row"]]
        assert (case.group, case.work, case.settings) == (row["group"], row["work"], row["settings"])
        assert row["contestant"] in case.settings.get("contestants", [row["contestant"]])
    assert {row["row"] for row in RECORDED["rows"]} == set(ROWS)


def test_hugging_face_has_the_weights_of_our_model():
    pytest.importorskip("transformers")
    model = TransformerLM(model_config("smoke", vocab_size=64, context_length=16))
    tokens = torch.randint(64, (2, 16))
    with torch.no_grad():
        torch.testing.assert_close(llama(model)(input_ids=tokens).logits, model(tokens), rtol=1e-4, atol=1e-5)


def test_the_command_measures_checks_and_goes_on_where_it_ended(tmp_path, capsys, monkeypatch):
    """Two cases in processes of their own, and the rest in this one, which is faster."""
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
    first, second = (set(run["cases"]) for run in result["runs"])
    assert first == {"adamw", "loss"}
    assert second == {case.row for case in benchmark_cases.toy_cases()} - first - absent
    assert result["peak_rates"]["copy_bytes_per_second"] > 0
    for row in result["rows"]:
        assert row["outcome"] in ("complete", "absent"), row
        if row["outcome"] == "complete":
            assert row["repeats"] >= 7
            assert row["notes"].get("relative_error", 0) < 1e-2, row
        if row["contestant"].startswith("lmcore"):
            assert row["outcome"] == "complete", row
            assert abs(row["notes"].get("fall_beside_first", 1) - 1) < 0.05, row
    assert "times as fast as the best peer" in capsys.readouterr().out


def test_an_update_that_does_nothing_has_an_error_of_one(monkeypatch):
    (case,) = (case for case in benchmark_cases.toy_cases() if case.row == "adamw")
    monkeypatch.setattr(kernel_peers.optimizer, "torch_fused", lambda parameters, **settings: lambda: None)
    errors = {row["contestant"]: row["notes"]["relative_error"] for row in kernel_peers.adamw(case, TOY)}
    assert errors == {"torch fused": pytest.approx(1), OURS: pytest.approx(0, abs=1e-2)}


def test_rows_know_their_run_and_a_failure_does_not_displace_a_measurement():
    done, lost = ({"row": "work", "outcome": outcome} for outcome in ("complete", "failed"))
    runs = [{"environment": {"commit": name}, "peak_rates": {"copy": name}, "cases": []} for name in "abcd"]
    result = {"rows": [], "runs": [], "provenance": {}, "peak_rates": {}}
    many = [{"row": f"length-{n}", "outcome": "complete"} for n in (1, 2)]
    given = ([lost], [done], [lost], many)  # the last takes the place of the case's own row
    kept = ([lost | {"run": 0}], [done | {"run": 1}], [done | {"run": 1}], [row | {"run": 3} for row in many])
    for run, rows, expected, measured_in in zip(runs, given, kept, (None, "b", "b", "d"), strict=True):
        result["runs"].append(run)
        keep(result, CASE, rows)
        assert result["rows"] == expected
        assert (result["provenance"].get("commit"), result["peak_rates"].get("copy")) == (measured_in, measured_in)
    assert [run["cases"] for run in runs] == [[], ["work"], [], ["work"]]


def test_without_time_nothing_is_measured(tmp_path, capsys):
    main(tmp_path / "speed.json", budget=0, device="cpu", toy=True)
    said = capsys.readouterr().out
    assert said.count("left out, as 0 s are left") == len(benchmark_cases.toy_cases())
    assert said.endswith("nothing was measured\n")
    assert not list(tmp_path.iterdir())


def test_another_machines_measurements_are_left_alone(tmp_path, monkeypatch):
    place = {"device": "cuda:0", "environment": {"device": "NVIDIA H200"}, "peak_rates": {}}
    content = {"rows": [], "runs": [place | {"cases": ["adamw"]}], "toy": True}
    out = tmp_path / "speed.json"
    out.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"holds measurements of NVIDIA H200 \(cuda\), not .* \(cpu\): choose another"):
        main(out, device="cpu", toy=True)
    assert json.loads(out.read_text()) == content
    monkeypatch.setattr("speed.run_apart", lambda *_, **__: ("complete", place | {"device": "cuda:1"}))
    main(out, budget=0, toy=True)


def test_an_unknown_cell_is_refused_in_one_sentence(tmp_path):
    command = [sys.executable, BENCHMARKS / "speed.py", "--toy", "--only", "nonsense", "--out", tmp_path / "speed.json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr.startswith("There is no group or case nonsense; choose from ")
    assert ran.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "reason"),
    [('{"rows": [], "runs": [], "toy": false}', "holds real sizes")]
    + [(damaged, "is not a result of this benchmark") for damaged in (
        '{"rows": []}', '{"rows": [], "toy": true}', '{"rows": [1], "toy": true, "runs": []}', "[]"
    )],
)  # fmt: skip
def test_a_file_that_is_no_such_result_is_left_alone(tmp_path, content, reason):
    out = tmp_path / "speed.json"
    out.write_text(content)
    with pytest.raises(UserError, match=reason):
        main(out, device="cpu", toy=True)
    assert out.read_text() == content


def test_settings_are_checked(tmp_path):
    for budget in (-1.0, math.inf, math.nan):
        with pytest.raises(UserError, match="--budget is a number of seconds from 0 on"):
            main(tmp_path / "speed.json", budget=budget, device="cpu", toy=True)
    with pytest.raises(UserError, match="There is no model size"):
        steps.measure(benchmark_cases.step_case("huge", 1, 8, (OURS,), 1), TOY)
