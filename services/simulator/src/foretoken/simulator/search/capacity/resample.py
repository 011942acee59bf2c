"""Draw the requests of a workload anew, to see how far its answers rest on chance.

A synthetic workload is drawn with the seeds after its own. Of a trace, halves are taken: it is cut
into blocks of consecutive requests, and half of them, drawn at random, follow each other as if the
others had not been; the other half is a draw of its own. The answers of such halves spread as those
of whole traces do (J. Shao and C. F. J. Wu, "A general theory for jackknife variance estimation",
Annals of Statistics 17, 1989: half of the data is left out, so the variance needs no scaling), and
no request is in a half twice, which would find its own prompt in the prefix cache.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from foretoken.domain.requests.scenario import ServingScenario
from foretoken.simulator.search.capacity.probe import Load
from foretoken.simulator.search.capacity.request_rate import draw_plan, rate_of_plan, take_requests
from foretoken.simulator.serving.outcome import rate_of
from foretoken.simulator.workload.request_plan import Ints, RequestPlan
from foretoken.simulator.workload.rng import named_stream

# Independent draws of an interval. Of a trace each is a pair of halves, which mirror each other.
NUM_DRAWS = 8
# Blocks of a trace, and the fewest requests of a block.
_NUM_BLOCKS = 16
_LEAST_BLOCK = 4


class Resamples(NamedTuple):
    """A load with other requests of its kind, of which so many are independent."""

    loads: Sequence[Load]
    num_independent: int


def resample_loads(scenario: ServingScenario, load: Load) -> Resamples:
    """Return the load of a scenario with its requests drawn anew; none of too short a trace."""
    if scenario.workload.trace_requests:
        return Resamples(list(_halve(load, scenario.seed)), NUM_DRAWS)
    plans = [draw_plan(scenario, scenario.seed + 1 + index) for index in range(NUM_DRAWS)]
    return Resamples(
        [
            replace(load, plan=plan, plan_rps=rate_of_plan(scenario.workload, plan))
            for plan in plans
        ],
        NUM_DRAWS,
    )


def _halve(load: Load, seed: int) -> Iterator[Load]:
    if load.plan.num_requests < _NUM_BLOCKS * _LEAST_BLOCK:
        return
    stream = named_stream(seed, "halves")
    for _ in range(NUM_DRAWS):
        order = stream.permutation(_NUM_BLOCKS)
        for chosen in (order[::2], order[1::2]):
            half = take_blocks(load.plan, np.sort(chosen), _NUM_BLOCKS)
            half_rps = rate_of(half.arrival_ns)
            if half_rps > 0:
                yield replace(load, plan=half, plan_rps=half_rps)


def take_blocks(plan: RequestPlan, chosen: Ints, num_blocks: int) -> RequestPlan:
    """Return some of equal blocks of consecutive requests, one directly after the other.

    A block lasts until the first arrival of the next one, the last as long as its mean gap is more.
    """
    edges = np.linspace(0, plan.num_requests, num_blocks + 1).astype(np.int64)
    last_ns = plan.arrival_ns[-1]
    mean_gap_ns = (last_ns - plan.arrival_ns[0]) // max(plan.num_requests - 1, 1)
    start_ns = np.append(plan.arrival_ns[edges[:-1]], last_ns + mean_gap_ns)
    length_ns = np.diff(start_ns)[chosen]
    new_start_ns = np.cumsum(length_ns) - length_ns
    counts = np.diff(edges)[chosen]
    rows = np.concatenate([np.arange(edges[block], edges[block + 1]) for block in chosen])
    shift_ns = np.repeat(start_ns[chosen] - new_start_ns, counts)
    taken = take_requests(plan, rows)
    return replace(taken, arrival_ns=taken.arrival_ns - shift_ns)
