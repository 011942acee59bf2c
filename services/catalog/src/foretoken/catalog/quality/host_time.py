"""What the host takes for a call of a table whose tool launched calls one by one."""

from typing import Final

import numpy as np

from foretoken.catalog.dims import Mask
from foretoken.catalog.quality.stored_row import StoredRows

# Calls wait for the host where their work is at most this part of what the smallest take.
_WORK_SHARE: Final = 1 / 3
_OUTSIDE_GRAPHS: Final = "prefill"


def is_launched_by_engines(rows: StoredRows) -> bool:
    """Whether engines launch the operator from the host, too, so that waiting is no mistake."""
    return _OUTSIDE_GRAPHS in rows.spec.name


def find_host_us(rows: StoredRows) -> float:
    """Return what the smallest calls take, a tenth of all."""
    is_smallest = rows.work_us <= np.quantile(rows.work_us, 0.1)
    return float(np.median(rows.latency_us[is_smallest]))


def may_wait(rows: StoredRows, host_us: float) -> Mask:
    """Return which calls have so little work that the device may wait for the host."""
    return rows.work_us < _WORK_SHARE * host_us
