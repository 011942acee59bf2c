"""Times of one module at the micro batch of a scenario, from those it was profiled with."""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from foretoken.domain.measurements.training_truth import ModuleTime


@dataclass(frozen=True, kw_only=True, slots=True)
class PassTimes:
    """Times of a module for one micro batch in one layer, in µs; a backward NaN: not measured."""

    forward_us: float
    backward_us: float
    communication_us: float


def read_times(times: Sequence[ModuleTime], micro_batch_size: int) -> PassTimes:
    """Return what a module takes with a micro batch; repeated times are averaged.

    Between two profiled micro batches a time is on the line through both, which is exact for a
    fixed part and one per sample. Outside of them the time per sample stays that of the nearest.
    """
    points = [
        (size, _mean([time for time in times if time.micro_batch_size == size]))
        for size in sorted({time.micro_batch_size for time in times})
    ]
    sizes = [size for size, _ in points]
    place = bisect.bisect_left(sizes, micro_batch_size)
    if place == 0 or place == len(points):
        size, nearest = points[min(place, len(points) - 1)]
        return _combine([nearest], [micro_batch_size / size])
    (small, below), (large, above) = points[place - 1], points[place]
    share = (micro_batch_size - small) / (large - small)
    return _combine([below, above], [1 - share, share])


def add_times(parts: Sequence[PassTimes]) -> PassTimes:
    """Return the sum of several times."""
    return _combine(parts, [1.0] * len(parts))


def mean_times(parts: Sequence[PassTimes]) -> PassTimes:
    """Return the mean of several times."""
    return _combine(parts, [1 / len(parts)] * len(parts))


def _mean(times: Sequence[ModuleTime]) -> PassTimes:
    return mean_times(
        [
            PassTimes(
                forward_us=time.forward_us,
                backward_us=time.backward_us or math.nan,
                communication_us=time.communication_us,
            )
            for time in times
        ]
    )


def _combine(parts: Sequence[PassTimes], weights: Sequence[float]) -> PassTimes:
    return PassTimes(
        **{
            field.name: sum(
                getattr(part, field.name) * weight
                for part, weight in zip(parts, weights, strict=True)
            )
            for field in fields(PassTimes)
        }
    )
