"""Sweeps as many jobs: definitions, cells by number, processes side by side, one table of everything."""

import json
from pathlib import Path

import pytest
from sweep_definitions import BENCHMARK, RATES, loaded, training_sweep, written

from lmcore.cli import main
from lmcore.config import replace
from lmcore.errors import UserError
from lmcore.files import read_json
from lmcore.profiling.cases import BenchmarkConfig, benchmark_cases
from lmcore.recipes import batch_size_runs, learning_rate_runs, recipe
from lmcore.run import RunFolder
from lmcore.workbook.jobs.sweep_definition import measured_cells, train_cells, write_definition
from lmcore.workbook.jobs.sweep_table import MEASURED, summary, write_sweep_table
from lmcore.workbook.jobs.sweeps import cell_names, cell_states, load_definition, run_definition, run_folder, unfinished
from lmcore.workbook.report.tables import read_results, run_table

PROJECT = Path(__file__).parents[1]


@pytest.fixture
def training(embedded_data) -> dict:
    return training_sweep(embedded_data)


# Definitions


@pytest.mark.parametrize("file", sorted((PROJECT / "papermill_jobs" / "sweeps").glob("*.yaml")), ids=lambda f: f.stem)
def test_definitions_of_the_course_can_be_read_and_say_what_they_are_for(file):
    definition = load_definition(file.stem)
    assert definition.name == file.stem
    assert definition.about
    assert len(cell_names(definition)) >= 6


def test_the_command_that_each_definition_gives_for_a_laptop_is_accepted():
    for file in (PROJECT / "papermill_jobs" / "sweeps").glob("*.yaml"):
        (line,) = [line for line in file.read_text().splitlines() if "--set" in line]
        definition = load_definition(file.stem, line.partition("--set ")[2].split())
        cells = train_cells(definition) if definition.kind == "train" else measured_cells(definition)
        assert all(config.model.d_model == 64 for config in cells.values())


def test_grids_are_the_runs_of_the_recipes(tmp_path, training):
    rates = loaded(tmp_path, training | {"base": {"recipe": "smoke", "steps": 60}})
    base = recipe("smoke", "data", 512, 60)
    assert train_cells(rates, "data", 512) == learning_rate_runs(base, RATES)
    batches = {"base": {"recipe": "smoke", "tokens": 32_768}, "vary": {"batch_size": [1, 8, 64]}}
    whole = recipe("smoke", "data", 512)
    expected = batch_size_runs(whole, [1, 8, 64], 32_768)
    assert train_cells(loaded(tmp_path, training | batches), "data", 512) == expected


def test_every_combination_and_named_variants(tmp_path, training):
    grid = training | {"vary": {"optimizer.learning_rate": [1e-3, 1e-2], "model.norm": ["pre", "none"]}}
    assert cell_names(loaded(tmp_path, grid)) == [
        "lr_0.001_norm_pre", "lr_0.001_norm_none", "lr_0.01_norm_pre", "lr_0.01_norm_none"
    ]  # fmt: skip
    named = {key: value for key, value in training.items() if key != "vary"}
    named["runs"] = {"plain": {}, "post": {"model.norm": "post"}, "tied": {"recipe": "tied", "steps": 3}}
    cells = train_cells(loaded(tmp_path, named))
    assert list(cells) == ["plain", "post", "tied"]
    assert replace(cells["plain"], model__norm="post") == cells["post"]
    assert (cells["tied"].model.tie_embeddings, cells["tied"].model.d_model, cells["tied"].steps) == (True, 16, 3)


