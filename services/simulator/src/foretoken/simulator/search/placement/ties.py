"""Which strategies of a mixed cluster may be as good as the winner: by the error of the difference.

Every kind of node has error families of its own, which err apart from those of another kind: a
strategy that does not use a kind has no error of it.
"""

from collections.abc import Sequence

import numpy as np

from foretoken.simulator.grid import Flags, Floats
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.placement.columns import PlacedStrategies
from foretoken.simulator.search.placement.placed_steps import time_placed
from foretoken.simulator.search.placement.placed_work import PlacedWork
from foretoken.simulator.search.training.answers import Answers
from foretoken.simulator.search.training.shape_library import ShapeLibrary
from foretoken.simulator.search.training.ties import (
    CORRELATIONS,
    correlate_sizes,
    difference_errors,
    families_at_bound,
)
from foretoken.simulator.steps.call_prices import PricedTable, Variants


def find_placed_ties(
    answers: Answers, values: Floats, shapes: Sequence[ShapeLibrary], predictor: LatencySource
) -> Flags:
    """Return which strategies tie with the first of them, which is the winner and does so itself.

    `values` is what is to be small, in proportion to the step of each. Strategies are timed once
    more, each part of an error family of a kind of node at its upper bounds in turn.
    """
    strategies = answers.strategies
    if not isinstance(strategies, PlacedStrategies):
        raise TypeError("strategies of a mixed cluster are columns of their own")
    num_kinds = len(strategies.space.kinds)
    work = PlacedWork(strategies, predictor, shapes, lambda kind: _at_bounds(kind, num_kinds))
    grown = time_placed(work, range(len(strategies)), list(strategies.chunk_layers))
    errors = (grown.step_us - answers.step_us) * (values / answers.step_us)
    correlation = np.tile(correlate_sizes(strategies), (num_kinds, 1))
    of_difference = difference_errors(errors, correlation)
    return np.asarray(values - values[0] <= of_difference, dtype=np.bool_)


def _at_bounds(own: int, num_kinds: int) -> Variants:
    """Return the prices of a kind of node: in the cases of each kind, whose bounds they are."""

    def price(priced: PricedTable) -> list[Floats]:
        estimates = [priced.latency_us] * len(CORRELATIONS)
        return [
            column
            for kind in range(num_kinds)
            for column in (families_at_bound(priced) if kind == own else estimates)
        ]

    return price
