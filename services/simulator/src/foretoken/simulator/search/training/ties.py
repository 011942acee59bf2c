"""Which strategies may be as good as the winner, and what to measure to tell them apart.

Ties are judged by the error of the difference; calls to measure are those whose errors move it.

Estimates of a family of operators err together, as one model makes them: what two strategies have
in common does not change their order. With a family at its upper bounds the one step grows by a and
the other by b: the variance of their difference is a^2 + b^2 - 2 r a b. The correlation r is 1
where both run calls of the same sizes, 0 on two kinds of device, and between other sizes what was
measured of the family. Families err on their own, as `steps/error_parts.py` says, so their
variances add up.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from foretoken.domain.hardware.topology import topology_of_device
from foretoken.domain.measurements.estimate import OperatorTable, Phase
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.training_search import TieCall
from foretoken.simulator.grid import Flags, Floats
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.training.answers import Answers
from foretoken.simulator.search.training.shape_library import ShapeLibrary
from foretoken.simulator.search.training.step_time import StepTimer
from foretoken.simulator.steps.call_prices import PricedTable
from foretoken.simulator.steps.error_parts import ERROR_FAMILIES, StepErrors, price_parts
from foretoken.simulator.steps.strategies import Strategies

# As many are reported, and those that matter at least that much compared with the first.
_MAX_NAMED = 3
_MIN_SHARE = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class _DoubtfulCall:
    """A row of a table, and its price in µs at the upper bound."""

    table: PricedTable
    number: int
    row: int
    high_us: float


def find_tie_calls(
    pair: Strategies, values: Floats, predictor: LatencySource, shapes: ShapeLibrary | None = None
) -> tuple[TieCall, ...]:
    """Return the calls that move the difference of two strategies most, each by its own error.

    `values` of both are what is to be small, in proportion to the step of each.
    """
    probe, shapes = _Probe(), shapes or ShapeLibrary()
    timer = StepTimer(pair.source.scenario, predictor, probe.record, shapes)
    step_us = timer.time(pair).variants_us[0]
    if not probe.calls:
        return ()
    probe.begin_again()
    timer = StepTimer(pair.source.scenario, predictor, probe.price, shapes)
    grown = (timer.time(pair).variants_us - step_us) * (values / step_us)
    moved = np.abs(grown[:, 1] - grown[:, 0]) / np.abs(values[0])
    order = np.argsort(-moved, kind="stable")[:_MAX_NAMED]
    moved_most = order[(moved[order] > 0) & (moved[order] >= _MIN_SHARE * moved.max())]
    return tuple(_describe(probe.calls[number], float(moved[number])) for number in moved_most)


class _Probe:
    """Prices each call alone at its upper bound; which there are is found by asking once before."""

    def __init__(self) -> None:
        self.calls: list[_DoubtfulCall] = []
        self._num_tables = 0

    def begin_again(self) -> None:
        """Take the next table for the first once more."""
        self._num_tables = 0

    def record(self, priced: PricedTable) -> tuple[Floats, ...]:
        """Note the calls that may take longer; return the estimates alone."""
        if priced.is_of_host:
            return (priced.latency_us,)
        high_us = np.asarray(priced.answer.high_us, dtype=np.float64)
        for row in np.flatnonzero(high_us > priced.latency_us).tolist():
            call = _DoubtfulCall(priced, self._num_tables, row, float(high_us[row]))
            self.calls.append(call)
        self._num_tables += 1
        return (priced.latency_us,)

    def price(self, priced: PricedTable) -> tuple[Floats, ...]:
        """Return the prices of the table in as many cases as there are calls."""
        prices = np.tile(priced.latency_us, (len(self.calls), 1))
        if priced.is_of_host:
            return tuple(prices)
        for case, call in enumerate(self.calls):
            if call.number == self._num_tables:
                prices[case, call.row] = call.high_us
        self._num_tables += 1
        return tuple(prices)


def _describe(call: _DoubtfulCall, difference_ratio: float) -> TieCall:
    priced = call.table
    topology = ""
    if find_operator(priced.table.operator).is_collective:
        topology = priced.topology or topology_of_device(priced.device).name
    return TieCall(
        operator=priced.table.operator,
        words=_words(priced.table, call.row),
        device=priced.device,
        topology=topology,
        difference_ratio=difference_ratio,
    )


def _words(table: OperatorTable, row: int) -> str:
    """Return the dimensions of a row and what else tells its series, as commands take them."""
    words = [
        f"{name}={int(np.broadcast_to(column, table.num_rows)[row])}"
        for name, column in table.columns.items()
    ]
    if not find_operator(table.operator).is_collective:
        words.append(f"dtype={table.dtype.name.lower()}")
    if table.phase is not Phase.FORWARD:
        words.append(f"phase={table.phase.name.lower()}")
    if table.variant:
        words.append(f"variant='{table.variant}'")
    return " ".join(words)


@dataclass(frozen=True, slots=True)
class _Family:
    """How errors of a family's calls of different sizes go together.

    `own` are estimates from a device's own measurements, `elsewhere` those from elsewhere, which
    miss a device as a whole. What is computed is of one size where strategies cut layers alike.
    """

    own: float
    elsewhere: float
    is_computed: bool = False


# Source: `tests/benchmarks/bench_error_correlation.py`, on operators measured on five devices; what
# was left out of training is estimated. No training step is in it. Too few networks were measured
# to leave any out: from elsewhere, what goes between nodes and from point to point errs like what
# stays in a node. One host launches everything, so it errs alike.
_BOUND = _Family(0.58, 0.74, is_computed=True)
_FAMILIES: Mapping[str, _Family] = {
    "matrix products": _Family(0.21, 0.70, is_computed=True),
    "attention": _Family(0.13, 0.72, is_computed=True),
    "norms": _BOUND,
    "activations": _BOUND,
    "conversions to 8 bit": _BOUND,
    "rows of experts": _BOUND,
    "the optimizer": _BOUND,
    "other memory-bound operators": _BOUND,
    "collectives in a node": _Family(0.76, 0.76),
    "collectives between nodes": _Family(0.27, 0.76),
    "point to point": _Family(0.16, 0.76),
    "the host": _Family(1.0, 1.0),
}
_OF_PARTS = [_FAMILIES[name] for name in ERROR_FAMILIES]
CORRELATIONS: Floats = np.array(
    [family.own for family in _OF_PARTS] + [family.elsewhere for family in _OF_PARTS]
)
IS_COMPUTED: Flags = np.array([family.is_computed for family in _OF_PARTS] * 2)
# What makes calls that a device computes of one size.
_SIZES = ("tp", "cp", "ep", "micro_batch_size")


@dataclass(frozen=True, slots=True, eq=False)
class TimedErrors:
    """Errors of steps, and how they go together with those of the first: (part, step)."""

    of_steps: StepErrors
    correlation: Floats


def find_ties(errors: Floats, values: Floats, correlation: Floats) -> Flags:
    """Return which strategies tie with the first of them, which is the winner and does so itself.

    `values` is what is to be small; `errors` of them and how they go together with those of the
    first are (part, strategy).
    """
    of_difference = difference_errors(errors, correlation)
    return np.asarray(values - values[0] <= of_difference, dtype=np.bool_)


def correlate_errors(strategies: Strategies) -> Floats:
    """Return how errors of each go together with those of the first: (part, strategy)."""
    found = correlate_sizes(strategies)
    found[:, strategies.device != strategies.device[0]] = 0.0
    return found


def correlate_sizes(strategies: Strategies) -> Floats:
    """Return the same as if all were on one kind of device: (part, strategy)."""
    found = np.repeat(CORRELATIONS[:, np.newaxis], len(strategies), axis=1)
    columns = [getattr(strategies, name) for name in _SIZES]
    is_same_size = np.all([column == column[0] for column in columns], axis=0)
    found[IS_COMPUTED[:, np.newaxis] & is_same_size] = 1.0
    found[:, 0] = 1.0
    return found


def time_errors(
    answers: Answers, predictor: LatencySource, shapes: ShapeLibrary | None = None
) -> TimedErrors:
    """Return the errors of steps, which are timed once more.

    The predictor is asked one question for each kind of device.
    """
    strategies = answers.strategies
    timer = StepTimer(strategies.source.scenario, predictor, price_parts, shapes)
    by_part_us = timer.time(strategies).variants_us
    return TimedErrors(
        StepErrors.of_steps(answers.step_us, by_part_us), correlate_errors(strategies)
    )


def difference_errors(errors: Floats, correlation: Floats) -> Floats:
    """Return the error of each strategy's difference from the first; all are (part, strategy)."""
    first = errors[:, :1]
    # Squares alone, so that what is the same leaves nothing.
    common = correlation * (errors - first) ** 2
    own = (1 - correlation) * (errors**2 + first**2)
    total: Floats = np.sqrt((common + own).sum(axis=0))
    return total