def test_benchmarks_are_the_cells_of_the_benchmark_command(tmp_path):
    definition = loaded(tmp_path, BENCHMARK | {"vary": {"context_length": [8, 16], "precision": ["fp32", "bf16"]}})
    options = BenchmarkConfig(
        size=("smoke",), device="cpu", warmup_steps=0, steps=1, passes=("forward",), batch_size=1,
        context_length=(8, 16), precision=("fp32", "bf16"),
    )  # fmt: skip
    assert measured_cells(definition) == benchmark_cases(options)
    other = loaded(tmp_path, BENCHMARK | {"vary": {"model.dropout": [0.0, 0.1]}})
    assert [name.partition("-b1-")[2] for name in cell_names(other)] == ["dropout_0", "dropout_0.1"]
    both = loaded(tmp_path, BENCHMARK | {"vary": {"ops": ["plain", "fused"]}})
    assert cell_names(both) == [f"smoke-256-fp32-forward-{word}b1" for word in ("", "fused-")]
    with pytest.raises(UserError, match=r"ops fused: The fused step compiles nothing"):
        loaded(tmp_path, BENCHMARK | {"vary": {"compile": [True], "ops": ["fused"]}})
    named = {key: value for key, value in BENCHMARK.items() if key != "vary"}
    named["runs"] = {"plain": {}, "fused": {"attention": "sdpa"}}
    assert [config.model.attention for config in measured_cells(loaded(tmp_path, named)).values()] == ["plain", "sdpa"]


def test_an_override_may_list_names(tmp_path, training):
    """As numbers: size=small,medium is two values, with a space after the comma or without."""
    file = tmp_path / "sizes.yaml"
    file.write_text("name: sizes\nkind: benchmark\nbase: {passes: forward}\nvary: {size: [smoke]}\n")
    assert load_definition(file, ["size=smoke, laptop"]).vary == {"size": ["smoke", "laptop"]}
    assert load_definition(file, ["passes=forward,train_step"]).base == {"passes": ["forward", "train_step"]}
    assert len(cell_names(load_definition(file, ["size=smoke,laptop", "passes=forward,train_step"]))) == 4
    norms = loaded(tmp_path, training | {"vary": {"model.norm": ["pre"]}}, "model.norm=none,post")
    assert norms.vary["model.norm"] == ["none", "post"]


def test_overrides_replace_varied_values_and_settings_of_the_base(tmp_path, training):
    definition = loaded(tmp_path, training, "optimizer.learning_rate=1e-2,1e-1", "steps=7", "model.norm=none")
    cells = train_cells(definition)
    assert list(cells) == ["lr_0.01", "lr_0.1"]
    assert all(config.steps == 7 and config.model.norm == "none" for config in cells.values())
    assert cell_names(loaded(tmp_path, training, "optimizer.learning_rate=0.5")) == ["lr_0.5"]
    write_definition(definition, tmp_path / "again.yaml")
    assert load_definition(tmp_path / "again.yaml") == definition


WRONG = {
    "unknown field": ({"grid": {}}, "there is no field grid; the fields are name"),
    "no name": ({"name": None}, "name must be a file name, not None"),
    "another kind": ({"kind": "measure"}, "kind must be one of train, benchmark, not 'measure'"),
    "empty grid": ({"vary": {}}, "give either vary or runs"),
    "no values": ({"vary": {"batch_size": []}}, "vary.batch_size needs a list of values"),
    "one value": ({"vary": {"batch_size": 4}}, "vary.batch_size needs a list of values"),
    "both": ({"runs": {"a": {}}}, "give either vary or runs"),
    "unknown setting": ({"vary": {"optimizer.rate": [1]}}, "optimizer.rate 1: OptimizerConfig has no field rate"),
    "refused value": ({"vary": {"batch_size": [4, 0]}}, "batch_size 0: batch_size must be a positive whole number"),
    "no recipe": ({"base": {}}, "the base needs a recipe"),
    "a list for a recipe": ({"base": {"recipe": ["smoke"]}}, "the base needs a recipe, by its name"),
    "no documents": ({"base": {"recipe": "smoke", "num_documents": "many"}}, "num_documents must be a positive whole"),
    "unknown recipe": ({"base": {"recipe": "nice"}}, "There is no recipe 'nice'"),
    "data varied": ({"vary": {"data": ["a", "b"]}}, "data cannot be varied"),
    "the same twice": ({"vary": {"batch_size": [4, 4]}}, "two cells are named batch_4"),
    "steps and tokens": ({"base": {"recipe": "smoke", "steps": 3, "tokens": 4096}}, "say the same twice"),
    "base a list": ({"base": ["recipe"]}, "base must be a mapping"),
    "a name as a path": ({"vary": {}, "runs": {"../a": {}}}, "the name of runs.../a must be a file name"),
    "no mapping": ({"vary": {}, "runs": {"a": None}}, "runs.a must be a mapping of settings"),
}


