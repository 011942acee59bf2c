"""Which strategies of a mixed cluster may be as good as the winner: by the error of the difference.

Every kind of node has error families of its own, which err apart from those of another kind: a
strategy that does not use a kind has no error of it.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from foretoken.domain.measurements.estimate import OperatorTable
from foretoken.simulator.grid import Flags, Floats
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.placement.columns import PlacedStrategies
from foretoken.simulator.search.placement.sample import Samples
from foretoken.simulator.search.placement.stage_cost import PriceCases, StagePrices
from foretoken.simulator.search.placement.step_time import time_placed
from foretoken.simulator.search.training.answers import Answers
from foretoken.simulator.search.training.error_families import CORRELATIONS, parts_of
from foretoken.simulator.search.training.ties import correlate_sizes, difference_errors
from foretoken.simulator.steps.program import Column
from foretoken.simulator.training.operator_prices import OperatorPrices, Price
from foretoken.simulator.training.variability import Spread, StepColumns


def find_placed_ties(
    answers: Answers, values: Floats, samples: Samples, predictor: LatencySource
) -> Flags:
    """Return which strategies tie with the first of them, which is the winner and does so itself.

    `values` is what is to be small, in proportion to the step of each. Strategies are timed once
    more, each part of an error family of a kind of node at its upper bounds in turn.
    """
    strategies = answers.strategies
    if not isinstance(strategies, PlacedStrategies):
        raise TypeError("strategies of a mixed cluster are columns of their own")
    space, points = strategies.space, strategies.points
    prices = StagePrices(space, samples, predictor, list_cases(len(space.kinds)))
    prices.measure(points)
    grown = time_placed(points, list(strategies.chunk_layers), space, prices)
    errors = (grown.step_us.T - answers.step_us) * (values / answers.step_us)
    correlation = np.tile(correlate_sizes(strategies), (len(space.kinds), 1))
    of_difference = difference_errors(errors, correlation)
    return np.asarray(values - values[0] <= of_difference, dtype=np.bool_)


def list_cases(num_kinds: int) -> PriceCases:
    """Return one case for each of `CORRELATIONS` on each kind of node, which is at its bounds."""
    num_cases = len(CORRELATIONS) * num_kinds
    return PriceCases(columns=_CaseColumns.of(num_cases), num_cases=num_cases, mark=_mark)


@dataclass(frozen=True, slots=True)
class _CasePrice(Price):
    """A price that is at its upper bound in one case."""

    case: int

    def of_share(self, share: float) -> "_CasePrice":
        """Return what a part of the call costs."""
        return replace(
            self,
            latency_us=self.latency_us * share,
            low_us=self.low_us * share,
            high_us=self.high_us * share,
        )


@dataclass(frozen=True, slots=True)
class _CaseColumns(StepColumns):
    """Columns of which each has other prices at their upper bounds."""

    @classmethod
    def of(cls, num_cases: int) -> Self:
        """Return columns of the typical step."""
        typical = StepColumns.of_answer(Spread(), 0)
        bounds, draws = (np.repeat(part[:1], num_cases) for part in (typical.bounds, typical.draws))
        return cls(Spread(), bounds, draws, np.ones(num_cases, dtype=np.bool_))

    def price(self, price: Price) -> Column:
        """Return the price of one call in every case."""
        found = self.constant(price.latency_us)
        if isinstance(price, _CasePrice):
            found[price.case] = max(price.latency_us, price.high_us)
        return found


def _mark(prices: OperatorPrices, kind: int) -> OperatorPrices:
    """Return prices that know their case."""
    marked = dict(prices.by_call)
    for key, price in prices.by_call.items():
        (operator, dtype, phase, variant, names), values = key
        table = OperatorTable(
            operator=operator,
            dtype=dtype,
            phase=phase,
            variant=variant,
            columns={name: [value] for name, value in zip(names, values, strict=True)},
        )
        part = int(parts_of(table, np.array([price.provenance.value]))[0])
        marked[key] = _CasePrice(
            price.latency_us,
            price.low_us,
            price.high_us,
            price.provenance,
            kind * len(CORRELATIONS) + part,
        )
    return replace(prices, by_call=marked)
