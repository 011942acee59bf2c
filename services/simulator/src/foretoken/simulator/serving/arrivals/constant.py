"""Arrivals at equal gaps, the first at time 0."""

from foretoken.domain.workload import Request, WorkloadSpec
from foretoken.simulator.serving.workload import check_options, with_lengths


def _place(spec: WorkloadSpec, seed: int) -> tuple[Request, ...]:
    check_options(spec, ())
    return with_lengths([i / spec.rate_rps for i in range(spec.num_requests)], spec, seed)


ARRIVAL = _place
