"""Numbers for readers: to significant digits, bytes in the unit that suits them."""

BYTE_UNITS = ("bytes", "KB", "MB", "GB", "TB", "PB")


def format_significant(value: float, digits: int = 3) -> str:
    """`value` rounded to significant digits, in plain notation with thousands separated: 0.000123, 1.64, 12,300."""
    rounded = float(f"{value:.{digits}g}")
    exponent = int(f"{rounded:e}".partition("e")[2])
    return f"{rounded:,.{max(0, digits - 1 - exponent)}f}"


def format_bytes(value: float, digits: int = 3) -> str:
    """Bytes in decimal units, as the handouts count them (1 GB = 10^9 bytes): 6.55 GB."""
    unit = 0
    while abs(float(f"{value:.{digits}g}")) >= 1000 and unit < len(BYTE_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{format_significant(value, digits) if unit else round(value)} {BYTE_UNITS[unit]}"
