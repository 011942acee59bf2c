"""Every length from the minimum to the maximum is as likely."""

import numpy as np

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.workload import LengthSpec
from foretoken.simulator.grid import Ints


def _draw(spec: LengthSpec, num_lengths: int, stream: np.random.Generator) -> Ints:
    if not 1 <= spec.minimum <= spec.maximum:
        raise InvalidRequestError.of_field(
            "maximum", f"needs 1 <= minimum <= maximum, found {spec.minimum} and {spec.maximum}"
        )
    return stream.integers(spec.minimum, spec.maximum, num_lengths, endpoint=True)


LENGTH = _draw