@pytest.mark.parametrize(("change", "sentence"), WRONG.values(), ids=WRONG)
def test_wrong_definitions_are_refused_by_file_and_field(tmp_path, training, change, sentence, capsys):
    path = written(tmp_path, training | change)
    assert main(["sweep", "run", str(path), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"lmcore: {path}")
    assert sentence in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_files_that_are_no_definitions_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"There is no sweep 'nothing' in .*learning_rate"):
        load_definition("nothing")
    with pytest.raises(UserError, match=r"There is no sweep definition .*nothing\.yaml"):
        load_definition(tmp_path / "nothing.yaml")
    for text, sentence in (
        ("a: [", "line 1: not YAML"),
        ("- a", "must be a mapping with name, kind"),
        ("kind: train", "the field name is missing"),
        ("name: a\nkind: train\nruns:\n  b: {}\n  b: {}\n", "line 4: not YAML .b is there twice"),
    ):
        (tmp_path / "wrong.yaml").write_text(text)
        with pytest.raises(UserError, match=sentence):
            load_definition(tmp_path / "wrong.yaml")


# Cells


def test_tasks_do_their_cells_and_none_twice(tmp_path, training, capsys):
    definition, out = loaded(tmp_path, training), tmp_path / "out"
    assert unfinished(definition, out) == [0, 1, 2]
    assert run_definition(definition, out, task=1) == 0
    assert unfinished(definition, out) == [0, 2]
    written_at = run_folder(out, "lr_0.01").metrics_file.stat().st_mtime_ns
    capsys.readouterr()
    assert run_definition(definition, out, task=1) == 0
    assert "lr_0.01: skipped, it is finished: complete." in capsys.readouterr().out
    assert run_definition(definition, out) == 0
    assert run_folder(out, "lr_0.01").metrics_file.stat().st_mtime_ns == written_at
    assert unfinished(definition, out) == []
    with pytest.raises(UserError, match="rates has tasks 0 to 2; there is no task 3"):
        run_definition(definition, out, task=3)
    with pytest.raises(UserError, match="counts from 0"):
        run_definition(definition, out, task=-1)


def test_a_diverged_run_is_a_result_and_a_failed_one_is_tried_again(tmp_path, training, monkeypatch, capsys):
    training |= {"vary": {"optimizer.learning_rate": [0.01, 1e30]}}
    training["base"] |= {"optimizer.name": "sgd", "optimizer.max_grad_norm": None, "optimizer.warmup_steps": 0}
    definition, out = loaded(tmp_path, training), tmp_path / "out"

    def broken(*_):
        raise ZeroDivisionError("a fault in the program")

    with monkeypatch.context() as fault:
        fault.setattr("lmcore.train.PlainStep.__call__", broken)
        assert run_definition(definition, out) == 1
    state, reason = cell_states(definition, out)["lr_0.01"]
    assert (state, reason) == ("failed", "ZeroDivisionError: a fault in the program")
    assert unfinished(definition, out) == [0, 1]
    assert main(["sweep", "table", str(out)]) == 1
    assert "lr_0.01: ZeroDivisionError: a fault in the program" in capsys.readouterr().out
    assert run_definition(definition, out) == 0
    assert [state for state, _ in cell_states(definition, out).values()] == ["complete", "diverged"]
    assert unfinished(definition, out) == []
    assert main(["sweep", "table", str(out)]) == 0


def test_a_cell_that_is_refused_by_its_data_is_a_failed_row(tmp_path, training):
    training |= {"vary": {"model.context_length": [16, 1_000_000]}}
    definition, out = loaded(tmp_path, training), tmp_path / "out"
    assert run_definition(definition, out) == 1
    table, _ = write_sweep_table(definition, out)
    assert list(table["outcome"]) == ["complete", "failed"]
    assert "training part" in table["reason"][1]


