"""The model sizes of the handouts."""

from lmcore.config import model_config

HANDOUTS = {
    "tinystories": "CSE599-O A1 §7.2",
    **dict.fromkeys(("small", "medium", "large"), "CS336 A2"),
    "xl": "CS336 A2 (2025)",
    "2.7b": "CS336 A2, in 2026 called xl",
    "10b": "CS336 A2 (2026)",
    "8b": "CS336 A2 (2026), leaderboard",
}
"""The handouts of sizes in `lmcore.config.MODEL_SIZES`; the others are our own."""


def describe_size(name: str) -> str:
    """The handout and the shape of a named size, as tables of it have them."""
    size = model_config(name)
    shape = f"d_model {size.d_model:,}, d_ff {size.d_ff:,}, {size.num_layers} layers, {size.num_heads} heads"
    return f"`{name}` ({HANDOUTS[name]}; {shape})" if name in HANDOUTS else f"`{name}` ({shape})"
