"""Which calls to measure to tell two strategies apart: those whose errors move the difference."""

from dataclasses import dataclass

import numpy as np

from foretoken.domain.hardware.topology import topology_of_device
from foretoken.domain.measurements.estimate import OperatorTable, Phase
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.training_search import TieCall
from foretoken.simulator.grid import Floats
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.training.shape_library import ShapeLibrary
from foretoken.simulator.search.training.step_time import StepTimer
from foretoken.simulator.steps.call_prices import PricedTable
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
        high_us = np.asarray(priced.answer.high_us, dtype=np.float64)
        for row in np.flatnonzero(high_us > priced.latency_us).tolist():
            call = _DoubtfulCall(priced, self._num_tables, row, float(high_us[row]))
            self.calls.append(call)
        self._num_tables += 1
        return (priced.latency_us,)

    def price(self, priced: PricedTable) -> tuple[Floats, ...]:
        """Return the prices of the table in as many cases as there are calls."""
        prices = np.tile(priced.latency_us, (len(self.calls), 1))
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
