"""Numbers as a person reads them, in tables, sentences and pictures."""


def format_number(value: float, digits: int = 3, decimals: int = 0) -> str:
    """Return a number with so many significant digits and thousands separators.

    Digits before the point are all kept; a number that has `digits` of them gets `decimals` more.
    """
    if value == 0:
        return "0"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.{decimals}f}"
    return f"{value:.{digits}g}"
