"""Collectives: the achieved rate over message size, one curve per group of ranks.

Inside a curve plain interpolation beats trees. A group nobody measured takes the curve of the
nearest one: the base latency already holds the ring's law for its number of ranks.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretoken.domain.operator import OperatorSpec
from foretoken.predictor.features import CONFIGURATION_DIMS, Design
from foretoken.predictor.roofline import FloatColumn

_FILTER_WIDTH = 5
# Groups inside a node and across nodes use other links: as far apart as 2^16 times the ranks.
_OTHER_LINK_OCTAVES = 16.0


@dataclass(slots=True)
class CurveRegressor:
    """Median-filtered log ratios at measured sizes, interpolated over log size.

    `points` are (message bytes, devices per node, nodes), `smooth_log` the ratio at each.
    """

    points: npt.NDArray[np.int64]
    smooth_log: FloatColumn
    residual_log: FloatColumn

    def smooth(self, design: Design) -> FloatColumn:
        """Return the log ratio of every call; beyond a curve's ends it stays as at the end."""
        log_ratio = np.empty(design.num_rows)
        asked, inverse = np.unique(design.points[:, 1:], axis=0, return_inverse=True)
        measured = np.unique(self.points[:, 1:], axis=0)
        for index, group in enumerate(asked):
            nearest = measured[np.argmin(_group_distance(measured, group))]
            on_curve = (self.points[:, 1:] == nearest).all(axis=1)
            sizes = np.log2(1.0 + self.points[on_curve, 0])
            rows = inverse.reshape(-1) == index
            log_ratio[rows] = np.interp(
                design.log_points[rows, 0], sizes, self.smooth_log[on_curve]
            )
        return log_ratio


def has_curves(spec: OperatorSpec) -> bool:
    """Tell whether an operator is one size over groups of ranks."""
    size, *group = spec.dim_names
    return (
        spec.is_collective
        and size not in CONFIGURATION_DIMS
        and tuple(group) == ("devices_per_node", "num_nodes")
    )


def fit_curve_regressor(design: Design, log_ratio: FloatColumn) -> CurveRegressor:
    """Filter the curve of every group; points are in canonical order but for their size."""
    order = np.lexsort(design.points.T)
    points, values = design.points[order], log_ratio[order]
    smooth = np.empty(len(values))
    _, inverse = np.unique(points[:, 1:], axis=0, return_inverse=True)
    for index in range(int(inverse.max()) + 1):
        rows = inverse.reshape(-1) == index
        smooth[rows] = _median_filter(values[rows])
    # What the filter takes away is noise, not something to carry over to neighbours.
    return CurveRegressor(points, smooth, np.zeros(len(smooth)))


def _median_filter(values: FloatColumn) -> FloatColumn:
    half = min(_FILTER_WIDTH // 2, (len(values) - 1) // 2)
    if half == 0:
        return values
    # Windows shrink towards the ends, so that the ends keep their slope.
    return np.array(
        [
            np.median(values[i - reach : i + reach + 1])
            for i in range(len(values))
            for reach in (min(half, i, len(values) - 1 - i),)
        ]
    )


def _group_distance(measured: npt.NDArray[np.int64], group: npt.NDArray[np.int64]) -> FloatColumn:
    is_other_link = (measured[:, 1] > 1) != (group[1] > 1)
    octaves = np.abs(np.log2(measured) - np.log2(group)).sum(axis=1)
    return np.asarray(octaves + _OTHER_LINK_OCTAVES * is_other_link)
