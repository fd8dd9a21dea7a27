"""What a step cannot do without (lmcore.workbook.report.kernels.speed_limits), and where peers are ahead."""

import pandas as pd
import pytest
from kernel_reports import speed_row

from lmcore.accounting import training_flops
from lmcore.config import model_config
from lmcore.workbook.report.kernels.speed import Speed
from lmcore.workbook.report.kernels.speed_answers import behind_sentence, misses, missing_sentence
from lmcore.workbook.report.kernels.speed_figures import speed_figures
from lmcore.workbook.report.kernels.speed_limits import product_flops, step_floors

CEILINGS = {"copy_bytes_per_second": 1e9, "bf16_flops_per_second": 1e9}
SETTINGS = {"size": "smoke", "batch_size": 2, "context_length": 16, "vocab_size": 100}


def measured(rows, targets=()):
    return Speed(pd.DataFrame(rows).assign(run=0), list(targets), {"device": "a chip"}, CEILINGS)


def test_products_count_each_weight_six_times_a_token():
    model = model_config("smoke", context_length=16, vocab_size=100)
    c, tokens = model, 2 * 16
    weights = c.num_layers * (4 * c.d_model**2 + 3 * c.d_model * c.d_ff) + c.d_model * c.vocab_size
    pairs = c.num_layers * tokens * 16 / 2  # of queries and keys under the causal mask
    assert product_flops(model, 2) == 6 * tokens * weights + 14 * pairs * c.d_model
    assert product_flops(model, 2) < training_flops(model, 2)


def test_floors_of_a_step_by_hand():
    floors = step_floors(SETTINGS, CEILINGS)
    c = model_config("smoke", context_length=16, vocab_size=100)
    weights = c.num_layers * (4 * c.d_model**2 + 3 * c.d_model * c.d_ff) + 2 * c.d_model * c.vocab_size
    gains = (2 * c.num_layers + 1) * c.d_model
    assert floors.optimizer == pytest.approx(30 * (weights + gains) / 1e6)
    norms = 2 * 32 * c.d_model * (5 + 7 * 2 * c.num_layers)
    assert floors.elementwise == pytest.approx((norms + 2 * 32 * c.d_ff * 8 * c.num_layers) / 1e6)
    assert floors.total == floors.products + floors.optimizer + floors.elementwise
    assert step_floors({"size": "smoke"}, CEILINGS) is None
    assert step_floors(SETTINGS, {}) is None


def test_a_missed_step_says_of_what_it_consists():
    floors = step_floors(SETTINGS, CEILINGS)
    row = speed_row("a", "step", "lmcore fused", True, floors.total + 10, settings=SETTINGS, share=0.25)
    target = {"row": "a", "measure": "median", "at_most": floors.total + 5, "text": "soon"}
    text = misses(measured([row], [target]))
    assert "MFU 25%; products at least" in text
    assert "the rest 10.0 ms, for which the target leaves 5.00 ms." in text
    assert "30 bytes for each parameter" in text
    target |= {"at_most": floors.total - 1}
    text = misses(measured([row], [target]))
    assert "the target leaves nothing: products, AdamW, norms and gate alone take" in text


def test_lengths_at_which_a_peer_is_ahead_are_named():
    peer = {"contestant": "SDPA cuDNN"}
    attention = {"head_size": 64, "passes": "forward"}
    rows = [
        {"group": "attention", "work": "w", "settings": attention | {"context_length": length}, "faster": faster,
         "peer": peer}
        for length, faster in ((1024, 0.9), (512, 0.8), (4096, 1.1))
    ]  # fmt: skip
    rows.append({"group": "loss", "work": "the loss", "settings": {}, "faster": 0.5, "peer": {"contestant": "other"}})
    assert behind_sentence(pd.DataFrame(rows)) == (
        "The peer is ahead in attention forward, head size 64, at 512 and 1,024 positions (SDPA cuDNN) and the loss "
        "(other)."
    )
    assert behind_sentence(pd.DataFrame(rows[2:3])) == ""


def test_memory_of_a_sweep_stands_in_for_rows_of_memory():
    shape = {"head_size": 64, "heads": 2, "batch_size": 1, "passes": "both", "causal": True}
    rows = [
        speed_row(f"a-{n}", "attention", "lmcore flash", True, 1.0, settings=shape | {"context_length": n},
                  rate=1.0, peak_bytes=1000.0 * n)
        for n in (512, 1024, 2048, 4096, 8192)
    ]  # fmt: skip
    figures = speed_figures(measured(rows))
    (axes,) = figures["speed_memory"].axes
    scores = next(line for line in axes.lines if line.get_label() == "the scores alone")
    assert list(scores.get_ydata()) == [2 * 2 * n**2 for n in (512, 1024, 2048, 4096, 8192)]
    labels = [label.get_text() for label in figures["speed_attention"].axes[0].get_xticklabels()]
    assert labels == ["512", "1k", "2k", "4k", "8k"]
    assert "speed_memory" not in speed_figures(measured(rows[:2]))
    assert missing_sentence(measured(rows)).startswith("Not in this record yet: the ladder")


def test_what_the_file_lacks_is_named():
    names = ["study", "elementwise-rope", "memory-attention-512", "memory-step-512", "attention-64-512-both",
             "attention-128-512-both", "decode-small-8", "decode-small-1-generate"]  # fmt: skip
    rows = [speed_row(name, "any", "lmcore fused", True, 1.0) for name in names]
    assert missing_sentence(measured(rows)) == ""
    text = missing_sentence(measured(rows[:-2]))
    assert text == "Not in this record yet: decoding in batches and Hugging Face's own loop of generation."
