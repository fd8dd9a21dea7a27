"""The model sizes of the handouts."""

HANDOUTS = {
    "tinystories": "CSE599-O A1 §7.2",
    **dict.fromkeys(("small", "medium", "large"), "CS336 A2"),
    "xl": "CS336 A2 (2025)",
    "2.7b": "CS336 A2, in 2026 called xl",
    "10b": "CS336 A2 (2026)",
    "8b": "CS336 A2 (2026), leaderboard",
}
"""The handouts of sizes in `lmcore.config.MODEL_SIZES`; the others are our own."""
