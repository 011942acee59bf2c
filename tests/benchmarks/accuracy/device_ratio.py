"""How many times faster one device is than another, which is what decides between them.

As the product answers: both devices' tables are there, but for the points asked, which were
measured on both under one engine at one version.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from accuracy.asking import Extent, Say, make_rng
from accuracy.line import Figure, Line, Scores
from accuracy.source import AICONFIGURATOR, Measurements
from accuracy.table import Integers, take
from accuracy.trial import CONFIG, Score, ask, score
from foretoken.domain.measurements.estimate import LatencyColumns
from foretoken.predictor.model_set import ModelSet
from foretoken.predictor.series import Series
from foretoken.predictor.trainer import train_series

NAME = "device ratio"
_OPERATORS = ("gemm", "attention_prefill", "attention_decode", "moe_experts")
_PAIRS = (("h200_sxm", "b200"), ("h100_sxm", "b200"), ("h100_sxm", "h200_sxm"))
_GOAL = Figure(6.0)
# Points asked are one of so many that both devices have, and of tables with fewer none are.
_ASKED_OF, _MIN_COMMON = 10, 200

_Pair = tuple[Series, Series]


def ask_ratios(measurements: Measurements, extent: Extent, say: Say) -> Iterator[Line]:
    """Yield a line per operator and pair of devices."""
    for operator in _OPERATORS:
        every = measurements.read_series(AICONFIGURATOR, operator)
        for devices in _PAIRS:
            pairs = _find_pairs(every, devices)
            scores = Scores()
            for seed in range(extent.num_seeds):
                order = make_rng(seed, operator, *devices).permutation(len(pairs))
                for place in order[: extent.max_tables]:
                    name = _name(pairs[place][0])
                    say(f"{NAME}, seed {seed}: {'/'.join(devices)}, {name}")
                    scores.add(name, seed, _ask_pair(pairs[place], extent.max_points, seed))
            line = scores.summarise(f"{operator} ratio", "/".join(devices), "", _GOAL)
            if line is not None:
                yield line


def _name(series: Series) -> str:
    key = series.key
    return f"{key.framework}|{key.dtype}|{key.variant}|{key.phase}"


def _find_pairs(every: Sequence[Series], devices: tuple[str, str]) -> Sequence[_Pair]:
    """Return the tables that two devices have of the same software and format.

    Of kernels there is the one that the software takes unless another is wanted.
    """
    found: dict[str, dict[str, Series]] = defaultdict(dict)
    for series in every:
        if series.key.framework and not series.key.kernel:
            found[_name(series)][series.key.device] = series
    both = [tuple(tables.get(device) for device in devices) for _, tables in sorted(found.items())]
    return [
        (first, second)
        for first, second in both
        if first is not None and second is not None and _count_common(first, second) >= _MIN_COMMON
    ]


def _count_common(first: Series, second: Series) -> int:
    return len(common_rows(first, second)[0])


def common_rows(first: Series, second: Series) -> tuple[Integers, Integers]:
    """Return the rows of two tables that are of the same points, in one order."""
    places = {tuple(point): row for row, point in enumerate(second.points.tolist())}
    rows = [
        (row, places[point])
        for row, point in enumerate(map(tuple, first.points.tolist()))
        if point in places
    ]
    found = np.array(rows, dtype=np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def _ask_pair(pair: _Pair, max_points: int, seed: int) -> Score:
    """Return the score of the ratio of two devices at points that neither table has."""
    rng = make_rng(seed, _name(pair[0]))
    rows = common_rows(*pair)
    asked = rng.permutation(len(rows[0]))[: min(len(rows[0]) // _ASKED_OF, max_points)]
    first, second = (
        _ask_without(series, own[asked], max_points, rng, seed)
        for series, own in zip(pair, rows, strict=True)
    )
    truth = pair[0].latency_us[rows[0][asked]] / pair[1].latency_us[rows[1][asked]]
    return score(truth, divide(first, second))


def _ask_without(
    series: Series, asked: Integers, max_points: int, rng: np.random.Generator, seed: int
) -> LatencyColumns:
    """Answer for rows of a table by a model of others of its rows, in the order of `asked`."""
    others = np.setdiff1d(np.arange(series.num_points), asked)
    known = take(series, np.sort(rng.permutation(others)[:max_points]))
    models = ModelSet(version="benchmark", series={series.key: train_series(known, CONFIG, seed)})
    return ask(models, series.key, series.points[asked])


def divide(first: LatencyColumns, second: LatencyColumns) -> LatencyColumns:
    """Return one device's times over another's; their errors have nothing to do with each other."""
    ratio = first.latency_us / second.latency_us
    down_log = np.hypot(
        np.log(first.latency_us / first.low_us), np.log(second.high_us / second.latency_us)
    )
    up_log = np.hypot(
        np.log(first.high_us / first.latency_us), np.log(second.latency_us / second.low_us)
    )
    return LatencyColumns(
        latency_us=ratio,
        low_us=ratio * np.exp(-down_log),
        high_us=ratio * np.exp(up_log),
        provenance=np.maximum(first.provenance, second.provenance),
    )
