"""Fields missing in a saved configuration take their defaults: runs stay readable when settings are added."""

import json
from pathlib import Path

import golden_library as library
import pytest
import torch
from golden_runs import MIDDLE, STEPS, config_of, copy_of, results, stopped_copy
from safetensors import safe_open
from safetensors.torch import save_file

FIELDS = ["model.checkpoint_every", "model.attention", "model.rope_theta", "optimizer.eps", "ops", "deterministic"]


def without(config: dict, field: str) -> dict:
    """Nested settings without a field, as an earlier version would have saved them."""
    section, _, name = field.rpartition(".")
    if not section:
        return {key: value for key, value in config.items() if key != field}
    return config | {section: without(config[section], name)}


def forget(run, field: str) -> None:
    """Takes a field out of everything that a run folder holds."""
    run.config_file.write_text(json.dumps(without(library.read_json(run.config_file), field)))
    starts = [start | {"config": without(start["config"], field)} for start in run.starts()]
    run.environment_file.write_text(json.dumps(starts))
    if field.startswith("model."):
        name = field.removeprefix("model.")
        for path in run.checkpoints():
            forget_in_checkpoint(path, name)
        for path in (run.best_weights, run.last_weights):
            if path.exists():
                forget_in_weights(path, name)


def forget_in_checkpoint(path: Path, field: str) -> None:
    content = torch.load(path, weights_only=True)
    kind = content.pop("lmcore_format")
    content.pop("digest")
    content["model_config"] = without(content["model_config"], field)
    torch.save(content | {"lmcore_format": kind, "digest": library.digest(content)}, path)


def forget_in_weights(path: Path, field: str) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        weights = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    metadata["model_config"] = json.dumps(without(json.loads(metadata["model_config"]), field))
    save_file(weights, path, metadata)


@pytest.mark.parametrize("field", FIELDS)
def test_a_complete_run_stays_complete(field, tmp_path, corpus):
    run = copy_of("plain", tmp_path)
    config, before = config_of(run, corpus), results(run)
    forget(run, field)
    assert f'"{field.rpartition(".")[2]}"' not in run.config_file.read_text()
    assert config_of(run, corpus) == config
    weights = run.last_weights.read_bytes()
    assert library.train(config, run).state == "complete"
    assert run.last_weights.read_bytes() == weights, "it was trained again"
    assert results(run) == before
    assert library.load_model(run.best_weights).config == config.model


@pytest.mark.parametrize("field", FIELDS)
def test_a_stopped_run_is_resumed(field, tmp_path, corpus, capsys):
    straight, run = stopped_copy("plain", tmp_path / "whole"), stopped_copy("plain", tmp_path / "old")
    config = config_of(run, corpus)
    forget(run, field)
    for each in (straight, run):
        assert library.train(config, each).step == STEPS
    assert capsys.readouterr().out.count(f"resuming from step {MIDDLE}") == 2
    assert results(run) == results(straight)


def test_a_field_whose_default_is_another_is_still_refused(tmp_path, corpus):
    run = stopped_copy("tied", tmp_path)
    path = run.checkpoint_file(MIDDLE)
    forget_in_checkpoint(path, "tie_embeddings")
    model = library.TransformerLM(run.config().model)
    update, _ = library.training_step(model, run.config(), torch.device("cpu"))
    with pytest.raises(library.UserError, match=r"another architecture: tie_embeddings \(False there, True here\)\."):
        library.restore(library.read_checkpoint(path), model, update.optimizer)
    config = config_of(run, corpus)
    forget(run, "model.tie_embeddings")
    with pytest.raises(library.UserError, match=r"model.tie_embeddings \(False there, True here\)"):
        library.train(config, run)


def test_a_measurement_is_not_repeated_for_a_field_that_it_did_not_have():
    config = library.workload_config("smoke", 32)
    record = {"task": "timing", "config": json.loads(json.dumps(library.to_dict(config)))}
    assert library.is_of(record, "timing", config)
    assert not library.is_of(record, "another", config)
    for field in ("ops", "model.checkpoint_every", "optimizer.eps"):
        assert library.is_of(record | {"config": without(record["config"], field)}, "timing", config)
    other = library.replace(config, model__attention="sdpa")
    assert not library.is_of(record, "timing", other)
    assert not library.is_of(record | {"config": without(record["config"], "model.attention")}, "timing", other)
    assert not library.is_of(record | {"config": record["config"] | {"colour": "blue"}}, "timing", config)
