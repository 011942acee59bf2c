"""A fixed number of requests at a time: each one that is complete lets the next arrive.

Options: `concurrency`, how many; `ramp_s`, the time over which the first of them arrive evenly
(absent: all at once). After `num_warmup` requests, which warm a server up, the next come when
those are complete, but not before `resume_s`: then as many as run at a time at once. `rate_rps` has
no meaning here. With sessions, sessions take turns.
"""

from dataclasses import replace

import numpy as np

from foretoken.domain.requests.workload import WorkloadSpec
from foretoken.simulator.workload.request_plan import (
    LOOP_OPTIONS,
    RequestDraft,
    check_options,
    read_loop,
)
from foretoken.simulator.workload.requests import draw_requests


def _place(spec: WorkloadSpec, seed: int) -> RequestDraft:
    check_options(spec, LOOP_OPTIONS)
    loop = read_loop(spec)
    draft = draw_requests(spec, seed, lambda count, _: np.zeros(count))
    return replace(draft, **loop._asdict())


ARRIVAL = _place
