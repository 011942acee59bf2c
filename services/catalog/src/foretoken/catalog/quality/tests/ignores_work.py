"""Tables in which more work does not take more time: something else was timed.

Calls that wait for the host say nothing of it where engines launch them so, too: SGLang's sparse
blocks of an H200 take 0.76 ms up to 8,192 tokens of short prompts, launched from Python.
"""

from collections.abc import Iterator

import numpy as np

from foretoken.catalog.dims import Floats
from foretoken.catalog.quality.host_time import find_host_us, is_launched_by_engines, may_wait
from foretoken.catalog.quality.stored_row import TABLE, StoredRows
from foretoken.catalog.quality.test_definition import FlaggedRows, Judges, QualityTest

# Where the work decides the time, not the launch.
_FLOORS_MIN = 3.0
_ROWS_MIN = 20
# Between the least work and the most, without the outer twentieths.
_SPAN_MIN = 4.0
# Sound tables that mix many shapes have a rank correlation of 0.39 and more, and times that rise
# with 0.27 or more of the work's growth; wrong ones have both below 0.47 and 0.17.
_RANK_CORRELATION_MIN = 0.5
_RISE_MIN = 0.22
# An octave of work with this many rows counts.
_OCTAVE_ROWS_MIN = 5


def _find(rows: StoredRows) -> Iterator[FlaggedRows]:
    for places, table in rows.split(TABLE):
        is_work = table.work_us > _FLOORS_MIN * table.floor_us
        if is_launched_by_engines(table):
            is_work &= ~may_wait(table, find_host_us(table))
        work_us, latency_us = table.work_us[is_work], table.latency_us[is_work]
        if len(work_us) < _ROWS_MIN:
            continue
        least, most = np.quantile(work_us, (0.05, 0.95))
        if most < _SPAN_MIN * least:
            continue
        correlation = np.corrcoef(_ranks(work_us), _ranks(latency_us))[0, 1]
        if correlation < _RANK_CORRELATION_MIN and _rise(work_us, latency_us) < _RISE_MIN:
            yield FlaggedRows(
                places,
                f"over {most / least:.3g} times the work the times of this table hardly rise; "
                f"their rank correlation is {correlation:.2f}",
            )


def _rise(work_us: Floats, latency_us: Floats) -> float:
    """Return the growth of the median time over that of the work, both as logarithms."""
    octaves, inverse, counts = np.unique(
        np.round(np.log2(work_us)), return_inverse=True, return_counts=True
    )
    kept = np.flatnonzero(counts >= _OCTAVE_ROWS_MIN)
    if len(kept) < 2:  # noqa: PLR2004
        return 1.0
    first, last = (np.median(latency_us[inverse == octave]) for octave in (kept[0], kept[-1]))
    return float(np.log2(last / first) / (octaves[kept[-1]] - octaves[kept[0]]))


def _ranks(values: Floats) -> Floats:
    """Return ranks, equal values sharing theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Floats = (last - (counts - 1) / 2)[inverse]
    return ranks


TEST = QualityTest(
    name="ignores_work",
    summary="in a table whose times do not rise with the work",
    judges=Judges.TABLES,
    find=_find,
)
