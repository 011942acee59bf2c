"""Which strategies may be as good as the winner: by the error of their difference.

Estimates of a family of operators err together, as one model makes them: what two strategies have
in common does not change their order. With a family at its upper bounds the one step grows by a and
the other by b: the variance of their difference is a^2 + b^2 - 2 r a b. The correlation r is 1
where both run calls of the same sizes, 0 on two kinds of device, and between other sizes a half.
Families err on their own, so their variances add up.
"""

import numpy as np

from foretoken.simulator.grid import Flags, Floats
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.training.answers import Answers
from foretoken.simulator.search.training.error_families import ERROR_FAMILIES, families_at_bound
from foretoken.simulator.search.training.step_time import StepTimer
from foretoken.simulator.search.training.strategies import Strategies

# Families of what a device computes, and what makes their calls of one size.
_COMPUTED = slice(0, 3)
_SIZES = ("tp", "cp", "ep", "micro_batch_size")
# How errors of one family at other sizes go together: as much in common as of their own. Nothing
# that a predictor says tells. On the 47 steps of one model that vTrain measured on 512 A100 and a
# predictor that knew operators alone, the difference of two was off by more than the error so
# found in 32 % of the pairs; it would be in 58 % were all of an error common, 20 % were nothing.
_CORRELATION = 0.5


def find_ties(answers: Answers, values: Floats, predictor: LatencySource) -> Flags:
    """Return which strategies tie with the first of them, which is the winner and does so itself.

    `values` is what is to be small, in proportion to the step of each. Strategies are timed once
    more; the predictor is asked one question for each kind of device.
    """
    strategies = answers.strategies
    grown_us = time_families(strategies, predictor) - answers.step_us
    errors = grown_us * (values / answers.step_us)
    of_difference = difference_errors(errors, correlate_errors(strategies))
    return np.asarray(values - values[0] <= of_difference, dtype=np.bool_)


def correlate_errors(strategies: Strategies) -> Floats:
    """Return how errors of each go together with those of the first: (family, strategy)."""
    found = np.full((len(ERROR_FAMILIES), len(strategies)), _CORRELATION)
    columns = [getattr(strategies, name) for name in _SIZES]
    found[_COMPUTED, np.all([column == column[0] for column in columns], axis=0)] = 1.0
    found[:, strategies.device != strategies.device[0]] = 0.0
    found[:, 0] = 1.0
    return found


def time_families(strategies: Strategies, predictor: LatencySource) -> Floats:
    """Return the µs of steps with each family at its upper bound: (family, strategy)."""
    timer = StepTimer(strategies.source.scenario, predictor, families_at_bound)
    return timer.time_variants(strategies)


def difference_errors(errors: Floats, correlation: Floats) -> Floats:
    """Return the error of each strategy's difference from the first; all are (family, strategy)."""
    first = errors[:, :1]
    # Squares alone, so that what is the same leaves nothing.
    common = correlation * (errors - first) ** 2
    own = (1 - correlation) * (errors**2 + first**2)
    total: Floats = np.sqrt((common + own).sum(axis=0))
    return total
