"""Run folders written at 36acd2f load, resume and count as complete."""

import json
import shutil

import golden_library as library
import pytest
import torch
from golden_runs import MIDDLE, STEPS, VARIANTS, base_config, config_of, copy_of, prepare_corpus, results, stopped_copy

CLOSE = {"rtol": 2e-4, "atol": 2e-6}
"""Between processors and versions of PyTorch, after twelve steps; an error in a step changes the second digit."""

IN_HALF = {"rtol": 5e-3, "atol": 5e-4}
"""With half precision in between."""


def close(name: str) -> dict[str, float]:
    return IN_HALF if name == "fp16" else CLOSE


@pytest.mark.parametrize("name", VARIANTS)
def test_the_settings_are_those_that_were_saved(name, tmp_path):
    run = copy_of(name, tmp_path)
    assert run.config() == library.replace(base_config("tests/goldens/corpus"), **VARIANTS[name])
    saved, read = library.read_json(run.config_file), json.loads(json.dumps(library.to_dict(run.config())))
    for section in ("model", "optimizer"):
        assert saved.pop(section).items() <= read.pop(section).items()
    assert {key: read[key] for key in saved} == saved  # and fields that came later have their defaults
    assert run.environment()["git_commit"].startswith("36acd2f")
    assert run.environment()["git_dirty"] is False


@pytest.mark.parametrize("name", VARIANTS)
def test_a_complete_run_is_not_trained_again(name, tmp_path, corpus):
    run = copy_of(name, tmp_path)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    found = library.train(config_of(run, corpus), run)
    assert (found.state, found.step) == ("complete", STEPS)
    assert found.valid_loss == run.metrics_lines()[-1]["valid_loss"]
    after = {path: path.read_bytes() for path in before}
    changed = {path.name for path in before if before[path] != after[path]}
    assert changed <= {"environment.json"}, "only the start is noted"


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("which", ["best", "last"])
def test_weights_load_and_are_saved_again_bit_for_bit(name, which, tmp_path):
    run = copy_of(name, tmp_path)
    path = {"best": run.best_weights, "last": run.last_weights}[which]
    tensors, notes = library.read_weights(path)
    model = library.load_model(path)
    expected = library.TransformerLM(run.config().model).state_dict()
    assert list(model.state_dict()) == list(expected)
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in tensors.items())
    assert model.config == notes["model_config"] == run.config().model
    notes.pop("model_config")
    library.save_weights(model, tmp_path / "again.safetensors", **notes)
    again, their_notes = library.read_weights(tmp_path / "again.safetensors")
    assert library.digest(again) == library.digest(tensors)
    assert their_notes == notes | {"model_config": model.config}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_loss_of_the_weights_is_the_one_that_was_noted(name, tmp_path, corpus):
    run = copy_of(name, tmp_path)
    tokens = torch.from_numpy(library.open_data(corpus).valid.astype("int64"))
    context = run.config().model.context_length
    count = (len(tokens) - 1) // context
    inputs, targets = (tokens[shift : shift + count * context].view(count, context) for shift in (0, 1))
    with torch.no_grad():
        logits = library.load_model(run.last_weights)(inputs).double()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    assert loss == pytest.approx(run.status()["valid_loss"], rel=2e-3 if name == "fp16" else 2e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_checkpoint_is_taken_over_bit_for_bit(name, tmp_path):
    run = copy_of(name, tmp_path)
    config = run.config()
    content = library.read_checkpoint(run.checkpoint_file(MIDDLE))
    model = library.TransformerLM(config.model)
    update, reason = library.training_step(model, config, torch.device("cpu"))
    assert reason is None
    assert library.restore(content, model, update.optimizer) == MIDDLE
    assert library.digest(model.state_dict()) == library.digest(content["model"])
    assert library.digest(update.optimizer.state_dict()) == library.digest(content["optimizer"])
    update.scaler.load_state_dict(content["extra"]["scaler"])
    assert update.scaler.state_dict() == content["extra"]["scaler"]
    assert bool(content["extra"]["scaler"]) == (name == "fp16")


@pytest.mark.parametrize("name", VARIANTS)
def test_a_stopped_run_is_resumed_and_ends_as_it_did(name, tmp_path, corpus, capsys):
    """Committed numbers come from another processor: within a tolerance. Runs of this one: bit for bit."""
    run = stopped_copy(name, tmp_path / "resumed")
    config = library.replace(config_of(run, corpus), checkpoint_interval=MIDDLE // 2)
    assert library.train(config, run).state == "complete"
    assert f"resuming from step {MIDDLE}" in capsys.readouterr().out
    there, here = copy_of(name, tmp_path / "committed"), results(run)
    assert [line["step"] for line in here["metrics"]] == [line["step"] for line in results(there)["metrics"]]
    assert here["metrics"][: MIDDLE // 2] == results(there)["metrics"][: MIDDLE // 2]
    for mine, theirs in zip(here["metrics"], results(there)["metrics"], strict=True):
        assert mine == pytest.approx(theirs, rel=2e-3 if name == "fp16" else 2e-5)
    weights, expected = (library.read_weights(each.last_weights)[0] for each in (run, there))
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, **close(name), msg=lambda said, key=key: f"{key}: {said}")
    again = library.RunFolder(tmp_path / "again")  # stopped once more on the way
    again.checkpoint_folder.mkdir(parents=True)
    for path in (run.config_file, run.environment_file, run.checkpoint_file(STEPS - MIDDLE // 2), run.best_weights):
        shutil.copy(path, again.path / path.relative_to(run.path))
    assert library.train(config, again).state == "complete"
    assert f"resuming from step {STEPS - MIDDLE // 2}" in capsys.readouterr().out
    assert results(again) == here


@pytest.mark.parametrize("name", VARIANTS)
def test_the_same_run_from_its_beginning(name, tmp_path, corpus):
    there = copy_of(name, tmp_path / "committed")
    config = config_of(there, corpus)
    run = library.RunFolder(tmp_path / "run")
    assert library.train(config, run).state == "complete"
    for mine, theirs in zip(results(run)["metrics"], results(there)["metrics"], strict=True):
        assert mine == pytest.approx(theirs, rel=2e-3 if name == "fp16" else 5e-5)
    mine, theirs = (library.read_checkpoint(each.checkpoint_file(MIDDLE)) for each in (run, there))
    assert library.digest(mine["extra"]["rng"]) == library.digest(theirs["extra"]["rng"])
    if all(library.digest(mine[part]) == library.digest(theirs[part]) for part in ("model", "optimizer")):
        assert results(run) == results(there), "this processor computes as the one that wrote them, and then does not"


def test_another_architecture_is_still_refused(tmp_path, corpus):
    run = stopped_copy("plain", tmp_path)
    content = library.read_checkpoint(run.checkpoint_file(MIDDLE))
    model = library.TransformerLM(library.replace(run.config().model, norm="post"))
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(Exception, match=r"of another architecture: norm \(pre there, post here\)\."):
        library.restore(content, model, optimizer, "It")


def test_the_corpus_is_prepared_as_it_was(tmp_path, corpus):
    there, here = library.open_data(corpus, verify=True), prepare_corpus(tmp_path / "corpus")
    assert here.fingerprint == there.fingerprint
    assert here.manifest == there.manifest
    for name in ("train.bin", "valid.bin", "tokenizer/encoder.json", "tokenizer/vocab.bpe"):
        assert (here.folder / name).read_bytes() == (corpus / name).read_bytes()
