"""What has to be reached, on one H200 in bf16."""

from typing import Any

GIB = 1 << 30

CUDNN, FLASH = "SDPA cuDNN", "SDPA FlashAttention"


def _at_most(row: str, measure: str, number: float, text: str) -> dict[str, Any]:
    return {"row": row, "measure": measure, "at_most": number, "text": text}


def _at_least(row: str, measure: str, number: float, text: str) -> dict[str, Any]:
    return {"row": row, "measure": measure, "at_least": number, "text": text}


TARGETS: list[dict[str, Any]] = [
    _at_most("step-tinystories-32x256", "median", 2.4, "≤ 2.4 ms"),
    _at_most("step-tinystories-256x256", "median", 14.5, "≤ 14.5 ms"),
    _at_least("step-tinystories-256x256", "share", 0.50, "≥ 50 % MFU"),
    _at_most("step-small-4x256", "median", 3.0, "≤ 3.0 ms"),
    _at_most("step-small-4x1024", "median", 7.4, "≤ 7.4 ms"),
    _at_most("step-large-4x1024", "median", 43.0, "≤ 43 ms"),
    _at_least("step-large-4x1024", "share", 0.60, "≥ 60 % MFU"),
    _at_most("step-2.7b-4x256", "median", 57.0, "≤ 57 ms"),
    _at_most("attention-64-16384-both", "median", 4.4, "≤ 4.4 ms"),
    *(
        target
        for length in (4096, 16384)
        for passes in ("forward", "both")
        for target in (
            _at_least(f"attention-128-{length}-{passes}", f"rate over {CUDNN}", 1.0, "≥ cuDNN"),
            _at_least(f"attention-128-{length}-{passes}", f"rate over {FLASH}", 1.3, "≥ 1.3 × FA2"),
        )
    ),
    _at_most("adamw", "median", 7.5, "≤ 7.5 ms"),
    _at_least("adamw", "share", 0.93, "≥ 93 % of copy"),
    _at_most("loss", "median", 7.0, "≤ 7 ms"),
    _at_most("loss", "peak_bytes", 0.7 * GIB, "≤ 0.7 GiB extra"),
    _at_least("decode-small-1", "rate", 5000, "≥ 5,000 tok/s"),
    _at_least("decode-2.7b-1", "rate", 480, "≥ 480 tok/s"),
]
"""`measure` is a field of our row, or `rate over NAME`: our rate divided by that contestant's in the same row."""
