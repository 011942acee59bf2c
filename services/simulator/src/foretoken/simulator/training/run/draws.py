"""How runs of one plan differ by the chance of failures: runs are drawn, with a fixed seed.

Of each run the numbers of failures are drawn, and then how far each attempt had come. What is drawn
is a run as `failures` describes it, event by event but all runs at once.
"""

import math

import numpy as np

from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.training.run.failures import FailureModel, divide_work

# One per cent of the runs, 20, take longer than the 99th percentile.
NUM_RUNS = 2001
_SEED = 19740901
# A sum of more terms than this in the mean run is drawn as a whole, from its normal limit.
_MAX_TERMS = 1000


def draw_runs(model: FailureModel, work_s: float, interval_s: float) -> Floats:
    """Return how long each of `NUM_RUNS` drawn runs takes, in s."""
    generator = np.random.default_rng(_SEED)
    interval_s = min(interval_s, work_s)
    num_whole, rest_s = divide_work(work_s, interval_s)
    whole_s, delay_s = interval_s + model.stall_s, model.delay_s
    # Of the first checkpoint nothing is written during an interval before.
    total_s = _draw_segments(model, 1, whole_s + delay_s, 0.0, generator)
    if num_whole > 1:
        total_s += _draw_segments(model, num_whole - 1, whole_s, delay_s, generator)
    if rest_s:
        total_s += _draw_segments(model, 1, rest_s + model.stall_s, delay_s, generator)
    return total_s


def _draw_segments(
    model: FailureModel, count: int, length_s: float, delay_s: float, generator: np.random.Generator
) -> Floats:
    """Return the time of `count` segments, from one safe checkpoint to the next.

    Where nothing fails a segment takes `length_s`: the last `delay_s` of writing its checkpoint
    are part of the next one's training. After a failure training has to make up for that too.
    """
    rate, again_s = model.rate_per_s, length_s + delay_s
    num_failed = generator.binomial(count, -math.expm1(-rate * length_s), size=NUM_RUNS)
    num_again = _draw_failures(num_failed, rate * again_s, generator)
    num_restarts = num_failed + num_again
    num_failed_restarts = _draw_failures(num_restarts, rate * model.restart_s, generator)
    return np.asarray(
        (count - num_failed) * length_s
        + num_failed * again_s
        + num_restarts * model.restart_s
        + _draw_lost(num_failed, rate, length_s, generator)
        + _draw_lost(num_again, rate, again_s, generator)
        + _draw_lost(num_failed_restarts, rate, model.restart_s, generator)
    )


def _draw_failures(num_successes: Ints, exponent: float, generator: np.random.Generator) -> Ints:
    """Return how many attempts fail before so many succeed, each with probability e^-exponent."""
    drawn = generator.negative_binomial(np.maximum(num_successes, 1), math.exp(-exponent))
    return np.where(num_successes > 0, drawn, 0)


def _draw_lost(
    num_failures: Ints, rate: float, length_s: float, generator: np.random.Generator
) -> Floats:
    """Return the sum of what attempts of a length had done when they failed, per run."""
    if not rate or not length_s or not num_failures.any():
        return np.zeros(len(num_failures))
    if num_failures.mean() > _MAX_TERMS:
        mean, deviation = _truncated_moments(rate, length_s)
        spread = deviation * np.sqrt(num_failures) * generator.standard_normal(len(num_failures))
        return np.asarray(num_failures * mean + spread)
    # The inverse of the distribution of a time to failure, given that it is before the end.
    share = generator.random(int(num_failures.sum())) * -math.expm1(-rate * length_s)
    sums = np.concatenate(([0.0], np.cumsum(-np.log1p(-share) / rate)))
    ends = np.cumsum(num_failures)
    return np.asarray(sums[ends] - sums[ends - num_failures])


def _truncated_moments(rate: float, length_s: float) -> tuple[float, float]:
    """Return mean and standard deviation of a time to failure that is before the end.

    Source: those of the exponential distribution cut off at x = rate length, in units of 1 / rate:
    1 - x / (e^x - 1) and 1 - x^2 e^x / (e^x - 1)^2.
    """
    x = rate * length_s
    if x < 1e-3:  # noqa: PLR2004  where the terms cancel, it is uniform
        return length_s / 2, length_s / math.sqrt(12)
    mean = 1 - x / math.expm1(x)
    variance = 1 - x**2 * math.exp(-x) / math.expm1(-x) ** 2
    return mean / rate, math.sqrt(variance) / rate
