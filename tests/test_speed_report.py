"""Tables, figures and words of the speed measurements on the reference machine: other numbers, other sentences."""

import json

import pytest
from kernel_reports import drawn, speed_row

from lmcore.errors import UserError
from lmcore.workbook.report.figures import use_style
from lmcore.workbook.report.kernels.speed import comparison, read_speed
from lmcore.workbook.report.kernels.speed_answers import misses, reference_answer, speed_block, speed_table
from lmcore.workbook.report.kernels.speed_figures import speed_figures


@pytest.fixture(scope="module", autouse=True)
def style():
    use_style()


def speed_file(folder, step=2.0, changes=(), runs=()):
    rows = [
        speed_row("step-a", "step", "HF eager", False, 9.0, rate=1000.0, rate_unit="tok/s"),
        speed_row("step-a", "step", "HF compiled", False, 4.0),
        speed_row("step-a", "step", "lmcore plain", False, 1.0),
        speed_row("step-a", "step", "lmcore fused", True, step, share=0.4, share_of="peak"),
        speed_row("study", "study", "plain, eager", False, 8.0),
        speed_row("study", "study", "+ one CUDA graph", True, 2.0),
        speed_row("study", "study", "+ broken", False, None),
    ]
    for length in (512, 1024, 16384):
        for head_size, passes in ((64, "forward"), (128, "both")):
            settings = {"head_size": head_size, "context_length": length, "passes": passes, "causal": True}
            name, more = f"attention-{head_size}-{length}-{passes}", {"rate_unit": "TFLOP/s", "settings": settings}
            for contestant, rate in (("SDPA cuDNN", 500.0), ("SDPA FlashAttention", 300.0), ("lmcore flash", 550.0)):
                ours = contestant.startswith("lmcore")
                rows.append(speed_row(name, "attention", contestant, ours, 1 / rate, rate=rate, **more))
        for kind, name, lost in (("attention", "plain", length > 9000), ("step", "lmcore fused", False)):
            more = {"peak_bytes": None if lost else length**2 * 100, "settings": {"context_length": length}}
            rows.append(speed_row(f"memory-{kind}-{length}", "memory", name, False, None if lost else 1.0, **more))
    targets = [
        {"row": "step-a", "measure": "median", "at_most": 2.5, "text": "≤ 2.5 ms"},
        {"row": "step-a", "measure": "share", "at_least": 0.5, "text": "≥ 50 % MFU"},
        {"row": "attention-128-1024-both", "measure": "rate over SDPA cuDNN", "at_least": 1.0, "text": "≥ cuDNN"},
        {"row": "decode", "measure": "rate", "at_least": 1.0, "text": "≥ 1"},
    ]
    content = {
        "provenance": {"device": "NVIDIA H200", "torch": "2.11", "packages": {"triton": "3.6.0"}},
        "ceilings": {"copy_bytes_per_second": 4e12, "bf16_flops_per_second": 8e14},
        "rows": [*rows, *changes], "targets": targets, "runs": list(runs),
    }  # fmt: skip
    (folder / "speed.json").write_text(json.dumps(content))
    return folder


def test_ours_beside_the_best_peer(tmp_path):
    speed = read_speed(speed_file(tmp_path))
    row = comparison(speed).set_index("row").loc["step-a"]
    assert row["faster"] == 2  # HF compiled; our own plain way is no peer
    assert row["peer"]["contestant"] == "HF compiled"
    assert [target["reached"] for target in row["targets"]] == [True, False]
    table = speed_table(speed)
    assert "| 4.00 ms (HF compiled)" in table
    assert "≤ 2.5 ms: yes; ≥ 50 % MFU: **no**, 40.0%" in table
    assert "1.10 times" not in table
    assert "≥ cuDNN: yes" in table
    assert "attention-64-512" not in speed_table(speed, only_targets=True)
    text = reference_answer(speed)
    assert "NVIDIA H200 with PyTorch 2.11 and triton 3.6.0" in text
    assert "a training step 2.00 and attention 1.10" in text
    assert "4.00 TB/s" in text
    assert "nan" not in text


