"""Numbers as a person reads them; apart from `plots.py`, which takes long to import."""


def format_number(value: float) -> str:
    """Return a number with three significant digits and thousands separators."""
    if value == 0:
        return "0"
    if abs(value) >= 100:  # noqa: PLR2004  three digits before the point need none after it
        return f"{value:,.0f}"
    return f"{value:.3g}"
