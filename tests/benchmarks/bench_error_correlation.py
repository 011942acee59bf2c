"""Measure how errors of estimates go together: calls of one kind of operator, at other sizes.

Strategies tie by the error of their difference, which needs the correlation of errors. It is
measured on the operators of `training_tables.py`, which hold no training step:

- own: a model of a device's own measurements is asked for sizes, configurations and octaves that
  were left out of its training, as training itself leaves them out;
- transferred: a device (for collectives a topology) is left out whole, and its calls are estimated
from
  the same operator elsewhere;
- software: what another engine, or another version of it, took for the same calls on the same
  device, which is how far a step may be from the table of its operators.

Of each model so made the mean product of the errors of two calls is held against their mean
square, where the calls are half an octave to seven octaves apart, all dimensions together: as far
as another degree of parallelism or micro batch moves a call. Every model has one voice.

Then the errors of differences so found are held against vTrain's 47 measured strategies of a 39B
model on 512 A100: how many differences of two are within theirs, how many pairs are called sure,
and how many of these are in the other order. Nothing is chosen by that.

    python tests/benchmarks/bench_error_correlation.py [path of the shared measurements]
        [--home FOLDER]
"""

import argparse
import itertools
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from trained_predictor import open_measurements, trained_predictor
from training_rows import PublishedStep, read_steps

from foretoken.domain.measurements.estimate import OperatorTable
from foretoken.domain.measurements.measurement import MeasurementFilter
from foretoken.domain.operators.spec.operator import OperatorSpec
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import OVERLAPS, WEIGHT_PARALLELS
from foretoken.domain.units import US_PER_MS
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.held_out import to_errors
from foretoken.predictor.intervals.coverage import Tier
from foretoken.predictor.intervals.holdout import SplitKind
from foretoken.predictor.regression.cross_validation import Answers, CrossValidation, Part, Unseen
from foretoken.predictor.regression.curves import fit_curve_regressor, has_curves
from foretoken.predictor.regression.member import NAMES, MemberFitter
from foretoken.predictor.regression.mixture import learn_shares
from foretoken.predictor.regression.series_regressor import spread
from foretoken.predictor.roofline import FloatColumn, IntColumn
from foretoken.predictor.series import Series, SeriesKey
from foretoken.predictor.training_rows import read_series
from foretoken.predictor.transfer import train_transfers, transfer_names
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.training.step_time import StepTimer
from foretoken.simulator.search.training.ties import correlate_errors, difference_errors
from foretoken.simulator.steps.error_parts import (
    ERROR_FAMILIES,
    StepErrors,
    families_of,
    price_parts,
)
from foretoken.simulator.steps.strategies import (
    AXES,
    RECOMPUTE_MODES,
    Strategies,
    StrategySource,
)

_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
_SEED = 0
# Octaves between two calls.
_NEAR, _FAR = 0.5, 7.0
_MIN_POINTS, _NUM_PAIRS, _MIN_PAIRS = 40, 200_000, 20
# One call that is off by more speaks for itself alone.
_MAX_ERROR_LOG = 3.0
_CONFIG = PredictorConfig(state_folder="unused")


@dataclass(slots=True)
class _Sums:
    """Of the models of a family: mean products of two errors, and mean squares."""

    products: list[float] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)

    def add(self, points: IntColumn, error_log: FloatColumn) -> None:
        """Take the errors of one model into account."""
        error_log = np.clip(error_log, -_MAX_ERROR_LOG, _MAX_ERROR_LOG)
        place = np.log2(np.maximum(points, 1).astype(np.float64))
        rng = np.random.default_rng(_SEED)
        one, other = rng.integers(0, len(points), (2, _NUM_PAIRS))
        octaves = np.abs(place[one] - place[other]).sum(axis=1)
        chosen = (octaves >= _NEAR) & (octaves < _FAR)
        if chosen.sum() >= _MIN_PAIRS:
            first, second = error_log[one[chosen]], error_log[other[chosen]]
            self.products.append(float((first * second).mean()))
            self.squares.append(float(np.sqrt((first**2).mean() * (second**2).mean())))


