"""Durations as people write them: `30ms`, `2s`, `1.5min`, always with their unit."""

import re

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.units import MS_PER_S

_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "min": 6e4, "h": 3.6e6}
_DURATION = re.compile(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)")


def parse_ms(text: str, option: str) -> float:
    """Return a positive duration in ms; `option` is what an error is about.

    A number alone is not taken for one unit or the other: the error asks which was meant.

    Raises:
        InvalidRequestError: it is no positive number with a unit.

    """
    matched = _DURATION.fullmatch(text.strip().lower())
    if matched is None or float(matched[1]) == 0 or (matched[2] and matched[2] not in _MS):
        raise InvalidRequestError.of_field(
            option, f"{text!r} is no time: write a positive number and a unit, `200ms` or `2s`"
        )
    if not matched[2]:
        number = matched[1]
        raise InvalidRequestError.of_field(
            option, f"{number} has no unit: {number}s or {number}ms?"
        )
    return float(matched[1]) * _MS[matched[2]]


def parse_s(text: str, option: str) -> float:
    """Return a positive duration in s; see `parse_ms`."""
    return parse_ms(text, option) / MS_PER_S
