"""Which strategies may be as good as the winner: by the error of their difference.

Estimates of a family of operators err together, as one model makes them: what two strategies have
in common does not change their order. With a family at its upper bounds the one step grows by a and
the other by b: the variance of their difference is a^2 + b^2 - 2 r a b. The correlation r is 1
where both run calls of the same sizes, 0 on two kinds of device, and between other sizes what was
measured of the family. Families err on their own, so their variances add up.
"""

import numpy as np

from foretoken.simulator.grid import Flags, Floats
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.training.answers import Answers
from foretoken.simulator.search.training.error_families import (
    CORRELATIONS,
    IS_COMPUTED,
    families_at_bound,
)
from foretoken.simulator.search.training.shape_library import ShapeLibrary
from foretoken.simulator.search.training.step_time import StepTimer
from foretoken.simulator.steps.strategies import Strategies

# What makes calls that a device computes of one size.
_SIZES = ("tp", "cp", "ep", "micro_batch_size")


def find_ties(
    answers: Answers,
    values: Floats,
    predictor: LatencySource,
    shapes: ShapeLibrary | None = None,
) -> Flags:
    """Return which strategies tie with the first of them, which is the winner and does so itself.

    `values` is what is to be small, in proportion to the step of each. Strategies are timed once
    more; the predictor is asked one question for each kind of device.
    """
    strategies = answers.strategies
    grown_us = time_families(strategies, predictor, shapes) - answers.step_us
    errors = grown_us * (values / answers.step_us)
    of_difference = difference_errors(errors, correlate_errors(strategies))
    return np.asarray(values - values[0] <= of_difference, dtype=np.bool_)


def correlate_errors(strategies: Strategies) -> Floats:
    """Return how errors of each go together with those of the first: (family, strategy)."""
    found = correlate_sizes(strategies)
    found[:, strategies.device != strategies.device[0]] = 0.0
    return found


def correlate_sizes(strategies: Strategies) -> Floats:
    """Return the same as if all were on one kind of device: (family, strategy)."""
    found = np.repeat(CORRELATIONS[:, np.newaxis], len(strategies), axis=1)
    columns = [getattr(strategies, name) for name in _SIZES]
    is_same_size = np.all([column == column[0] for column in columns], axis=0)
    found[IS_COMPUTED[:, np.newaxis] & is_same_size] = 1.0
    found[:, 0] = 1.0
    return found


def time_families(
    strategies: Strategies, predictor: LatencySource, shapes: ShapeLibrary | None = None
) -> Floats:
    """Return the µs of steps with each family at its upper bound: (family, strategy)."""
    timer = StepTimer(strategies.source.scenario, predictor, families_at_bound, shapes)
    return timer.time(strategies).variants_us


def difference_errors(errors: Floats, correlation: Floats) -> Floats:
    """Return the error of each strategy's difference from the first; all are (family, strategy)."""
    first = errors[:, :1]
    # Squares alone, so that what is the same leaves nothing.
    common = correlation * (errors - first) ** 2
    own = (1 - correlation) * (errors**2 + first**2)
    total: Floats = np.sqrt((common + own).sum(axis=0))
    return total
