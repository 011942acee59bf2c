"""Tables that are a whole number of times slower than others at the same points.

Sums over iterations taken for means, milliseconds for microseconds, all layers for one.
"""

from collections.abc import Iterator

import numpy as np

from foretoken.catalog.dims import Floats
from foretoken.catalog.quality.line import BINS_MIN, fill_cells, number_rows
from foretoken.catalog.quality.stored_row import ALIKE, StoredRows
from foretoken.catalog.quality.test_definition import FlaggedRows, Judges, QualityTest

# Half of the places where they meet agree with each other within this factor, and their median with
# a whole number within this part.
_SPREAD_MAX = 1.2
_WHOLE_TOLERANCE = 0.1


def _find(rows: StoredRows) -> Iterator[FlaggedRows]:
    for places, alike in rows.split(ALIKE):
        tables = number_rows(alike, ("run_id", "source_file"))
        if not tables.any():
            continue
        cells = fill_cells(alike, tables)
        numbers = range(int(tables.max()) + 1)
        for table in numbers:
            others = [number for number in numbers if number != table]
            scales = ((_scale(ratios), len(ratios)) for ratios in cells.ratios_of(table, others))
            scale, num_bins = next((found for found in scales if found[0]), (None, 0))
            if scale is not None:
                yield FlaggedRows(
                    places[tables == table],
                    f"{scale:.3g} times another table where they meet, in {num_bins} places",
                )


def _scale(ratios: Floats) -> float | None:
    """Return the median of ratios if they are one whole number, 2 or more, within the noise."""
    if len(ratios) < BINS_MIN:
        return None
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    whole = max(round(middle), 2)
    is_scaled = high < _SPREAD_MAX * low and abs(middle / whole - 1) < _WHOLE_TOLERANCE
    return float(middle) if is_scaled else None


TEST = QualityTest(
    name="scaled_table",
    summary="in a table that is 2, 3, ... times slower than others at the same points",
    judges=Judges.TABLES,
    find=_find,
)