def main(arguments: Sequence[str]) -> None:
    """Print the correlation of each family, of own and of transferred estimates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("data", nargs="?", type=Path, default=_DATA, help="shared measurements")
    parser.add_argument("--home", type=Path, help="a trained predictor's home, to use its catalog")
    options = parser.parse_args(arguments)
    if not options.data.is_dir() and options.home is None:
        _say(f"skipped: {options.data} is not on this machine")
        return
    with open_measurements(options.data, options.home) as catalog:
        every = read_series(catalog.read_measurements(MeasurementFilter()))
    series = [
        item
        for item in every
        if item.key.framework and not item.key.kernel and len(item.points) >= _MIN_POINTS
    ]
    _print_correlations(series)
    truth = options.data / "training_truth"
    if truth.is_dir():
        steps = [step for step in read_steps(truth) if step.source == "vTrain, 39.1B"]
        with trained_predictor(options.data, options.home) as predictor:
            _judge(steps, predictor)


def _print_correlations(series: Sequence[Series]) -> None:
    for name, found in (
        ("own", _own(series)),
        ("transferred", _transferred(series)),
        ("software", _software(series)),
    ):
        for family, title in enumerate(ERROR_FAMILIES):
            if sums := found.get(family):
                _say(
                    f"{name}, {title}: {sum(sums.products) / sum(sums.squares):.2f}"
                    f" ({len(sums.products)} models, off by {np.sqrt(np.mean(sums.squares)):.1%})"
                )


def _own(series: Sequence[Series]) -> dict[int, _Sums]:
    found: dict[int, _Sums] = defaultdict(_Sums)
    for item in series:
        unseen, shares = _leave_out(item)
        for part in unseen:
            # Single calls left out at random have neighbours on all sides: no search queries these.
            errors = to_errors([part], shares)
            if part.kind is not SplitKind.RANDOM and errors is not None:
                for family, rows in _split(item, part.points):
                    found[family].add(part.points[rows], errors.error_log[rows])
    return found


def _leave_out(series: Series) -> tuple[Sequence[Unseen], np.ndarray]:
    """Return what models said of the points they had not seen, and the shares of their members."""
    spec, design = series.key.spec, series.design
    log_ratio = np.log(series.latency_us / design.base_us)
    validation = CrossValidation(spec, design, log_ratio, _SEED)
    if has_curves(spec):

        def ask_curves(known: Part, asked: Part, tiers: IntColumn) -> Answers:
            trained = fit_curve_regressor(known.design, log_ratio[known.rows])
            prediction = trained.predict(asked.design, tiers)
            return prediction.log_ratio[:, None], prediction.spread_log

        return list(validation.leave_out(ask_curves)), np.ones((len(Tier), 1))
    fitter = MemberFitter(_CONFIG, _SEED, design, log_ratio, np.arange(design.num_rows))

    def ask(known: Part, asked: Part, _: IntColumn) -> Answers:
        answers, deviation_log = fitter.ask_part(known, asked)
        return answers, spread(answers, deviation_log)

    unseen = list(validation.leave_out(ask))
    return unseen, learn_shares(unseen, len(NAMES))


def _transferred(series: Sequence[Series]) -> dict[int, _Sums]:
    found: dict[int, _Sums] = defaultdict(_Sums)
    for left_out in sorted({(item.key.operator, _place(item)) for item in series}):
        operator, place = left_out
        same = [item for item in series if item.key.operator == operator]
        others = [item for item in same if _place(item) != place]
        models = train_transfers(others, _CONFIG, _SEED)
        for item in same:
            names = transfer_names(item.key.spec, item.key.target.device, item.key.variant)
            name = next((name for name in names if name in models), "")
            if _place(item) == place and name:
                design = item.design
                log_ratio = np.log(item.latency_us / design.base_us)
                error_log = log_ratio - models[name].predict(design)
                for family, rows in _split(item, item.points):
                    found[family].add(item.points[rows], error_log[rows])
    return found


def _software(series: Sequence[Series]) -> dict[int, _Sums]:
    found: dict[int, _Sums] = defaultdict(_Sums)
    alike: dict[SeriesKey, list[Series]] = defaultdict(list)
    for item in series:
        alike[replace(item.key, framework="")].append(item)
    for members in alike.values():
        for one, other in itertools.combinations(members, 2):
            times_us = dict(zip(map(tuple, other.points.tolist()), other.latency_us, strict=True))
            shared = [row for row, p in enumerate(map(tuple, one.points.tolist())) if p in times_us]
            if len(shared) < _MIN_PAIRS:
                continue
            points = one.points[shared]
            others_us = np.array([times_us[point] for point in map(tuple, points.tolist())])
            error_log = np.log(one.latency_us[shared] / others_us)
            for family, rows in _split(one, points):
                found[family].add(points[rows], error_log[rows])
    return found


def _place(series: Series) -> str:
    return series.key.topology or series.key.device


def _split(series: Series, points: IntColumn) -> Iterator[tuple[int, IntColumn]]:
    """Yield the rows of each family of errors: collectives are of two."""
    spec: OperatorSpec = series.key.spec
    columns = {name: points[:, index] for index, name in enumerate(spec.dim_names)}
    table = OperatorTable(
        operator=spec.name,
        dtype=series.key.target.dtype,
        phase=series.key.target.phase,
        columns=columns,
    )
    families = families_of(table)
    for family in np.unique(families).tolist():
        rows = np.flatnonzero(families == family)
        if len(rows) > 1:
            yield family, rows


def _judge(steps: Sequence[PublishedStep], predictor: LatencySource) -> None:
    """Print how often the errors of differences hold, and how often a sure order is wrong."""
    strategies = _columns([step.scenario for step in steps])
    estimates = StepTimer(strategies.source.scenario, predictor).time(strategies).step_us
    timer = StepTimer(strategies.source.scenario, predictor, price_parts)
    errors = StepErrors.of_steps(estimates, timer.time(strategies).variants_us).up_us
    measured = np.array([step.measured_ms for step in steps]) * US_PER_MS
    inside, sure, wrong = [], [], []
    for first in range(len(steps)):
        rows = np.array([first, *range(first + 1, len(steps))])
        bound = difference_errors(errors[:, rows], correlate_errors(strategies.take(rows)))[1:]
        told = estimates[rows[1:]] - estimates[first]
        true = measured[rows[1:]] - measured[first]
        inside += (np.abs(told - true) <= bound).tolist()
        sure += (np.abs(told) > bound).tolist()
        wrong += ((np.abs(told) > bound) & (np.sign(told) != np.sign(true))).tolist()
    _say(
        f"vTrain: of {len(inside):,} differences {np.mean(inside):.1%} within their error; of"
        f" {np.mean(sure):.1%} of the pairs called sure {sum(wrong) / sum(sure):.1%} are wrong"
    )


def _columns(scenarios: Sequence[TrainingScenario]) -> Strategies:
    """Return scenarios that differ by their strategies alone as columns."""
    base = scenarios[0]
    schedules = tuple(dict.fromkeys(item.pipeline_schedule for item in scenarios))
    hides = base.trainer.resolve().overlaps_gradient_reduction
    own: dict[str, list[int]] = {
        "device": [0 for _ in scenarios],
        "num_devices": [item.layout.num_devices for item in scenarios],
        "overlap": [OVERLAPS.index("data" if hides else "none") for _ in scenarios],
        "recompute": [RECOMPUTE_MODES.index(item.recompute) for item in scenarios],
        "weight_parallel": [WEIGHT_PARALLELS.index(item.weight_parallel) for item in scenarios],
        "pipeline_schedule": [schedules.index(item.pipeline_schedule) for item in scenarios],
        **{
            name: [getattr(item.layout, name) for item in scenarios]
            for name in ("tp", "pp", "cp", "ep")
        },
    }
    columns = {
        name: np.array(
            own.get(name) or [int(getattr(item, name)) for item in scenarios], dtype=np.int64
        )
        for name in AXES
    }
    source = StrategySource(scenario=base, devices=(base.device,), pipeline_schedules=schedules)
    return Strategies(source=source, **columns)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
