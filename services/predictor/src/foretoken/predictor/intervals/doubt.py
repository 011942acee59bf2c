"""Further uncertainty about an estimate, of a cause that has nothing to do with those known."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from foretoken.domain.measurements.estimate import LatencyColumns


def widen(found: LatencyColumns, doubt_log: npt.ArrayLike) -> LatencyColumns:
    """Return estimates with bounds as far apart as with a further cause of errors.

    `doubt_log` is within which factor nine tenths of its errors are, in log units. Causes err on
    their own, so it is their squares that add up: factors multiplied would hold only errors that
    are all at their worst at once, and in one direction.
    """
    latency_us = np.asarray(found.latency_us)
    down_log = np.log(latency_us / np.asarray(found.low_us))
    up_log = np.log(np.asarray(found.high_us) / latency_us)
    return replace(
        found,
        low_us=latency_us * np.exp(-np.hypot(down_log, doubt_log)),
        high_us=latency_us * np.exp(np.hypot(up_log, doubt_log)),
    )


def hold_both(found: LatencyColumns, other: LatencyColumns) -> LatencyColumns:
    """Return estimates with bounds that hold those of another answer to the same calls, too."""
    return replace(
        found,
        low_us=np.minimum(found.low_us, other.low_us),
        high_us=np.maximum(found.high_us, other.high_us),
    )
