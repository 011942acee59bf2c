"""Ways to leave measured points out, each asking how well a model answers one kind of question."""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from foretoken.domain.operators.spec.operator import OperatorSpec
from foretoken.predictor.features import Design
from foretoken.predictor.intervals.coverage import (
    configuration_codes,
    is_grid_axis,
    own_values,
    sweep_axes,
)
from foretoken.predictor.roofline import FloatColumn, IntColumn

_Mask = npt.NDArray[np.bool_]

# A fifth of the points, values or configurations is left out at once: the more are left out, the
# less like the final model is the one that is measured.
_NUM_PARTS = 5
# So many of the fifths are left out, one model each: two, and of values and configurations three
# where two would leave out fewer than a bound needs.
_NUM_FIFTHS, _MAX_FIFTHS, _MIN_GROUPS = 2, 3, 10
# Octaves peeled off one after the other.
_NUM_BEYOND = 2
# Where values of an axis nearly number the points, runs of them are left out: octaves in every
# second split, in the others as many values as make this many runs.
_NUM_RUNS = 25
# An octave's lower end is outside it, whatever rounding does.
_WHOLE = 1.0 + 1e-9
# With fewer points left on either side a split says nothing.
_MIN_ROWS = 4
# One model answers for several kinds of splits where they leave it as many rows.
_MIN_SHARED_ROWS = 60
# One configuration says nothing of how another differs: two have to be left to learn from.
_MIN_CONFIGURATIONS = 3


