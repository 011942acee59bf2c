"""Unit conversions and the number type that formulas are written in."""

from typing import Any, TypeAlias

# An int, a float or an array of them: the formulas of the domain use only arithmetic operators, so
# the same line serves one operator call and a column of a million. The standard library has no
# name for that, and the domain imports no array library.
Quantity: TypeAlias = Any

US_PER_S = 1e6
US_PER_MS = 1e3
MS_PER_S = 1e3
S_PER_HOUR = 3600.0
S_PER_DAY = 86_400.0
NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000
GIB = 2**30
# More than this of tokens or requests is a mistake; sums of a billion such still fit into an int64.
MAX_COUNT = 2**31 - 1

_S_PER_MINUTE = 60.0
# Shorter durations are given in seconds, and shorter than so many minutes in minutes.
_SECONDS_SHOWN = 120.0
_MINUTES_SHOWN = 120.0


def ceil_divide(numerator: Quantity, denominator: Quantity) -> Quantity:
    """Return the integer quotient rounded up, elementwise for arrays."""
    return -(-numerator // denominator)


def smaller(first: Quantity, second: Quantity) -> Quantity:
    """Return the smaller of two counts, elementwise for arrays."""
    return first * (first < second) + second * (first >= second)


def describe_seconds(seconds: float) -> str:
    """Return a duration as people say it: `59 s`, `5 min`, `2.5 h`."""
    if seconds < _SECONDS_SHOWN:
        return f"{seconds:.0f} s"
    if seconds < _MINUTES_SHOWN * _S_PER_MINUTE:
        return f"{seconds / _S_PER_MINUTE:.0f} min"
    return f"{seconds / S_PER_HOUR:.1f} h"
