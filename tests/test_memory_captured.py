"""The memory of a CUDA graph: counted while it is captured; a peak that misses it is refused."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lmcore.accounting import num_parameters
from lmcore.config import ModelConfig, TrainConfig, model_config, replace
from lmcore.files import read_json
from lmcore.profiling import runner, timing
from lmcore.profiling.cases import WorkloadConfig, workload_config
from lmcore.profiling.memory.predicted import explicit_peak
from lmcore.profiling.plausible import least_bytes, least_flops, refusal
from lmcore.train import Trainer

PROJECT = Path(__file__).parents[1]
RESULTS = PROJECT / "results" / "h200"
STATE, ACTIVATIONS = 100, 70


def test_lines_of_metrics_keep_the_graphs_peak_and_leave_evaluation_out(monkeypatch):
    """The loss over the validation text takes more, and the counter begins anew after it."""
    peaks, lines, trainer = iter([170, 100]), [], object.__new__(Trainer)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks))
    monkeypatch.setattr("lmcore.train.reset_peak_memory", lambda device: None)
    quiet = {"_collect": lambda: None, "_elapsed": lambda: 0.0, "evaluate": lambda: 1.0, "_save_best": lambda: None}
    fields = {"busy_steps": 0, "busy_seconds": 0.0, "peak_flops": None, "trackers": [], "progress": None}
    state = SimpleNamespace(step=1, losses=[1.0], last=(0.0, 0.0), best_valid_loss=9.0)
    others = {"state": state, "ranks": SimpleNamespace(checked=torch.no_grad), "peak_bytes": None}
    others["run"] = SimpleNamespace(append_metrics=lines.append)
    config = TrainConfig(model_config("smoke"), device="cuda")
    vars(trainer).update(quiet | fields | others | {"config": config, "device": torch.device("cuda")})
    for evaluate in (True, False):
        trainer.line_step, state.losses = 1, [1.0]
        trainer.write_line(evaluate)
    assert [line["peak_memory_bytes"] for line in lines] == [170, 170]


# What arithmetic forbids


EXPLICIT = workload_config(
    "small", 1024, vocab_size=10_000, batch_size=4, mode="train_step", precision="bf16", ops="fused", attention="flash"
)


def test_the_least_of_an_explicit_step_by_hand():
    """Weights, gradients and moments, and of every token and layer q, k, v, attention's and the block's output and the
    two branches of the gated network in bfloat16."""
    parameters = 12 * (4 * 768**2 + 3 * 768 * 3072 + 2 * 768) + 2 * 10_000 * 768 + 768
    assert num_parameters(EXPLICIT.model) == parameters
    saved = 4 * 1024 * 12 * (5 * 768 + 2 * 3072)
    assert least_bytes(EXPLICIT) == 16 * parameters + 2 * saved
    predicted = explicit_peak(TrainConfig(EXPLICIT.model, batch_size=4, precision="bf16", ops="fused"), 1)
    assert 0.7 * predicted < least_bytes(EXPLICIT) < predicted
    assert least_bytes(replace(EXPLICIT, mode="forward")) == 4 * parameters
    assert least_bytes(EXPLICIT, shared_by=4) == 12 * parameters // 4 + 2 * saved
    recomputed = replace(EXPLICIT, model__checkpoint_every=1)
    assert least_bytes(recomputed) == 16 * parameters  # what it saves depends on the way


def test_the_flops_that_a_mask_leaves():
    plain = WorkloadConfig(model=model_config("small", context_length=1024), mode="forward")
    pairs = 4 * 12 * (2 * 2 * 1024 * 1024 * 768)  # scores and weighted sums of 4 sequences
    assert least_flops(plain) - least_flops(replace(plain, model__attention="flash")) == pairs // 2
    assert least_flops(replace(plain, mode="train_step")) == 3 * least_flops(plain)


def test_what_cannot_be_is_refused_in_a_sentence():
    least = least_bytes(EXPLICIT)
    assert refusal(EXPLICIT, least, 8e-3, "NVIDIA H200") is None
    assert refusal(EXPLICIT) is None
    found = refusal(EXPLICIT, 16 * num_parameters(EXPLICIT.model))
    assert found.startswith("A training step holds at least 3.04 GB by arithmetic, weights, optimizer state and what")
    assert found.endswith("its peak was measured as 2.06 GB: the measurement misses memory.")
    possible = least_flops(EXPLICIT) / 989.4e12
    assert refusal(EXPLICIT, None, 1.01 * possible, "NVIDIA H200") is None
    assert "the peak of NVIDIA H200 is 989: the clock did not wait" in refusal(
        EXPLICIT, None, 0.99 * possible, "NVIDIA H200"
    )
    assert refusal(EXPLICIT, None, 0.99 * possible, "another chip") is None
    scaled = replace(EXPLICIT, ops="plain", precision="fp16", warmup_steps=0, steps=1)
    assert refusal(scaled, least_bytes(replace(scaled, mode="forward_backward"))) is None  # its update was skipped


def measured_after_the_capture(config, folder):
    wall = [{"wall": 0.5, "warmup": False}]
    return {"device": "NVIDIA H200", "samples": wall, "peak_memory_bytes": 16 * num_parameters(config.model)}


def test_the_runner_refuses_a_peak_without_activations(tmp_path):
    """Also one that an earlier version has recorded: it is measured again."""
    case = replace(EXPLICIT, device="cpu")
    runner.run_cases(measured_after_the_capture, {"graph": case}, tmp_path)
    record = read_json(tmp_path / "graph.json")
    assert (record["outcome"], record["result"]) == ("failed", None)
    assert "the measurement misses memory" in record["reason"]
    old = record | {"outcome": "complete", "reason": None, "result": measured_after_the_capture(case, None)}
    (tmp_path / "graph.json").write_text(json.dumps(old))
    again = runner.run_cases(measured_after_the_capture, {"graph": case}, tmp_path)
    assert again["graph"]["outcome"] == "failed"


TIMED = ("benchmark", "study", "wikitext_cost")


def timed_cases():
    """The rows of the recorded timings, with the cases that they are of."""
    for name in TIMED:
        for row in read_json(RESULTS / f"{name}.json")["rows"]:
            sizes = ("vocab_size", "context_length", "d_model", "num_layers", "num_heads", "d_ff", "checkpoint_every")
            model = {key: None if row[key] is None else int(row[key]) for key in sizes}
            ops, ways = row.get("ops", "plain"), {key: row[key] for key in ("mode", "precision")}
            if row["size"] == "study" and ops == "plain":
                model |= {"position": "sinusoidal", "ffn": "silu"}
            model = ModelConfig(**model, attention=row["attention"])
            case = WorkloadConfig(int(row["batch_size"]), ops=ops, model=model, compile=bool(row["compile"]), **ways)
            yield f"{name}: {row['case']}", case, row


def test_no_recorded_step_is_forbidden():
    """A graph's peak that was counted after its capture is: 2.68 GB of a model with 2.59 GB of state."""
    found = {
        name: refusal(case, row["peak_memory_bytes"], row["wall_median"], row["device"])
        for name, case, row in timed_cases()
        if row["outcome"] == "complete"
    }
    assert len(found) > 50
    assert {name: reason for name, reason in found.items() if reason} == {}


@pytest.mark.gpu
def test_a_captured_steps_peak_has_its_activations(tmp_path):
    """Held against what its tensors add up to, and against the prediction."""
    result = timing.measure(replace(EXPLICIT, device="cuda", warmup_steps=2, steps=3), tmp_path)
    peak = result["peak_memory_bytes"]
    predicted = explicit_peak(TrainConfig(EXPLICIT.model, batch_size=4, precision="bf16", ops="fused"), 1)
    print(f"{predicted:,} predicted, {peak:,} measured, {predicted / peak - 1:+.2%}")
    assert peak >= least_bytes(EXPLICIT) > 16 * num_parameters(EXPLICIT.model) + 2**29
    assert peak <= result["peak_reserved_bytes"]
    assert peak == pytest.approx(predicted, rel=0.05)