def test_misses_are_named_with_what_limits_them(tmp_path):
    text = misses(read_speed(speed_file(tmp_path, step=3.0)))
    assert text.startswith("1 of 3 targets are reached.")
    line = "- work of step-a: 3.00 ms (target ≤ 2.5 ms) and 40.0% (target ≥ 50 % MFU); it runs at 40% of the peak."
    assert line in text


def test_rows_that_did_not_fit(tmp_path):
    lost = [
        speed_row("step-b", "step", "HF eager", False, 5.0),
        speed_row("step-b", "step", "lmcore fused", True, None),
        speed_row("step-c", "step", "lmcore fused", True, 5.0),
    ]
    speed = read_speed(speed_file(tmp_path, changes=lost))
    table = speed_table(speed)
    assert "| out of memory" in table
    assert comparison(speed).set_index("row").loc["step-c", "peer"] is None
    assert "lmcore fused: out of memory" in drawn(speed_figures(speed)["speed_steps"])


def test_figures_of_the_reference_machine(tmp_path):
    found = speed_figures(read_speed(speed_file(tmp_path)))
    assert set(found) == {"speed_attention", "speed_steps", "speed_memory", "speed_ladder"}
    for figure in found.values():
        drawn(figure)
    panels = found["speed_attention"].axes
    assert max(line.get_ydata().max() for axes in panels for line in axes.lines if len(line.get_ydata())) == 550
    assert all(axes.get_ylim()[1] > 550 for axes in panels)
    assert "out of memory" in drawn(found["speed_ladder"])
    assert any(line.get_marker() == "X" for line in found["speed_memory"].axes[0].lines)


def test_without_a_file_there_is_a_sentence(tmp_path):
    assert read_speed(tmp_path) is None
    assert reference_answer(None).startswith("The kernels have not been measured beside their peers")
    assert speed_block(tmp_path).startswith("The kernels have not been measured")
    assert speed_figures(None) == {}
    (tmp_path / "speed.json").write_text('{"rows": []}')
    with pytest.raises(UserError, match="holds no speed measurements"):
        read_speed(tmp_path)


def test_the_readme_block_has_the_rows_with_targets(tmp_path):
    text = speed_block(speed_file(tmp_path))
    assert "work of step-a" in text
    assert "work of attention-64-512-forward" not in text
    assert "Not measured" not in text
    assert text.endswith("\n")


def test_rows_of_earlier_runs_are_named_with_their_commit(tmp_path):
    assert "everything in one run" in speed_block(speed_file(tmp_path))
    runs = [{"environment": {"git_commit": commit * 40}} for commit in "ab"]
    later = [speed_row("loss", "loss", name, name == "lmcore fused", 2.0, run=1) for name in ("eager", "lmcore fused")]
    text = speed_block(speed_file(tmp_path, changes=later, runs=runs))
    assert "one run but for some rows of earlier ones: 1 of step, 1 of study, 6 of attention" in text
    assert "(commit aaaaaaaaa)" in text
    assert "bbbbbbbbb" not in text


def test_ceilings_are_those_of_the_run_that_measured_a_row(tmp_path):
    chip = {"device": "NVIDIA H200"}
    runs = [
        {"environment": chip, "ceilings": {"copy_bytes_per_second": n * 1e12, "bf16_flops_per_second": n * 1e14}}
        for n in (1, 2, 3)
    ]
    later = [speed_row("loss", "loss", name, name == "lmcore fused", 2.0, run=1) for name in ("eager", "lmcore fused")]
    speed = read_speed(speed_file(tmp_path, changes=later, runs=runs))
    assert "Ceilings measured in the last of these runs: a large copy 2.00 TB/s" in reference_answer(speed)
    first, last = (speed.rows[speed.rows["row"] == name].iloc[0] for name in ("step-a", "loss"))
    assert [speed.ceilings_of(row)["bf16_flops_per_second"] for row in (first, last)] == [1e14, 2e14]


def test_memory_that_nobody_counted_has_no_figure(tmp_path):
    speed = read_speed(speed_file(tmp_path))
    speed.rows["peak_bytes"] = float("nan")
    assert "speed_memory" not in speed_figures(speed)
