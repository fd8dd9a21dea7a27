"""The memory of a real step on the CPU, and what a block saves for the backward pass."""

import json
import pickle

import pandas as pd
import pytest

from lmcore.accounting import num_parameters
from lmcore.cli import main
from lmcore.profiling.cases import workload_config
from lmcore.profiling.memory import timeline
from lmcore.profiling.memory.profile import FULL_NOTE, profile_memory
from lmcore.profiling.memory.snapshot import Event, History
from lmcore.profiling.memory.timeline import CATEGORIES, explained

CONTEXT, VOCABULARY = 32, 1_000
LOGITS = 4 * 4 * CONTEXT * VOCABULARY
"""Bytes of the logits in float32."""


def config(**changes):
    defaults = {"device": "cpu", "warmup_steps": 1, "mode": "train_step"}
    return workload_config("smoke", CONTEXT, vocab_size=VOCABULARY, **defaults | changes)


PARAMETERS = 4 * num_parameters(config().model)


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline, "LARGEST", 10_000)
        return profile_memory(config(), tmp_path_factory.mktemp("memory"))


def test_what_stands_before_and_after_a_step_is_known_exactly(step):
    batch, angles = 2 * 4 * CONTEXT * 8, 2 * CONTEXT * config().model.d_k // 2 * 4
    before = {"parameters": PARAMETERS, "optimizer state": 2 * PARAMETERS, "other": batch + angles}
    before |= {"gradients": 0, "activations": 0, "temporary": 0}
    assert step["before_by_category"] == before
    assert step["after_by_category"] == before | {"gradients": PARAMETERS, "activations": 4}  # the loss


def test_the_largest_allocations_are_the_logits_and_what_the_loss_makes_of_them(step):
    rows = [row for row in step["largest"] if row["bytes"] == LOGITS]
    assert len(rows) == 5
    assert rows[0] == step["largest"][0]
    assert {row["stage"] for row in rows} == {"forward", "loss", "backward"}
    assert any("Linear.forward" in row["source"] and row["stage"] == "forward" for row in rows)
    assert ["cross_entropy" in row["source"] for row in rows if row["category"] == "activations"] == [True, True]
    assert any(row["source"].endswith("gradient of lm_head.weight") for row in step["largest"])


def test_stages_follow_each_other_and_hold_the_peak(step):
    assert [row["name"] for row in step["stages"]] == ["forward", "loss", "backward", "optimizer"]
    edges = [edge for row in step["stages"] for edge in (row["first_event"], row["last_event"])]
    assert edges == sorted(edges)
    assert step["peak_bytes"] == max(row["peak_bytes"] for row in step["stages"])
    assert step["peak_stage"] in ("loss", "backward")
    assert step["peak_bytes"] == sum(step["peak_by_category"].values())
    assert step["categories"] == list(CATEGORIES) == list(step["timeline"]["bytes"])
    json.dumps(step)


def test_inference_saves_nothing_and_checkpointing_computes_again(tmp_path, step):
    forward = profile_memory(config(mode="forward"), tmp_path)
    assert [row["name"] for row in forward["stages"]] == ["forward"]
    assert (forward["peak_by_category"]["activations"], forward["before_by_category"]["optimizer state"]) == (0, 0)
    less = profile_memory(config(checkpoint_every=1), tmp_path)
    assert less["stages"][0]["end_bytes"] < step["stages"][0]["end_bytes"]
    assert {row["stage"] for row in less["largest"] if row["source"].endswith("computed again")} == {"backward"}


def test_categories_follow_addresses_and_lifetimes():
    stages = {"forward": (0, 3), "loss": (3, 4), "backward": (5, 8), "optimizer": (8, 9)}
    expected = {  # address, first and last state, source → category, stage, source
        (1, 0, 10, "x"): ("parameters", None, "w"),
        (2, 0, 4, "x"): ("other", None, "x"),
        (3, 1, 6, "a"): ("activations", "forward", "a"),  # saved for the backward pass
        (4, 2, 5, "b"): ("temporary", "forward", "b"),  # gone when it begins
        (5, 4, 7, "c"): ("activations", "loss", "c"),
        (6, 5, 10, "d"): ("temporary", None, "d"),  # between loss and backward
        (3, 7, 10, "e"): ("gradients", "backward", "gradient of w"),  # where an activation was
        (7, 8, 8, "lmcore/model.py:1 f"): ("temporary", "backward", "lmcore/model.py:1 f, computed again"),
        (8, 9, 10, "no Python frame"): ("temporary", "optimizer", "optimizer, no Python frame"),
    }
    table = pd.DataFrame([*expected], columns=["address", "first", "last", "source"]).assign(bytes=10)
    history, gradients = History("t", table, range(10), stages), {3: Event(3, 10, "gradient of w", "gradients")}
    found = explained(history, [(0, {1: Event(1, 10, "w", "parameters")}), (8, gradients)]).allocations
    assert [*zip(found["category"], found["stage"], found["source"], strict=True)] == [*expected.values()]


def test_the_command_records_and_prints(tmp_path, capsys):
    options = ["--size", "smoke", "--context-length", "16", "--mode", "forward", "--device", "cpu", "--top", "3"]
    assert main(["memory", *options, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert all(words in said for words in ("storages of tensors", "Linear.forward"))
    result = json.loads((tmp_path / "cases" / "smoke-16-fp32-forward-b4.json").read_text())["result"]
    assert result["peak_bytes"] > result["before_bytes"]


def test_the_command_reads_snapshots_of_others_and_refuses_what_is_none(tmp_path, capsys):
    alloc, path = {"action": "alloc", "addr": 1, "size": 5_000_000, "stream": 0, "frames": []}, tmp_path / "a.pickle"
    larger = [alloc | {"size": 70_000_000}]  # the shorter record has the larger peak
    path.write_bytes(pickle.dumps({"device_traces": [[alloc, alloc | {"addr": 9}], larger], "segments": []}))
    assert main(["memory", "--snapshot", str(path)]) == 0
    said = capsys.readouterr().out
    assert "Device 0: torch.cuda memory history, 2 events. Peak: 10.0 MB" in said
    assert "Device 1: torch.cuda memory history, 1 events. Peak: 70.0 MB" in said
    for options, sentence in (
        (["--snapshot", __file__], "is not a memory snapshot"),
        (["--size", "huge"], "no model size 'huge'"),
    ):
        assert main(["memory", *options]) == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, {"mode": "forward"}, {"precision": "bf16"}, {"checkpoint_every": 1}], ids=str)
def test_the_gpu_s_timeline_has_the_allocator_s_own_peak(tmp_path, changes):
    found = profile_memory(config(device="cuda", **changes), tmp_path)
    assert found["peak_bytes"] == found["torch_requested_peak_bytes"]
    assert found["peak_bytes"] <= found["torch_peak_bytes"]
    assert found["peak_bytes"] == max(row["peak_bytes"] for row in found["stages"])
    assert found["before_by_category"]["parameters"] == PARAMETERS
    if changes.get("mode") != "forward":
        assert found["after_by_category"]["gradients"] == PARAMETERS
    assert (tmp_path / found["snapshot"]["file"]).stat().st_size == found["snapshot"]["bytes"]
    assert FULL_NOTE not in found["notes"]
    assert any("lmcore/model.py" in row["source"] for row in found["largest"])
    assert main(["memory", "--snapshot", str(tmp_path / found["snapshot"]["file"])]) == 0
