"""Arrivals at gamma-distributed gaps: burstier than Poisson below a shape of 1, calmer above.

Options: `shape` (1: Poisson), or `cv`, 1 / sqrt(shape): the gaps' standard deviation over their
mean.
"""

import numpy as np

from foretoken.domain.requests.workload import WorkloadSpec
from foretoken.simulator.workload.request_plan import (
    RequestDraft,
    check_options,
    option_error,
    read_number,
)
from foretoken.simulator.workload.requests import draw_requests

# Beyond it gaps are equal to six digits; below its inverse nearly all of them are 0.
_MAX_SHAPE = 1e6


def _draw(spec: WorkloadSpec, seed: int) -> RequestDraft:
    check_options(spec, ("shape", "cv"))
    if len(spec.arrival_options) > 1:
        raise option_error("cv", "is 1 / sqrt(shape): give one of the two")
    name = "cv" if "cv" in spec.arrival_options else "shape"
    number = read_number(spec, name, 1.0)
    if not 1 / _MAX_SHAPE <= number <= _MAX_SHAPE:
        raise option_error(name, f"must be from {1 / _MAX_SHAPE:g} to {_MAX_SHAPE:g}")
    shape = number**-2 if name == "cv" else number
    return draw_requests(
        spec,
        seed,
        lambda count, stream: np.cumsum(stream.gamma(shape, 1.0 / shape, count)) / spec.rate_rps,
    )


ARRIVAL = _draw
