"""Numbers as a person reads them, in tables, sentences and pictures."""

from foretoken.domain.units import MS_PER_S

# Steps longer than this are in seconds.
_MS_IN_SECONDS = 10_000.0


def format_number(value: float, digits: int = 3, decimals: int = 0) -> str:
    """Return a number with so many significant digits and thousands separators.

    Digits before the point are all kept; a number that has `digits` of them gets `decimals` more.
    """
    if value == 0:
        return "0"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.{decimals}f}"
    return f"{value:.{digits}g}"


def step_unit(step_ms: float) -> tuple[float, str]:
    """Return what a step's times are divided by, and their unit: long ones are in s."""
    return (MS_PER_S, "s") if step_ms > _MS_IN_SECONDS else (1.0, "ms")


def describe_step(step_ms: float) -> str:
    """Return a step time with its unit: `834 ms`, `12.3 s`."""
    scale, unit = step_unit(step_ms)
    return f"{format_number(step_ms / scale)} {unit}"
