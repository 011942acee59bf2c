"""Errors of the steps of a mixed cluster, which say what ties and how far off an answer may be.

Every kind of node has error families of its own, which err apart from those of another kind: a
strategy that does not use a kind has no error of it.
"""

from collections.abc import Sequence

import numpy as np

from foretoken.simulator.grid import Floats
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.placement.columns import PlacedStrategies
from foretoken.simulator.search.placement.placed_steps import time_placed
from foretoken.simulator.search.placement.placed_work import PlacedWork
from foretoken.simulator.search.training.answers import Answers
from foretoken.simulator.search.training.shape_library import ShapeLibrary
from foretoken.simulator.search.training.ties import TimedErrors, correlate_sizes
from foretoken.simulator.steps.call_prices import PricedTable, Variants
from foretoken.simulator.steps.error_parts import NUM_PARTS, StepErrors, price_parts


def time_placed_errors(
    answers: Answers, shapes: Sequence[ShapeLibrary], predictor: LatencySource
) -> TimedErrors:
    """Return the errors of steps, parts of the first kind of node first.

    Strategies are timed once more, each part of a kind of node at its bounds in turn.
    """
    strategies = answers.strategies
    if not isinstance(strategies, PlacedStrategies):
        raise TypeError("strategies of a mixed cluster are columns of their own")
    num_kinds = len(strategies.space.kinds)
    work = PlacedWork(strategies, predictor, shapes, lambda kind: _at_bounds(kind, num_kinds))
    steps = time_placed(work, range(len(strategies)), list(strategies.chunk_layers))
    by_bound_us = steps.step_us.reshape(num_kinds, 2, NUM_PARTS, -1).swapaxes(0, 1)
    by_part_us = by_bound_us.reshape(2 * num_kinds * NUM_PARTS, -1)
    return TimedErrors(
        StepErrors.of_steps(answers.step_us, by_part_us),
        np.tile(correlate_sizes(strategies), (num_kinds, 1)),
    )


def _at_bounds(own: int, num_kinds: int) -> Variants:
    """Return the prices of a kind of node: in the cases of each kind, whose bounds they are."""

    def price(priced: PricedTable) -> list[Floats]:
        estimates = [priced.latency_us] * (2 * NUM_PARTS)
        return [
            column
            for kind in range(num_kinds)
            for column in (price_parts(priced) if kind == own else estimates)
        ]

    return price
