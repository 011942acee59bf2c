"""Which requests met the objectives of their class."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.requests.slo import Slo
from foretoken.domain.units import NS_PER_MS
from foretoken.simulator.jit import compiled
from foretoken.simulator.serving.metrics import (
    OF_PARTS,
    PlacedRuns,
    defined_latencies,
    instants_of,
    is_completed,
)
from foretoken.simulator.serving.record import RequestRecord

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def find_attaining(requests: RequestRecord, runs: PlacedRuns, limits: Sequence[Slo]) -> Bools:
    """Return which requests completed and met every limit of their class.

    `limits` are those of the classes in order, then those of requests of no class.
    """
    # Requests of no class have the number -1, which takes the last.
    number = np.asarray(requests.slo_class)
    attains = is_completed(requests)
    times = instants_of(requests)
    for name in OF_PARTS:
        limit_ns = _limits_ns(limits, name)[number]
        values_ns, is_defined = defined_latencies(name, times)
        attains &= (limit_ns == 0) | ~is_defined | (values_ns <= limit_ns)
    itl_ns = np.where(attains, _limits_ns(limits, "itl_ms")[number], 0.0)
    if itl_ns.any():
        percents = np.array([slo.itl_percentile for slo in limits])[number]
        _refuse_slow_gaps(
            runs.end_ns,
            (runs.request, runs.first, runs.last, runs.stride, runs.num_together),
            itl_ns,
            percents,
            attains,
        )
    return attains


def _limits_ns(limits: Sequence[Slo], name: str) -> Floats:
    return np.array([getattr(slo, name) for slo in limits]) * NS_PER_MS


@compiled
def _refuse_slow_gaps(
    end_ns: Ints,
    runs: tuple[Ints, Ints, Ints, Ints, Ints],
    limit_ns: Floats,
    percents: Floats,
    attains: Bools,
) -> None:
    """Clear `attains` of requests whose percentile of their own token gaps is above the limit.

    The percentile is linear between ranks; counting the gaps above the limit mostly decides.
    """
    request, first, last, stride, together = runs
    index = 0
    while index < len(request):
        owner = request[index]
        limit = limit_ns[owner]
        num_gaps, num_within = 0, 0
        longest_within, shortest_beyond = 0, 2**62
        previous = -1
        while index < len(request) and request[index] == owner:
            if limit > 0:
                # Tokens that left together have gaps of 0.
                num_gaps += together[index]
                num_within += together[index]
                for step in range(first[index], last[index] + 1, stride[index]):
                    if previous >= 0:
                        gap = end_ns[step] - previous
                        num_gaps += 1
                        if gap <= limit:
                            num_within += 1
                            longest_within = max(longest_within, gap)
                        else:
                            shortest_beyond = min(shortest_beyond, gap)
                    previous = end_ns[step]
            index += 1
        if num_gaps == 0:
            continue
        rank = percents[owner] / 100 * (num_gaps - 1)
        lower = int(rank)
        if num_within <= lower:
            attains[owner] = False
        elif num_within == lower + 1 and rank > lower:
            value = longest_within + (shortest_beyond - longest_within) * (rank - lower)
            attains[owner] = value <= limit
