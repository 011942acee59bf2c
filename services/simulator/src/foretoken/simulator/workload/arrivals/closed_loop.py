"""A fixed number of requests at a time: each one that is complete lets the next arrive.

Options: `concurrency`, how many; `ramp_s`, the time over which the first of them arrive evenly
(absent: all at once). `rate_rps` has no meaning here. With sessions, sessions take turns.
"""

from dataclasses import replace

import numpy as np

from foretoken.domain.requests.workload import WorkloadSpec
from foretoken.simulator.workload.request_plan import RequestDraft, check_options, read_loop
from foretoken.simulator.workload.requests import draw_requests


def _place(spec: WorkloadSpec, seed: int) -> RequestDraft:
    check_options(spec, ("concurrency", "ramp_s"))
    concurrency, ramp_s = read_loop(spec)
    draft = draw_requests(spec, seed, lambda count, _: np.zeros(count))
    return replace(draft, concurrency=concurrency, ramp_s=ramp_s)


ARRIVAL = _place
