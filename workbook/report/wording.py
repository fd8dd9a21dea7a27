"""Numbers and lists in words, for answers: counts, powers of ten, durations."""

from collections.abc import Sequence

from lmcore.formatting import format_significant

SCALES = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"))


def scientific(value: float, digits: int = 3) -> str:
    """A number by its power of ten, for Markdown: $4.51 \\cdot 10^{12}$; with one digit, 1e-5 is $10^{-5}$."""
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    power = f"10^{{{int(exponent)}}}"
    return f"${power}$" if mantissa == "1" else rf"${mantissa} \cdot {power}$"


def format_count(value: float, digits: int = 3) -> str:
    """A count in words from a million on: 1.64 billion, 12,345."""
    rounded = float(f"{value:.{digits}g}")
    for size, name in SCALES:
        if abs(rounded) >= size:
            return f"{format_significant(value / size, digits)} {name}"
    return f"{round(value):,}" if float(value).is_integer() else format_significant(value, digits)


def format_seconds(value: float) -> str:
    """A duration in the unit that suits it: 350 µs, 12.3 ms, 4.56 s, 3 min 20 s, 5 h 12 min, 9.2 days."""
    if value == 0:
        return "0 s"
    for unit, size in (("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        if value < (59.95 if size == 1 else 0.9995e3 * size):
            return f"{format_significant(value / size)} {unit}"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s" if seconds else f"{minutes} min"
    hours, minutes = divmod(round(value / 60), 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{format_significant(value / 86400)} days"


def join_words(words: Sequence[str], conjunction: str = "and") -> str:
    """a; a and b; a, b and c."""
    words = [str(word) for word in words]
    return " ".join([", ".join(words[:-1]), conjunction, words[-1]]) if len(words) > 1 else "".join(words)
