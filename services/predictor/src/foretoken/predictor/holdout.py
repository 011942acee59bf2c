"""Ways to leave measured points out, each asking how well a model answers one kind of question."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretoken.domain.operator import OperatorSpec
from foretoken.predictor.coverage import configuration_columns

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Split:
    """Rows to train on, rows held out, and which of the latter were left out as one."""

    inside: Rows
    outside: Rows
    group: Rows


_NUM_FOLDS = 3
# With fewer points left on either side a split says nothing.
_MIN_ROWS = 4


def split_sizes(spec: OperatorSpec, points: Rows, seed: int) -> Iterator[Split]:
    """Yield splits that leave out whole values of the finest axis."""
    values = points[:, _finest_axis(spec, points)]
    _, codes = np.unique(values, return_inverse=True)
    fold_of_value = np.random.default_rng(seed).permutation(codes.max() + 1) % _NUM_FOLDS
    yield from _folds(fold_of_value[codes], codes)


def split_configurations(spec: OperatorSpec, points: Rows, seed: int) -> Iterator[Split]:
    """Yield splits that leave out whole configurations; none where there is only one."""
    configurations = points[:, configuration_columns(spec)]
    distinct, codes = np.unique(configurations, axis=0, return_inverse=True)
    if len(distinct) > 1:
        fold_of_value = np.random.default_rng(seed).permutation(len(distinct)) % _NUM_FOLDS
        codes = codes.reshape(-1)
        yield from _folds(fold_of_value[codes], codes)


def split_beyond(spec: OperatorSpec, points: Rows) -> Iterator[Split]:
    """Yield one split that leaves out the upper half of the finest axis' range."""
    values = points[:, _finest_axis(spec, points)]
    fold = (values > values.max() / 2).astype(np.int64)
    yield from _folds(fold, values, held_out=(1,))


def _folds(fold: Rows, group: Rows, held_out: tuple[int, ...] = ()) -> Iterator[Split]:
    for index in held_out or range(int(fold.max()) + 1):
        inside, outside = np.flatnonzero(fold != index), np.flatnonzero(fold == index)
        if min(len(inside), len(outside)) >= _MIN_ROWS:
            yield Split(inside, outside, group[outside])


def _finest_axis(spec: OperatorSpec, points: Rows) -> int:
    """Return the dimension that changes from step to step with the most values.

    One that nearly numbers the points (the sum of a ragged batch) is taken only for want of
    another: leaving out one of its values leaves out a single point.
    """
    fixed = configuration_columns(spec)
    axes = [i for i in range(points.shape[1]) if i not in fixed] or list(range(points.shape[1]))
    counts = {axis: len(np.unique(points[:, axis])) for axis in axes}
    shared = {axis: n for axis, n in counts.items() if 1 < n <= len(points) / 4}
    chosen = shared or counts
    return max(chosen, key=lambda axis: chosen[axis])
