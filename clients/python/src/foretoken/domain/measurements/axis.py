"""Axes of a grid of calls, whatever the grid is for."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Protocol

from foretoken.domain.errors import FieldViolation


class Axis(Protocol):
    """Values of one dimension."""

    @property
    def dim(self) -> str:
        """Name of the dimension."""

    @property
    def values(self) -> tuple[int, ...]:
        """The values, ascending and distinct."""


def count_points(axes: Sequence[Axis]) -> int:
    """Return the points of the grid: all combinations of the values."""
    return prod(len(axis.values) for axis in axes)


def check_axes(axes: Sequence[Axis], max_points: int) -> Iterator[FieldViolation]:
    """Yield what is wrong with the axes of a grid of at most `max_points`."""
    seen: set[str] = set()
    for index, axis in enumerate(axes):
        if axis.dim in seen:
            yield FieldViolation(f"axes[{index}].dim", f"{axis.dim} has an axis already")
        seen.add(axis.dim)
        if not axis.values or list(axis.values) != sorted(set(axis.values)):
            yield FieldViolation(f"axes[{index}].values", "needs values, ascending and distinct")
    num_points = count_points(axes)
    if num_points > max_points:
        yield FieldViolation("axes", f"{num_points:,} points; at most {max_points:,}")