def test_a_changed_definition_neither_overwrites_nor_loses(tmp_path, training, capsys):
    out = tmp_path / "out"
    assert run_definition(loaded(tmp_path, training), out, task=0) == 0
    longer = loaded(tmp_path, training, "steps=5", "optimizer.learning_rate=1e-3,5e-2")
    assert unfinished(longer, out) == [0, 1]
    with pytest.raises(UserError, match=r"lr_0.001 was made with other settings: .*steps \(4 there, 5 here\)"):
        run_definition(longer, out)
    assert "the definition has changed" in capsys.readouterr().out
    assert run_definition(longer, out, task=1) == 0
    table, _ = write_sweep_table(longer, out)
    found = list(table[["name", "steps", "outcome", "in_definition"]].itertuples(index=False, name=None))
    assert found == [
        ("lr_0.001", 5, "not run", True),
        ("lr_0.05", 5, "complete", True),
        ("lr_0.001", 4, "complete", False),
    ]
    assert "1 of them are not, or no longer, in the definition" in summary(longer, table)
    with pytest.raises(UserError, match="holds the train sweep rates; choose another --out"):
        run_definition(loaded(tmp_path, BENCHMARK), out)


def test_two_tasks_on_one_cell(tmp_path, training, capsys):
    definition, out = loaded(tmp_path, training), tmp_path / "out"
    with run_folder(out, "lr_0.01").lock():
        assert cell_states(definition, out)["lr_0.01"] == ("running", None)
        with pytest.raises(UserError, match="Another process is using the run folder"):
            run_definition(definition, out, task=1)
        assert run_definition(definition, out) == 0
        assert "lr_0.01: left to the process that is training it" in capsys.readouterr().out
        table, _ = write_sweep_table(definition, out)
        assert list(table["outcome"]) == ["complete", "running", "complete"]
    assert unfinished(definition, out) == [1]


# The table


def test_the_table_has_every_cell_once_in_whatever_order_they_ended(tmp_path, training):
    definition, out = loaded(tmp_path, training), tmp_path / "out"
    for task in (2, 0):
        assert run_definition(definition, out, task) == 0
    table, file = write_sweep_table(definition, out)
    assert file == out / "results" / "rates.json"
    read, provenance, notes = read_results(file)
    assert list(read["name"]) == ["lr_0.001", "lr_0.01", "lr_0.1"]
    assert list(read["outcome"]) == ["complete", "not run", "complete"]
    assert list(read["optimizer.learning_rate"]) == RATES
    assert provenance["runs"] == 2
    assert provenance["torch"]
    assert notes["sweep"]["name"] == "rates"
    assert file.with_suffix(".csv").read_text().count("\n") == 4
    curves, _, _ = read_results(out / "results" / "rates_curves.json")
    assert set(curves["name"]) == {"lr_0.001", "lr_0.1"}
    assert "rates: 3 cells: 2 complete, 1 not run." in summary(definition, table)
    assert run_definition(definition, out) == 0
    assert list(write_sweep_table(definition, out)[0]["outcome"]) == ["complete"] * 3


def test_the_table_of_a_sweep_that_has_not_begun(tmp_path, training, capsys):
    path, out = written(tmp_path, training), tmp_path / "out"
    assert main(["sweep", "table", str(out)]) == 2
    assert "holds no sweep" in capsys.readouterr().err
    assert main(["sweep", "table", str(out), "--definition", str(path)]) == 0
    assert "rates: 3 cells: 3 not run." in capsys.readouterr().out
    assert main(["sweep", "table", str(out), "--set", "steps=3"]) == 2
    assert "give --definition with it" in capsys.readouterr().err


def test_a_row_of_a_run_that_has_not_begun_has_the_columns_of_one_that_has(tmp_path, training):
    definition, out = loaded(tmp_path, training), tmp_path / "out"
    planned, _ = write_sweep_table(definition, out)
    assert run_definition(definition, out, task=0) == 0
    assert set(run_table({"a": run_folder(out, "lr_0.001")}, 1.0)) <= set(planned)
    assert planned[list(MEASURED)].isna().all(axis=None)


