"""How much longer the backward pass of an operator takes than its forward pass."""

from typing import Any

import numpy as np
import numpy.typing as npt

from foretoken.catalog.dims import Indices, group_rows
from foretoken.catalog.quality.stored_row import StoredRows

# The passes are compared where the work decides the time, not the launch.
_FLOORS_MIN = 3.0
_PAIRS_MIN = 10


def pair_phases(rows: StoredRows) -> tuple[Indices, Indices]:
    """Return forward rows and the backward rows measured with them, at the same dimensions.

    They come from one file and software, which may run either pass by other kernels.
    """
    is_backward = rows.coded["phase"].is_value("backward")
    names = ("run_id", "source_file", "dtype", "framework")
    key: list[npt.NDArray[Any]] = [rows.coded[name].codes for name in names]
    key += rows.columns.values()
    order, _ = group_rows([*key, is_backward])
    # Pairs are neighbours in that order: one forward row and one backward row of the same key.
    same = np.ones(max(len(order) - 1, 0), dtype=bool)
    for column in key:
        ordered = column[order]
        same &= ordered[1:] == ordered[:-1]
    first = np.flatnonzero(same & ~is_backward[order[:-1]] & is_backward[order[1:]])
    return order[first], order[first + 1]


def phase_ratio(rows: StoredRows) -> float | None:
    """Return the median of backward over forward latency, None with too few pairs to tell."""
    forward, backward = pair_phases(rows)
    is_work = rows.work_us[forward] > _FLOORS_MIN * rows.floor_us[forward]
    if np.count_nonzero(is_work) < _PAIRS_MIN:
        return None
    ratios = rows.latency_us[backward[is_work]] / rows.latency_us[forward[is_work]]
    return float(np.median(ratios))
