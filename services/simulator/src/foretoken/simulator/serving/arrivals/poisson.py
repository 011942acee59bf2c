"""Independent arrivals at a mean rate: exponential gaps, the first request at the first gap."""

import numpy as np

from foretoken.domain.workload import Request, WorkloadSpec
from foretoken.simulator.engine.rng import named_stream
from foretoken.simulator.serving.workload import check_options, with_lengths


def _draw(spec: WorkloadSpec, seed: int) -> tuple[Request, ...]:
    check_options(spec, ())
    # Gaps of mean one, divided by the rate: another rate stretches the same arrivals.
    gaps = named_stream(seed, "arrivals").exponential(1.0, spec.num_requests)
    return with_lengths((np.cumsum(gaps) / spec.rate_rps).tolist(), spec, seed)


ARRIVAL = _draw