def test_damaged_runs_are_rows_and_are_mended(tmp_path, training):
    definition, out = loaded(tmp_path, training), tmp_path / "out"
    assert run_definition(definition, out) == 0
    run = RunFolder(out / "runs" / "lr_0.001")
    run.status_file.write_text("{half")
    table, _ = write_sweep_table(definition, out)
    assert list(table["name"]) == ["lr_0.001", "lr_0.01", "lr_0.1"]
    assert list(table["outcome"]) == ["failed", "complete", "complete"]
    assert "status.json" in table["reason"][0]
    assert unfinished(definition, out) == [0]
    assert run_definition(definition, out) == 0
    weights = bytearray(run.last_weights.read_bytes())
    weights[-1] ^= 1
    run.last_weights.write_bytes(weights)
    assert unfinished(definition, out) == [0]
    assert run_definition(definition, out) == 0
    assert unfinished(definition, out) == []


# Benchmarks


def test_benchmark_cases_by_number_and_their_table(tmp_path, capsys):
    definition, out = loaded(tmp_path, BENCHMARK), tmp_path / "out"
    names = cell_names(definition)
    assert run_definition(definition, out, task=1) == 0
    assert unfinished(definition, out) == [0]
    table, file = write_sweep_table(definition, out)
    assert list(table["cell"]) == names
    assert list(table["outcome"]) == ["not run", "complete"]
    before = (out / "cells" / f"{names[1]}.json").read_text()
    assert run_definition(definition, out) == 0
    assert (out / "cells" / f"{names[1]}.json").read_text() == before
    (out / "cells" / f"{names[0]}.json").write_text(before[:100])
    assert cell_states(definition, out)[names[0]][0] == "not run"
    assert unfinished(definition, out) == [0]
    assert run_definition(definition, out, task=0) == 0
    table, _ = write_sweep_table(definition, out)
    assert list(table["outcome"]) == ["complete", "complete"]
    assert read_results(file)[1]["cells"] == 2
    samples, _, _ = read_results(out / "results" / "times_samples.json")
    assert list(samples["cell"]) == names
    assert "times: 2 cells: 2 complete." in summary(definition, table)
    capsys.readouterr()
    changed = loaded(tmp_path, BENCHMARK, "steps=2")
    table, _ = write_sweep_table(changed, out)
    assert list(table["outcome"]) == ["not run", "not run", "complete", "complete"]
    assert list(table["in_definition"]) == [True, True, False, False]
    assert run_definition(changed, out, task=0) == 0
    assert f"{names[0]}: was measured with other settings, and is measured again" in capsys.readouterr().out
    assert list(write_sweep_table(changed, out)[0]["outcome"]) == ["complete", "not run", "complete"]


def test_a_benchmark_that_fails_is_a_row(tmp_path, monkeypatch, capsys):
    definition, out = loaded(tmp_path, BENCHMARK), tmp_path / "out"
    assert run_definition(definition, out) == 0
    file = out / "cells" / f"{cell_names(definition)[0]}.json"
    failed = read_json(file) | {"outcome": "failed", "reason": "A fault.", "result": None}
    file.write_text(json.dumps(failed))
    assert unfinished(definition, out) == [0]
    assert main(["sweep", "table", str(out)]) == 1
    assert f"{file.stem}: A fault." in capsys.readouterr().out
    assert main(["sweep", "run", str(tmp_path / "definition.yaml"), "--out", str(out), "--task", "0"]) == 0
    assert main(["sweep", "table", str(out)]) == 0


def test_a_device_that_is_not_there_is_refused_before_anything_is_measured(tmp_path):
    definition, out = loaded(tmp_path, BENCHMARK, "device=cuda:9"), tmp_path / "out"
    with pytest.raises(UserError, match="cuda:9"):
        run_definition(definition, out, task=0)
    assert not (out / "cells").exists()
