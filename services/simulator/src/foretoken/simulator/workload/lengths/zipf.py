"""Lengths from the minimum to the maximum, the k-th of them with weight 1 / k^`spread`."""

import numpy as np

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.workload import LengthSpec
from foretoken.simulator.grid import Ints

# One weight is held per length: beyond this the table would not fit with the rest.
_MAX_LENGTHS = 10_000_000


def _draw(spec: LengthSpec, num_lengths: int, stream: np.random.Generator) -> Ints:
    if not 1 <= spec.minimum <= spec.maximum:
        raise InvalidRequestError.of_field(
            "maximum", f"needs 1 <= minimum <= maximum, found {spec.minimum} and {spec.maximum}"
        )
    num_kinds = spec.maximum - spec.minimum + 1
    if num_kinds > _MAX_LENGTHS:
        raise InvalidRequestError.of_field(
            "maximum", f"at most {_MAX_LENGTHS} different lengths, found {num_kinds}"
        )
    if not np.isfinite(spec.spread):
        raise InvalidRequestError.of_field("spread", "must be a number")
    weights = np.cumsum(np.arange(1, num_kinds + 1, dtype=np.float64) ** -spec.spread)
    ranks = np.searchsorted(weights, stream.random(num_lengths) * weights[-1], side="right")
    lengths: Ints = np.minimum(spec.minimum + ranks, spec.maximum)
    return lengths


LENGTH = _draw
