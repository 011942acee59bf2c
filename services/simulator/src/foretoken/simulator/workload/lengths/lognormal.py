"""Lengths whose logarithm is normal: most are short, some are very long.

Of `mean` and a standard deviation of `spread` x `mean`; a minimum or maximum that cuts the tails
moves the mean.
"""

import numpy as np

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.workload import LengthSpec
from foretoken.domain.units import MAX_COUNT
from foretoken.simulator.grid import Ints


def _draw(spec: LengthSpec, num_lengths: int, stream: np.random.Generator) -> Ints:
    if spec.mean < 1:
        raise InvalidRequestError.of_field("mean", "must be at least 1")
    if not np.isfinite(spec.spread):
        raise InvalidRequestError.of_field("spread", "must be a number")
    # Moments of the lognormal: mean = exp(mu + sigma^2 / 2), (sd / mean)^2 = exp(sigma^2) - 1.
    variance = np.log1p(spec.spread**2)
    lengths = stream.lognormal(np.log(spec.mean) - variance / 2, np.sqrt(variance), num_lengths)
    # Rounded up as often as the fraction says: the mean stays.
    rounded = np.floor(np.minimum(lengths, MAX_COUNT) + stream.random(num_lengths))
    return np.maximum(rounded, max(1, spec.minimum)).astype(np.int64)


LENGTH = _draw
