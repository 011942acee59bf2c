"""Lengths drawn from those observed, with replacement."""

import numpy as np

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.workload import LengthSpec
from foretoken.simulator.grid import Ints


def _draw(spec: LengthSpec, num_lengths: int, stream: np.random.Generator) -> Ints:
    if not spec.values:
        raise InvalidRequestError.of_field("values", "needs at least one observed length")
    return stream.choice(np.array(spec.values, dtype=np.int64), num_lengths)


LENGTH = _draw
