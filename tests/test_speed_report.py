"""The speed measurements on the reference machine as a table: ours, the best peer, targets, the README's block."""

import json

import pytest
from kernel_reports import speed_row

from lmcore.errors import UserError
from lmcore.workbook.report.speed import comparison, read_speed, speed_block, speed_table


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
        for head_size, mode in ((64, "forward"), (128, "both")):
            settings = {"head_size": head_size, "context_length": length, "mode": mode, "causal": True}
            name, more = f"attention-{head_size}-{length}-{mode}", {"rate_unit": "TFLOP/s", "settings": settings}
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
        "peak_rates": {"copy_bytes_per_second": 4e12, "bf16_flops_per_second": 8e14},
        "rows": [*rows, *changes], "targets": targets, "runs": list(runs),
    }  # fmt: skip
    (folder / "speed.json").write_text(json.dumps(content))
    return folder


def compared(folder):
    speed = read_speed(folder)
    return comparison(speed.rows, speed.targets)


def test_ours_beside_the_best_peer(tmp_path):
    table = compared(speed_file(tmp_path))
    row = table.set_index("row").loc["step-a"]
    assert row["faster"] == 2  # HF compiled; our own plain way is no peer
    assert row["best peer"] == "4.00 ms (HF compiled)"
    assert [target["reached"] for target in row["judged"]] == [True, False]
    text = speed_table(table)
    assert "≤ 2.5 ms: yes; ≥ 50 % MFU: **no**, 40.0%" in text
    assert "≥ cuDNN: yes" in text
    assert "nan" not in text


def test_rows_that_did_not_fit(tmp_path):
    lost = [
        speed_row("step-b", "step", "HF eager", False, 5.0),
        speed_row("step-b", "step", "lmcore fused", True, None),
        speed_row("step-c", "step", "lmcore fused", True, 5.0),
        speed_row("step-d", "step", "HF eager", False, 5.0),
    ]
    table = compared(speed_file(tmp_path, changes=lost)).set_index("row")
    assert table.loc["step-b", "lmcore"] == "out of memory"
    assert table.loc["step-c", "best peer"] == "–"
    assert "step-d" not in table.index  # ours is not in that row


def test_settings_are_columns(tmp_path):
    rows = read_speed(speed_file(tmp_path)).rows
    attention = rows[rows["group"] == "attention"]
    assert set(attention["head_size"]) == {64, 128}
    assert set(attention["mode"]) == {"forward", "both"}
    assert "settings" not in rows


def test_without_a_file_there_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match=r"python benchmarks/speed.py"):
        read_speed(tmp_path)
    (tmp_path / "speed.json").write_text('{"rows": []}')
    with pytest.raises(UserError, match="holds no speed measurements"):
        read_speed(tmp_path)


def test_the_readme_block_has_the_rows_with_targets(tmp_path):
    text = speed_block(speed_file(tmp_path))
    assert text.startswith("One NVIDIA H200 with PyTorch 2.11 and triton 3.6.0, bf16; medians")
    assert "work of step-a" in text
    assert "work of attention-64-512-forward" not in text
    assert "2 of 3 targets are reached" in text
    assert text.endswith("\n")


def test_peak_rates_are_those_of_the_last_run_that_has_rows(tmp_path):
    chip = {"device": "NVIDIA H200"}
    runs = [
        {"environment": chip, "peak_rates": {"copy_bytes_per_second": n * 1e12, "bf16_flops_per_second": n * 1e14}}
        for n in (1, 2, 3)
    ]
    later = [speed_row("loss", "loss", name, name == "lmcore fused", 2.0, run=1) for name in ("eager", "lmcore fused")]
    speed = read_speed(speed_file(tmp_path, changes=later, runs=runs))
    assert speed.peak_rates["bf16_flops_per_second"] == 2e14
