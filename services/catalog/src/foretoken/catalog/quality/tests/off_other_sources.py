"""Tables far slower than what other software or other runs need for the same on the same device.

Other kernels explain a factor of two or three; beyond that something else was timed, or in another
unit.
"""

from collections.abc import Iterator

import numpy as np

from foretoken.catalog.dims import Mask
from foretoken.catalog.quality.line import BINS_MIN, fill_cells, number_rows
from foretoken.catalog.quality.stored_row import StoredRows
from foretoken.catalog.quality.test_definition import FlaggedRows, Judges, QualityTest

# Between sound sources the median was up to 2.6 (point to point) and 2.3 (an unfused norm).
_RATIO_MIN = 4.0
# Where the work decides the time, not the launch, which differs more.
_FLOORS_MIN = 5.0
# Both formats move and compute alike.
_HALF = ("fp16", "bf16")


def _find(rows: StoredRows) -> Iterator[FlaggedRows]:
    comparable = np.flatnonzero(_is_comparable(rows))
    if not len(comparable):
        return
    for places, alike in rows.take(comparable).split(("topology", "phase")):
        sources = number_rows(alike, ("run_id", "framework"))
        if not sources.any():
            continue
        tables = number_rows(alike, ("run_id", "framework", "source_file", "kernel"))
        source_of = dict(zip(tables.tolist(), sources.tolist(), strict=True))
        cells = fill_cells(alike, tables)
        for table, source in source_of.items():
            others = [other for other, theirs in source_of.items() if theirs != source]
            ratios = list(cells.ratios_of(table, others))
            met = np.concatenate(ratios) if ratios else np.empty(0)
            if len(met) >= BINS_MIN and np.median(met) > _RATIO_MIN:
                yield FlaggedRows(
                    comparable[places[tables == table]],
                    f"{np.median(met):.3g} times other sources where they meet, in {len(met)} "
                    "places",
                )


def _is_comparable(rows: StoredRows) -> Mask:
    """Return which rows are of the plain case, in a half format, and bound by their work."""
    dtypes = rows.coded["dtype"]
    is_half = dtypes.is_value(_HALF[0]) | dtypes.is_value(_HALF[1])
    variants = rows.coded["variant"]
    is_plain = np.array([value is None for value in variants.values])[variants.codes]
    comparable: Mask = is_half & is_plain & (rows.work_us > _FLOORS_MIN * rows.floor_us)
    return comparable & ~rows.is_impossible


TEST = QualityTest(
    name="off_other_sources",
    summary="in a table over 4 times slower than other sources at the same points",
    judges=Judges.TABLES,
    find=_find,
)
