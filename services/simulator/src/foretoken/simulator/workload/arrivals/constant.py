"""Arrivals at equal gaps, the first at time 0."""

import numpy as np

from foretoken.domain.requests.workload import WorkloadSpec
from foretoken.simulator.workload.request_plan import RequestDraft, check_options
from foretoken.simulator.workload.requests import draw_requests


def _place(spec: WorkloadSpec, seed: int) -> RequestDraft:
    check_options(spec, ())
    return draw_requests(spec, seed, lambda count, _: np.arange(count) / spec.rate_rps)


ARRIVAL = _place
