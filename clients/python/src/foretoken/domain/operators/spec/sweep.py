"""Grids of dimensions worth measuring, shared by operators."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence


def powers_of_two(low: int, high: int) -> tuple[int, ...]:
    """Return the powers of two from `low` to `high`, both included."""
    return tuple(
        2**e for e in range(low.bit_length() - 1, high.bit_length()) if low <= 2**e <= high
    )


def cross(**axes: Sequence[int]) -> Iterator[Mapping[str, int]]:
    """Yield the cross product of named axes as mappings."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def pick(quick: bool, small: Iterable[int], full: Iterable[int]) -> tuple[int, ...]:
    """Return the small axis for a quick sweep, the full one otherwise."""
    return tuple(small) if quick else tuple(full)
