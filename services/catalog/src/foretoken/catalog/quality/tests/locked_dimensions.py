"""Tables sampled along one direction only, where others of the same run vary freely."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretoken.catalog.dims import Indices
from foretoken.catalog.quality.stored_row import StoredRows
from foretoken.catalog.quality.test_definition import FlaggedRows, Judges, QualityTest

_SOURCES = ("run_id", "phase", "dtype", "source_file")
# A dimension varies with this many values; two of them vary freely with this many ratios.
_VALUES_MIN = 5
_RATIOS_MIN = 3
_SIBLINGS_MIN = 2
# Most tables vary within so many rows.
_FIRST_ROWS = 1_000


@dataclass(frozen=True, slots=True)
class _Sampled:
    """A table, and how many ratios each pair of dimensions that vary has in it."""

    places: Indices
    rows: StoredRows
    num_ratios: dict[tuple[str, str], int]

    def is_sibling_of(self, other: "_Sampled") -> bool:
        """Return whether both are of one run and pass."""
        return self is not other and all(
            self.rows.value(name) == other.rows.value(name) for name in _SOURCES[:-1]
        )


def _find(rows: StoredRows) -> Iterator[FlaggedRows]:
    tables = [
        _Sampled(places, table, _count_ratios(table)) for places, table in rows.split(_SOURCES)
    ]
    for table in tables:
        for pair, num_ratios in table.num_ratios.items():
            if num_ratios > 1:
                continue
            siblings = [t.num_ratios.get(pair, 0) for t in tables if t.is_sibling_of(table)]
            if sum(number >= _RATIOS_MIN for number in siblings) >= _SIBLINGS_MIN:
                first, second = pair
                ratio = table.rows.columns[first][0] / table.rows.columns[second][0]
                yield FlaggedRows(
                    table.places,
                    f"{first} is always {ratio:.3g} times {second}, unlike in the other tables of "
                    "this run",
                )


def _count_ratios(table: StoredRows) -> dict[tuple[str, str], int]:
    varying = {
        name: column.astype(np.float64)
        for name, column in table.columns.items()
        if _count_values(column, _VALUES_MIN) >= _VALUES_MIN
    }
    return {
        (first, second): _count_values(
            varying[first] / np.maximum(varying[second], 1.0), _RATIOS_MIN
        )
        for first, second in itertools.combinations(varying, 2)
    }


def _count_values(column: npt.NDArray[Any], enough: int) -> int:
    """Return how many values a column has, or how many its first rows have where that is enough."""
    num_first = len(np.unique(column[:_FIRST_ROWS]))
    return num_first if num_first >= enough else len(np.unique(column))


TEST = QualityTest(
    name="locked_dimensions",
    summary="in a table where one dimension follows another, which vary freely in its siblings",
    judges=Judges.TABLES,
    find=_find,
)
