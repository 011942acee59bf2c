"""Which points to leave out: each cut shows how well a model answers one kind of question.

A cut gets the columns of a table's points and a generator, and returns a mask of the points held
out, nowhere true where the table cannot be asked that way.
"""

from collections.abc import Callable, Mapping

import numpy as np

from accuracy.table import Integers, Mask
from foretoken.domain.operators.spec.operator import OperatorSpec
from foretoken.predictor.intervals.coverage import configuration_columns

Columns = Mapping[str, Integers]
Axis = Callable[[Columns], Integers]
Cut = Callable[[Columns, np.random.Generator], Mask]

_SHARE = 0.2
# Runs of neighbouring values that a gap is one of: a fifth of them is held out.
_NUM_RUNS = 25


def hold_out_random(columns: Columns, rng: np.random.Generator) -> Mask:
    """Hold out a fifth of the points."""
    num_points = len(next(iter(columns.values())))
    is_out = np.zeros(num_points, dtype=bool)
    is_out[rng.permutation(num_points)[: int(_SHARE * num_points)]] = True
    return is_out


def hold_out_values(axis: Axis) -> Cut:
    """Hold out a fifth of an axis' values; never its ends, which would be extrapolation."""

    def cut(columns: Columns, rng: np.random.Generator) -> Mask:
        values, codes = np.unique(axis(columns), return_inverse=True)
        return _draw(codes.reshape(-1), np.arange(1, len(values) - 1), rng)

    return cut


def hold_out_gaps(axis: Axis) -> Cut:
    """Hold out a fifth of the runs that an axis' values are cut into; never the outer ones."""

    def cut(columns: Columns, rng: np.random.Generator) -> Mask:
        values, codes = np.unique(axis(columns), return_inverse=True)
        run_of_value = np.arange(len(values)) * _NUM_RUNS // len(values)
        return _draw(run_of_value[codes.reshape(-1)], np.arange(1, _NUM_RUNS - 1), rng)

    return cut


def hold_out_groups(*names: str) -> Cut:
    """Hold out a fifth of the combinations that some dimensions take, at least one."""

    def cut(columns: Columns, rng: np.random.Generator) -> Mask:
        groups = _group(columns, names)
        num_groups = int(groups.max()) + 1
        return _draw(groups, np.arange(num_groups if num_groups > 1 else 0), rng)

    return cut


def hold_out_octave(name: str) -> Cut:
    """Hold out one octave of a dimension, anywhere but in the lowest and the highest."""

    def cut(columns: Columns, rng: np.random.Generator) -> Mask:
        octaves = np.log2(columns[name])
        low, high = octaves.min() + 1.0, octaves.max() - 2.0
        start = rng.uniform(low, max(low, high))
        return np.asarray((octaves >= start) & (octaves < start + 1.0))

    return cut


def hold_out_beyond(axis: Axis, *group_names: str) -> Cut:
    """Hold out everything above half an axis' largest value, of each group where there are some."""

    def cut(columns: Columns, _: np.random.Generator) -> Mask:
        values, groups = axis(columns), _group(columns, group_names)
        largest = np.zeros(int(groups.max()) + 1, dtype=values.dtype)
        np.maximum.at(largest, groups, values)
        return np.asarray(2 * values > largest[groups])

    return cut


def dimension(name: str) -> Axis:
    """Return the axis that is a dimension itself."""
    return lambda columns: columns[name]


def per_sequence(name: str) -> Axis:
    """Return the axis of a sum over sequences, one sequence's share of it."""
    return lambda columns: columns[name] // columns["num_seqs"]


def finest(spec: OperatorSpec) -> Axis:
    """Return the dimension with the most values of those that no configuration fixes."""
    fixed = configuration_columns(spec)
    names = [name for i, name in enumerate(spec.dim_names) if i not in fixed] or spec.dim_names

    def axis(columns: Columns) -> Integers:
        return columns[max(names, key=lambda name: len(np.unique(columns[name])))]

    return axis


def _draw(codes: Integers, candidates: Integers, rng: np.random.Generator) -> Mask:
    if not len(candidates):
        return np.zeros(len(codes), dtype=bool)
    count = max(1, round(_SHARE * len(candidates)))
    return np.isin(codes, rng.choice(candidates, count, replace=False))


def _group(columns: Columns, names: tuple[str, ...]) -> Integers:
    if not names:
        return np.zeros(len(next(iter(columns.values()))), dtype=np.int64)
    keys = np.stack([columns[name] for name in names], axis=1)
    return np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
