"""Every length is the mean."""

import numpy as np

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.workload import LengthSpec
from foretoken.simulator.grid import Ints


def _repeat(spec: LengthSpec, num_lengths: int, _stream: np.random.Generator) -> Ints:
    if spec.mean < 1:
        raise InvalidRequestError.of_field("mean", "must be at least 1")
    return np.full(num_lengths, spec.mean, dtype=np.int64)


LENGTH = _repeat
