"""Which measurements of NVIDIA's tables the starter keeps: of what software, even samples."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from foretoken.domain.frameworks.engine import DEFAULT_PROFILE, find_engine
from foretoken.domain.operators.spec.variant import parse_variant
from foretoken.predictor.software import Relation, parse_software
from foretoken.predictor.training_rows import Series, SeriesKey

# The share of a series' points that is kept where not all are, at least `_MIN_POINTS` of them.
# Source: tests/benchmarks/bench_starter.py, whose errors on points left out are within a tenth of
# those of models of all points. All of a lattice compress to little more than two thirds of it.
_SHARES: Mapping[str, float] = {
    "gemm": 0.28,
    "attention_decode": 0.8,
    "attention_prefill": 0.8,
}
_MIN_POINTS = 2_000
# In how many ways a run of points is sampled: those of one way are alike, and compress.
_NUM_PATTERNS = 2
# Multiples of it, modulo one, fill the interval evenly and never repeat.
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
# Of how tokens may be routed to experts, what is between the two that are kept.
_BETWEEN = "power_law_1.01"
# A version tells of an older one if it has this share of its points, and half of these within this
# factor, twice what models err by on points left out. Source: tests/benchmarks/bench_starter.py.
_MOST, _ALIKE_LOG = 0.5, math.log(1.1)


def choose_points(series: Series) -> npt.NDArray[np.int64]:
    """Return the rows of a series that are kept, ascending."""
    share = max(_SHARES.get(series.key.operator, 1.0), _MIN_POINTS / series.num_points)
    return sample(series.points, share)


def sample(points: npt.NDArray[np.int64], share: float) -> npt.NDArray[np.int64]:
    """Return rows of points in the order of their dimensions: corners, and an even sample.

    Points lie on a lattice; a step that is no ratio of whole numbers leaves no size of it out, as
    every second or third point would.
    """
    starts = _find_runs(points)
    rows = np.arange(len(points))
    run = np.searchsorted(starts, rows, side="right") - 1
    places = (rows - starts[run]) * _GOLDEN + run % _NUM_PATTERNS / _NUM_PATTERNS
    is_end = (points == points.min(axis=0)) | (points == points.max(axis=0))
    return np.flatnonzero((places % 1.0 < share) | is_end.all(axis=1))


def _find_runs(points: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return where rows begin that share their first dimensions: about as many as they are long."""
    is_new = np.arange(len(points)) == 0
    found = []
    for column in points.T:
        is_new = is_new | (np.diff(column, prepend=column[0]) != 0)
        found.append(np.flatnonzero(is_new))
    return min(found, key=lambda starts: abs(math.log(len(starts) ** 2 / len(points))))


def choose_software(found: Mapping[SeriesKey, Series]) -> set[SeriesKey]:
    """Return the series that are kept: of each engine the newest, and what newer ones do not tell.

    That is an older version whose times are others, or of shapes that nobody measured since. Also
    the default profile's. Experts are kept as in a balanced batch and as in the most uneven.
    """
    groups: dict[tuple[SeriesKey, str], list[SeriesKey]] = {}
    for key in found:
        if parse_variant(key.variant).get("routing") == _BETWEEN:
            continue
        alike = replace(key, framework=""), parse_software(key.framework).name
        groups.setdefault(alike, []).append(key)
    kept: set[SeriesKey] = set()
    for keys in groups.values():
        newer: list[SeriesKey] = []
        for key in sorted(keys, key=lambda key: _age(key.framework), reverse=True):
            if not any(_tells(found[known], found[key]) for known in newer):
                newer.append(key)
        usual = [key for key in keys if _is_usual(key)]
        kept |= {*newer, *sorted(usual, key=lambda key: _age(key.framework))[-1:]}
    return kept


def _tells(newer: Series, older: Series) -> bool:
    """Whether a version has most points of an older one, and takes about as long there."""
    common, rows, old_rows = np.intersect1d(
        *map(_as_items, (newer.points, older.points)), assume_unique=True, return_indices=True
    )
    if len(common) < _MOST * older.num_points:
        return False
    ratios = newer.latency_us[rows] / older.latency_us[old_rows]
    return bool(np.median(np.abs(np.log(ratios))) <= _ALIKE_LOG)


def _as_items(points: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
    return np.ascontiguousarray(points).view([("", points.dtype)] * points.shape[1]).ravel()


def _age(framework: str) -> tuple[bool, Sequence[int]]:
    """Return what sorts versions, builds of no release before all others."""
    version = framework.partition(" ")[2]
    return not version.startswith("dev-"), [int(word) for word in re.findall(r"\d+", version)][:4]


def _is_usual(key: SeriesKey) -> bool:
    """Whether a series is of the default profile's software."""
    usual = parse_software(find_engine(DEFAULT_PROFILE).software)
    return usual.relate(key.framework, key.operator)[0] is Relation.SAME
