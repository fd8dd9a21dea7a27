"""Sweeps as many jobs: definitions, runs by number, processes side by side, one table of everything."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from sweep_definitions import BENCHMARK, RATES, loaded, training_sweep, written

from lmcore.cli import main
from lmcore.config import replace
from lmcore.errors import UserError
from lmcore.files import read_json, write_json
from lmcore.profiling.cases import BenchmarkConfig, benchmark_cases
from lmcore.recipes import batch_size_runs, learning_rate_runs, recipe
from lmcore.workbook.jobs.sweep_definition import load_definition, run_names, runs_of, write_definition
from lmcore.workbook.jobs.sweeps import run_definition, run_folder, run_states, summary, unfinished, write_sweep_table
from lmcore.workbook.report.tables import read_results, run_table

DATA = SimpleNamespace(folder="data", vocab_size=512)
NORMS = {"model.norm": ["pre", "none"]}


@pytest.fixture
def training(embedded_data) -> dict:
    return training_sweep(embedded_data)


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


def column(definition, out, name: str = "outcome") -> list:
    return list(write_sweep_table(definition, out)[0][name])


# Definitions


@pytest.mark.parametrize(
    "file", sorted(Path(__file__).parents[1].glob("papermill_jobs/sweeps/*.yaml")), ids=lambda f: f.stem
)
def test_definitions_of_the_course_and_the_command_that_each_gives_for_a_laptop(file):
    definition = load_definition(file.stem)
    assert definition.name == file.stem
    assert definition.about
    assert len(run_names(definition)) >= 6
    (line,) = [line for line in file.read_text().splitlines() if "--set" in line]
    small = load_definition(file.stem, line.partition("--set ")[2].split())
    assert all(config.model.d_model == 64 for config in runs_of(small).values())


def test_grids_are_the_runs_of_the_recipes(tmp_path, training):
    rates = loaded(tmp_path, training | {"base": {"recipe": "smoke", "steps": 60}})
    assert runs_of(rates, DATA) == learning_rate_runs(recipe("smoke", "data", 512, 60), RATES)
    batches = {"base": {"recipe": "smoke", "tokens": 32_768}, "vary": {"batch_size": [1, 8, 64]}}
    expected = batch_size_runs(recipe("smoke", "data", 512), [1, 8, 64], 32_768)
    assert runs_of(loaded(tmp_path, training | batches), DATA) == expected


def test_every_combination_and_named_variants(tmp_path, training):
    grid = loaded(tmp_path, training | {"vary": {"optimizer.learning_rate": [1e-3, 1e-2]} | NORMS})
    assert run_names(grid) == ["lr_0.001_norm_pre", "lr_0.001_norm_none", "lr_0.01_norm_pre", "lr_0.01_norm_none"]
    variants = {"plain": {}, "post": {"model.norm": "post"}, "tied": {"recipe": "tied", "steps": 3}}
    runs = runs_of(loaded(tmp_path, training | {"vary": {}, "runs": variants}))
    assert list(runs) == ["plain", "post", "tied"]
    assert replace(runs["plain"], model__norm="post") == runs["post"]
    assert (runs["tied"].model.tie_embeddings, runs["tied"].model.d_model, runs["tied"].steps) == (True, 16, 3)


def test_benchmarks_are_the_cells_of_the_benchmark_command(tmp_path):
    definition = loaded(tmp_path, BENCHMARK | {"vary": {"context_length": [8, 16], "precision": ["fp32", "bf16"]}})
    values = {"size": ("smoke",), "mode": ("forward",), "context_length": (8, 16), "precision": ("fp32", "bf16")}
    assert runs_of(definition) == benchmark_cases(BenchmarkConfig(**BENCHMARK["base"] | values))
    other = loaded(tmp_path, BENCHMARK | {"vary": {"model.dropout": [0.0, 0.1]}})
    assert [name.partition("-b1-")[2] for name in run_names(other)] == ["dropout_0", "dropout_0.1"]
    both = loaded(tmp_path, BENCHMARK | {"vary": {"ops": ["plain", "fused"]}})
    assert run_names(both) == [f"smoke-256-fp32-forward-{word}b1" for word in ("", "fused-")]
    with pytest.raises(UserError, match=r"ops fused: The fused step compiles nothing"):
        loaded(tmp_path, BENCHMARK | {"vary": {"compile": [True], "ops": ["fused"]}})
    named = loaded(tmp_path, BENCHMARK | {"vary": {}, "runs": {"plain": {}, "fused": {"attention": "sdpa"}}})
    assert [config.model.attention for config in runs_of(named).values()] == ["plain", "sdpa"]


def test_overrides_replace_varied_values_and_settings_of_the_base(tmp_path, training):
    definition = loaded(tmp_path, training, "optimizer.learning_rate=1e-2,1e-1", "steps=7", "model.norm=none")
    runs = runs_of(definition)
    assert list(runs) == ["lr_0.01", "lr_0.1"]
    assert all(config.steps == 7 and config.model.norm == "none" for config in runs.values())
    write_definition(definition, tmp_path / "again.yaml")
    assert load_definition(tmp_path / "again.yaml") == definition
    assert run_names(loaded(tmp_path, training, "optimizer.learning_rate=0.5")) == ["lr_0.5"]
    assert loaded(tmp_path, training | {"vary": NORMS}, "model.norm=none,post").vary == {"model.norm": ["none", "post"]}
    names = ["size=smoke, laptop", "mode=forward,train_step"]  # with a space after the comma or without
    sizes = loaded(tmp_path, BENCHMARK | {"base": {"mode": "forward"}, "vary": {"size": ["smoke"]}}, *names)
    assert (sizes.vary, sizes.base) == ({"size": ["smoke", "laptop"]}, {"mode": ["forward", "train_step"]})
    assert len(run_names(sizes)) == 4


WRONG = {
    "unknown field": ({"grid": {}}, "SweepDefinition has no field grid; its fields are name"),
    "no name": ({"name": None}, "SweepDefinition.name must be of type str, not None"),
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
    "the same twice": ({"vary": {"batch_size": [4, 4]}}, "two runs are named batch_4"),
    "steps and tokens": ({"base": {"recipe": "smoke", "steps": 3, "tokens": 4096}}, "say the same twice"),
    "a value and a mapping": ({"base": {"recipe": "smoke", "model": 3, "model.norm": "pre"}}, "within model, which is"),
    "base a list": ({"base": ["recipe"]}, "base must be a mapping"),
    "a number for a name": ({"base": {1: 2}}, "base: the names [1] must be texts"),
    "a name as a path": ({"vary": {}, "runs": {"../a": {}}}, "a name must be a file name, not '../a'"),
    "no mapping": ({"vary": {}, "runs": {"a": None}}, "runs.a must be a mapping of settings"),
    "no YAML": ("a: [", "line 1: not YAML"),
    "bytes": ("\0", "it cannot be read (unacceptable character"),
    "a list": ("- a", "it must be a mapping with name, kind"),
    "nothing": ("kind: train", "a name must be a file name, not ''"),
    "a key twice": ("name: a\nkind: train\nruns:\n  b: {}\n  b: {}\n", "line 4: not YAML (b is there twice"),
}


@pytest.mark.parametrize(("change", "sentence"), WRONG.values(), ids=WRONG)
def test_wrong_definitions_are_refused_by_file_and_field(tmp_path, out, training, change, sentence, capsys):
    path = written(tmp_path, change if isinstance(change, str) else training | change)
    assert main(["sweep", "run", str(path), "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"lmcore: {path}: ")
    assert sentence in said
    assert said.count("\n") == 1
    assert not out.exists()


def test_definitions_that_are_not_there(tmp_path):
    with pytest.raises(UserError, match=r"There is no sweep 'nothing' in .*learning_rate"):
        load_definition("nothing")
    with pytest.raises(UserError, match=r"There is no sweep definition .*nothing\.yaml"):
        load_definition(tmp_path / "nothing.yaml")


# Training runs


def test_tasks_do_their_runs_and_none_twice_and_the_table_has_each_once(tmp_path, out, training, capsys):
    definition = loaded(tmp_path, training)
    assert main(["sweep", "table", str(out)]) == 2
    assert "There is no sweep definition" in capsys.readouterr().err
    assert main(["sweep", "table", str(out), "--definition", str(tmp_path / "definition.yaml")]) == 0
    assert "rates: 3 runs: 3 not run." in capsys.readouterr().out
    assert main(["sweep", "table", str(out), "--set", "steps=3"]) == 2
    assert "give --definition with it" in capsys.readouterr().err
    planned, _ = write_sweep_table(definition, out)
    assert unfinished(definition, out) == [0, 1, 2]
    for task in (2, 0):
        assert run_definition(definition, out, task) == 0
    assert unfinished(definition, out) == [1]
    table, file = write_sweep_table(definition, out)
    read, provenance, notes = read_results(out / "results" / "rates.json")
    assert list(read["name"]) == ["lr_0.001", "lr_0.01", "lr_0.1"]
    assert list(read["outcome"]) == ["complete", "not run", "complete"]
    assert list(read["optimizer.learning_rate"]) == RATES
    assert set(run_table({"a": run_folder(out, "lr_0.001")})) <= set(planned)
    assert planned[["final_valid_loss", "max_spike", "seconds", "device"]].isna().all(axis=None)
    assert (provenance["runs"], bool(provenance["torch"]), notes["sweep"]["name"]) == (2, True, "rates")
    assert file.with_suffix(".csv").read_text().count("\n") == 4
    assert set(read_results(out / "results" / "rates_curves.json")[0]["name"]) == {"lr_0.001", "lr_0.1"}
    assert "rates: 3 runs: 2 complete, 1 not run." in summary(definition, table)
    written_at = run_folder(out, "lr_0.1").metrics_file.stat().st_mtime_ns
    assert run_definition(definition, out) == 0
    assert "lr_0.1: skipped, it is finished: complete." in capsys.readouterr().out
    assert run_folder(out, "lr_0.1").metrics_file.stat().st_mtime_ns == written_at
    assert unfinished(definition, out) == []
    for task in (3, -1):
        with pytest.raises(UserError, match=f"rates has tasks 0 to 2; there is no task {task}"):
            run_definition(definition, out, task)


def test_a_diverged_run_is_a_result_and_a_failed_one_is_tried_again(tmp_path, out, training, monkeypatch, capsys):
    sgd = {"optimizer.name": "sgd", "optimizer.max_grad_norm": None, "optimizer.warmup_steps": 0}
    runs = {"good": {}, "high": {"optimizer.learning_rate": 1e30}, "long": {"model.context_length": 1_000_000}}
    definition = loaded(tmp_path, training | {"base": training["base"] | sgd, "vary": {}, "runs": runs})

    def broken(*_):
        raise ZeroDivisionError("a fault in the program")

    with monkeypatch.context() as fault:
        fault.setattr("lmcore.train.PlainStep.__call__", broken)
        assert run_definition(definition, out) == 1
    assert run_states(definition, out)["good"] == ("failed", "ZeroDivisionError: a fault in the program")
    assert unfinished(definition, out) == [0, 1, 2]
    assert main(["sweep", "table", str(out)]) == 1
    assert "good: ZeroDivisionError: a fault in the program" in capsys.readouterr().out
    assert run_definition(definition, out) == 1
    assert column(definition, out) == ["complete", "diverged", "failed"]
    assert "training part" in column(definition, out, "reason")[2]  # what the data refuse
    assert unfinished(definition, out) == [2]
    assert [run_definition(definition, out, task) for task in range(3)] == [0, 0, 1]


def test_a_changed_definition_neither_overwrites_nor_loses(tmp_path, out, training, capsys):
    assert run_definition(loaded(tmp_path, training), out, task=0) == 0
    longer = loaded(tmp_path, training, "steps=5", "optimizer.learning_rate=1e-3,5e-2")
    assert unfinished(longer, out) == [0, 1]
    with pytest.raises(UserError, match=r"lr_0.001 was made with other settings: .*steps \(4 there, 5 here\)"):
        run_definition(longer, out)
    assert "the definition has changed" in capsys.readouterr().out
    assert run_definition(longer, out, task=1) == 0
    table, _ = write_sweep_table(longer, out)
    assert table[["name", "steps", "outcome", "in_definition"]].to_numpy().tolist() == [
        ["lr_0.001", 5, "not run", True], ["lr_0.05", 5, "complete", True], ["lr_0.001", 4, "complete", False]
    ]  # fmt: skip
    assert "1 of them are not, or no longer, in the definition" in summary(longer, table)
    with pytest.raises(UserError, match="holds the train sweep rates; choose another --out"):
        run_definition(loaded(tmp_path, BENCHMARK), out)


def test_two_tasks_on_one_run(tmp_path, out, training, capsys):
    definition = loaded(tmp_path, training)
    with run_folder(out, "lr_0.01").lock():
        assert run_states(definition, out)["lr_0.01"] == ("running", None)
        with pytest.raises(UserError, match="Another process is using the run folder"):
            run_definition(definition, out, task=1)
        assert run_definition(definition, out) == 0
        assert "lr_0.01: left to the process that is training it" in capsys.readouterr().out
        assert column(definition, out) == ["complete", "running", "complete"]
    assert unfinished(definition, out) == [1]


def test_damaged_runs_are_rows_and_are_repaired(tmp_path, out, training):
    definition = loaded(tmp_path, training)
    assert run_definition(definition, out) == 0
    run = run_folder(out, "lr_0.001")
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
    run_folder(out, "lr_0.1").environment_file.unlink()
    assert column(definition, out) == ["stopped", "complete", "stopped"]
    assert unfinished(definition, out) == [0, 2]
    assert run_definition(definition, out) == 0
    assert unfinished(definition, out) == []


def test_without_the_data_the_runs_are_those_that_were_made_with_them(tmp_path, out, training):
    training["base"] |= {"data": "embedded", "tokenizer": "bpe:300", "num_documents": 100}
    definition = loaded(tmp_path, training)
    assert run_definition(definition, out, task=0) == 0
    (out / "data").rename(tmp_path / "away")
    assert column(definition, out) == ["complete", "not run", "not run"]


# Measurements


def test_measurements_by_number_and_their_table(tmp_path, out, capsys):
    definition = loaded(tmp_path, BENCHMARK)
    names = run_names(definition)
    first, second = (out / "cases" / f"{name}.json" for name in names)
    assert run_definition(definition, out, task=1) == 0
    assert unfinished(definition, out) == [0]
    assert column(definition, out, "case") == names
    assert column(definition, out) == ["not run", "complete"]
    before = second.read_text()
    assert run_definition(definition, out) == 0
    assert second.read_text() == before
    first.write_text(before[:100])
    assert run_states(definition, out)[names[0]][0] == "not run"
    assert unfinished(definition, out) == [0]
    assert main(["sweep", "run", str(tmp_path / "definition.yaml"), "--out", str(out), "--task", "0"]) == 0
    assert "is damaged; the run is measured again" in capsys.readouterr().out
    table, file = write_sweep_table(definition, out)
    assert read_results(file)[1]["cases"] == 2
    assert list(read_results(out / "results" / "times_samples.json")[0]["case"]) == names
    assert "times: 2 runs: 2 complete." in summary(definition, table)
    write_json(first, read_json(first) | {"outcome": "failed", "reason": "A fault.", "result": None})
    assert unfinished(definition, out) == [0]
    assert main(["sweep", "table", str(out)]) == 1
    assert f"{names[0]}: A fault." in capsys.readouterr().out
    first.write_text(second.read_text())
    changed = loaded(tmp_path, BENCHMARK, "steps=2")
    assert column(changed, out) == ["not run", "not run", "complete", "complete"]
    assert column(changed, out, "in_definition") == [True, True, False, False]
    assert run_definition(changed, out, task=0) == 0
    assert f"{names[0]}: It was measured with other settings, and is measured again" in capsys.readouterr().out
    assert column(changed, out) == ["complete", "not run", "complete"]


def test_a_device_that_is_not_there_is_refused_before_anything_is_measured(tmp_path, out):
    with pytest.raises(UserError, match="cuda:9"):
        run_definition(loaded(tmp_path, BENCHMARK, "device=cuda:9"), out, task=0)
    assert not (out / "cases").exists()
