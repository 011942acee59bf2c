"""Tables in which calls come again, such as attention behind a window: estimated once each."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from foretoken.domain.measurements.estimate import LatencyColumns
from foretoken.predictor.roofline import Columns, IntColumn

# Fewer calls are estimated as soon as compared.
_MIN_CALLS = 64
# Where at least so many calls are left, they are estimated as they come.
_MAX_SHARE_LEFT = 0.75
# Odd, so that no bit of a column is lost; the fraction of the golden ratio spreads its values.
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class RepeatedCalls:
    """The calls that differ, and for each call of a table the row of its like among them."""

    columns: Columns
    rows: IntColumn

    def spread(self, found: LatencyColumns) -> LatencyColumns:
        """Return the estimates of all calls from those of the ones that differ."""

        def take(column: object) -> npt.NDArray[np.generic]:
            values = np.asarray(column)
            return values[self.rows] if len(values) else values

        return replace(
            found,
            latency_us=take(found.latency_us),
            low_us=take(found.low_us),
            high_us=take(found.high_us),
            provenance=take(found.provenance),
            nearest={name: take(column) for name, column in found.nearest.items()},
            nearest_us=take(found.nearest_us),
            nearest_octaves=take(found.nearest_octaves),
        )


def find_repeated(columns: Columns) -> RepeatedCalls | None:
    """Return which calls of a table differ; None where few come again."""
    num_calls = len(next(iter(columns.values())))
    if num_calls < _MIN_CALLS:
        return None
    numbers = np.zeros(num_calls, dtype=np.uint64)
    for column in columns.values():
        numbers = (numbers ^ (numbers >> np.uint64(29))) * _MULTIPLIER + column.astype(np.uint64)
    _, first, rows = np.unique(numbers, return_index=True, return_inverse=True)
    if len(first) > _MAX_SHARE_LEFT * num_calls:
        return None
    differing = {name: column[first] for name, column in columns.items()}
    # Calls that differ may have the same number by chance.
    if any((differing[name][rows] != column).any() for name, column in columns.items()):
        return None
    return RepeatedCalls(differing, rows)