class SplitKind(enum.Enum):
    """What a split leaves out."""

    RANDOM = "random"
    SIZES = "sizes"
    CONFIGURATIONS = "configurations"
    BEYOND = "beyond"


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Rows to train on, rows held out, and which of the latter were left out as one.

    Rows further out than an octave held out are neither.
    """

    inside: IntColumn
    outside: IntColumn
    group: IntColumn
    kind: SplitKind

    def take(self, rows: npt.NDArray[Any]) -> "Split":
        """Return the split with only some of the rows it holds out."""
        return replace(self, outside=self.outside[rows], group=self.group[rows])

    def thin(self, count: int, rng: "np.random.Generator") -> "Split":
        """Return the split with at most so many of the rows it holds out."""
        return self.take(thin_rows(np.arange(len(self.outside)), count, rng))


@dataclass(frozen=True, slots=True)
class Fold:
    """Rows that one model is trained on, and the splits whose rows it is asked for."""

    inside: IntColumn
    splits: Sequence[Split]


def share_models(splits: Sequence[Split], num_rows: int) -> Iterator[Fold]:
    """Yield all splits, those of different kinds together that leave one model enough rows.

    Each is asked only for rows that no other of its fold leaves out: an error has one reason.
    """
    waiting = list(splits)
    while waiting:
        members: list[Split] = []
        num_missed = np.zeros(num_rows, dtype=np.int64)
        for split in waiting:
            missed = num_missed + 1
            missed[split.inside] -= 1
            is_first = split.kind not in {member.kind for member in members}
            if not members or (is_first and (missed == 0).sum() >= _MIN_SHARED_ROWS):
                members.append(split)
                num_missed = missed
        waiting = [split for split in waiting if split not in members]
        asked = [split.take(num_missed[split.outside] == 1) for split in members]
        yield Fold(np.flatnonzero(num_missed == 0), [s for s in asked if len(s.outside)])


def thin_rows(rows: IntColumn, count: int, rng: "np.random.Generator") -> IntColumn:
    """Return at most so many of the rows, drawn at random, in their order."""
    return rows if len(rows) <= count else np.sort(rng.choice(rows, count, replace=False))


def split_points(spec: OperatorSpec, design: Design, seed: int) -> Iterator[Split]:
    """Yield all splits that a model is measured by, but those that leave too few points."""
    rng = np.random.default_rng(seed)
    yield from _split_random(design, rng)
    yield from _split_sizes(spec, design, rng)
    yield from _split_configurations(spec, design, rng)
    yield from _split_beyond(spec, design)


def _split_random(design: Design, rng: "np.random.Generator") -> Iterator[Split]:
    rows = np.arange(design.num_rows)
    part = rng.permutation(design.num_rows) % _NUM_PARTS
    for index in range(_NUM_FIFTHS):
        yield from _split(part == index, rows, SplitKind.RANDOM)


def _split_sizes(spec: OperatorSpec, design: Design, rng: "np.random.Generator") -> Iterator[Split]:
    """Leave out whole values of the finest axis, or runs of them; never its ends.

    Drawn at random, so that some gaps are of several values.
    """
    column = _finest_axis(spec, design)
    values = np.unique(column, return_inverse=True)[1]
    order = rng.permutation(int(values.max()) + 1)
    for index in range(_count_fifths(len(order))):
        codes = values
        if not is_grid_axis(column):
            codes = _runs(column, values, is_by_octave=index % 2 == 1)
        inner = order[(order > 0) & (order < codes.max())]
        yield from _split(np.isin(codes, inner[index::_NUM_PARTS]), codes, SplitKind.SIZES)


def _count_fifths(num_groups: int) -> int:
    is_enough = _NUM_FIFTHS * num_groups >= _MIN_GROUPS * _NUM_PARTS
    return _NUM_FIFTHS if is_enough else _MAX_FIFTHS


def _runs(column: FloatColumn, codes: IntColumn, *, is_by_octave: bool) -> IntColumn:
    if is_by_octave:
        return np.unique(np.floor(column - column.min()), return_inverse=True)[1]
    return np.asarray(codes * _NUM_RUNS // (int(codes.max()) + 1))


def _split_configurations(
    spec: OperatorSpec, design: Design, rng: "np.random.Generator"
) -> Iterator[Split]:
    """Leave out whole configurations."""
    codes = np.unique(configuration_codes(spec, design.points), return_inverse=True)[1]
    count = int(codes.max()) + 1
    if count >= _MIN_CONFIGURATIONS:
        part = (rng.permutation(count) % _NUM_PARTS)[codes]
        for index in range(_count_fifths(count)):
            yield from _split(part == index, codes, SplitKind.CONFIGURATIONS)


def _split_beyond(spec: OperatorSpec, design: Design) -> Iterator[Split]:
    """Leave out the upper octave of the finest axis, of a configuration's own range if it has one.

    Then the octave below, of what is left. All points of an octave may err alike: one group.
    """
    column = np.exp2(_finest_axis(spec, design)) - 1.0
    owner = np.unique(configuration_codes(spec, design.points), return_inverse=True)[1]
    end = np.full(int(owner.max()) + 1, column.max())
    for index, own in own_values(column, owner):
        end[index] = own[-1]
    one_group = np.zeros(design.num_rows, dtype=np.int64)
    for _ in range(_NUM_BEYOND):
        is_left = column <= end[owner] * _WHOLE
        end = end / 2.0
        is_out = is_left & (column > end[owner] * _WHOLE)
        yield from _split(is_out, one_group, SplitKind.BEYOND, is_left)


def _split(
    is_out: _Mask, group: IntColumn, kind: SplitKind, is_left: _Mask | None = None
) -> Iterator[Split]:
    is_in = ~is_out if is_left is None else is_left & ~is_out
    inside, outside = np.flatnonzero(is_in), np.flatnonzero(is_out)
    if min(len(inside), len(outside)) >= _MIN_ROWS:
        yield Split(inside, outside, group[outside], kind)


def _finest_axis(spec: OperatorSpec, design: Design) -> FloatColumn:
    """Return, in log2, the axis that the sweep steps through most finely.

    One that nearly numbers the points (the mean length of a ragged batch) is taken only for want
    of another: leaving out one of its values leaves out a single point.
    """
    columns = design.axes[:, sweep_axes(spec) or slice(None)].T
    counts = [len(np.unique(column)) for column in columns]
    shared = [
        count if count > 1 and is_grid_axis(column) else 0
        for count, column in zip(counts, columns, strict=True)
    ]
    return np.asarray(columns[int(np.argmax(shared if any(shared) else counts))])
