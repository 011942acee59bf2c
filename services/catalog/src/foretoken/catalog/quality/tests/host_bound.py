"""Tables whose calls mostly waited for the host, which in a captured graph they do not.

Where a tool cannot capture a kernel into a CUDA graph it times calls launched one by one, and small
ones take what the host needs, however little their work. What is left of such a table, the largest
calls, would say little about the others. Prefills are launched so by engines, too.
"""

from collections.abc import Iterator

import numpy as np

from foretoken.catalog.dims import Mask
from foretoken.catalog.quality.host_time import find_host_us, is_launched_by_engines, may_wait
from foretoken.catalog.quality.line import BINS_MIN, fill_cells, number_rows
from foretoken.catalog.quality.stored_row import StoredRows
from foretoken.catalog.quality.test_definition import FlaggedRows, Judges, QualityTest

# What the smallest calls take, as a multiple of a launch on the device itself. Kernels in graphs
# need up to 5, products of scaled blocks launched from Python 20 to 160.
_FLOORS_MIN = 8.0
# Those that may wait do, if over so much more work, without the outer twentieths, they take no more
# than this.
_SPAN_MIN, _RISE_MAX = 8.0, 1.5
# The part of a table's rows that wait.
_ROWS_SHARE_MIN = 1 / 3
# The same calls take other software less by this factor, in the median. Where the host was waited
# for it was 5.7 to 16 for products and 3.1 to 4.5 for whole attention blocks.
_RATIO_MIN = 3.0


def _find(rows: StoredRows) -> Iterator[FlaggedRows]:
    if is_launched_by_engines(rows):
        return
    for places, alike in rows.split(("topology", "phase", "dtype", "variant")):
        waits = _find_waiting(alike)
        sources = number_rows(alike, ("run_id", "framework", "framework_version"))
        for source in np.unique(sources[waits]):
            is_source = sources == source
            if waits[is_source].mean() < _ROWS_SHARE_MIN:
                continue
            cells = fill_cells(alike, np.where(waits & is_source, -1, sources))
            others = [other for other in np.unique(sources).tolist() if other != source]
            ratios = np.concatenate([*cells.ratios_of(-1, others), np.empty(0)])
            if len(ratios) >= BINS_MIN and np.median(ratios) > _RATIO_MIN:
                yield FlaggedRows(
                    places[is_source],
                    f"{waits[is_source].mean():.0%} of this table take the same whatever the work, "
                    f"{np.median(ratios):.3g} times other sources where they meet, in "
                    f"{len(ratios)} places",
                )


def _find_waiting(rows: StoredRows) -> Mask:
    """Return which rows take as long as the smallest calls of their kernel, where that is long."""
    found = np.zeros(len(rows), dtype=bool)
    for places, kernel in rows.split(("run_id", "framework", "framework_version", "kernel")):
        host_us = find_host_us(kernel)
        waits = may_wait(kernel, host_us)
        if host_us < _FLOORS_MIN * np.median(kernel.floor_us) or not waits.any():
            continue
        low, middle, high = np.quantile(kernel.work_us[waits], (0.05, 0.5, 0.95))
        larger_us = np.median(kernel.latency_us[waits & (kernel.work_us >= middle)])
        if high >= _SPAN_MIN * low and larger_us <= _RISE_MAX * host_us:
            found[places] = waits
    return found


TEST = QualityTest(
    name="host_bound",
    summary="in a table timed with its launches from the host",
    judges=Judges.TABLES,
    find=_find,
)
