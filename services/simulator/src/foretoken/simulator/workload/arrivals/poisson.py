"""Independent arrivals at a mean rate: exponential gaps, the first request at the first gap."""

import numpy as np

from foretoken.domain.requests.workload import WorkloadSpec
from foretoken.simulator.workload.request_plan import RequestDraft, check_options
from foretoken.simulator.workload.requests import draw_requests


def _draw(spec: WorkloadSpec, seed: int) -> RequestDraft:
    check_options(spec, ())
    # Gaps of mean one, divided by the rate: another rate stretches the same arrivals.
    return draw_requests(
        spec,
        seed,
        lambda count, stream: np.cumsum(stream.exponential(1.0, count)) / spec.rate_rps,
    )


ARRIVAL = _draw
