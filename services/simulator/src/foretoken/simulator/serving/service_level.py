"""Which requests met the objectives of their class, how classes fared, runs without warm-up."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from foretoken.domain.metrics.serving import RunTotals, rates_of
from foretoken.domain.requests.slo import Slo, SloClass
from foretoken.domain.results.report import ClassReport, SteadyWindow
from foretoken.domain.units import NS_PER_MS, NS_PER_S
from foretoken.simulator.grid import Flags, Floats, Ints
from foretoken.simulator.jit import compiled
from foretoken.simulator.serving.metrics import (
    OF_PARTS,
    PlacedRuns,
    defined_latencies,
    instants_of,
    is_completed,
    summarize_latencies,
)
from foretoken.simulator.serving.occupancy import Interval, count_outputs
from foretoken.simulator.serving.record import RequestRecord, ServingRecord


def find_attaining(requests: RequestRecord, runs: PlacedRuns, limits: Sequence[Slo]) -> Flags:
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
            runs.seen_ns,
            (
                *(runs.request, runs.first, runs.last, runs.stride, runs.num_together),
                runs.handed_ns,
            ),
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
    runs: tuple[Ints, Ints, Ints, Ints, Ints, Ints],
    limit_ns: Floats,
    percents: Floats,
    attains: Flags,
) -> None:
    """Clear `attains` of requests whose percentile of their own token gaps is above the limit.

    The percentile is linear between ranks; counting the gaps above the limit mostly decides.
    """
    request, first, last, stride, together, handed_ns = runs
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
                    previous = end_ns[step] if handed_ns[index] < 0 else handed_ns[index]
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


# The share of the arrivals' span that a steady window leaves out at either side.
_WARM_UP_RATIO = 0.1


def report_classes(
    classes: Sequence[SloClass],
    default: Slo,
    requests: RequestRecord,
    attains: Flags,
    duration_s: float,
) -> tuple[ClassReport, ...]:
    """Return how each class fared, then the requests of none; nothing where there is no class."""
    if not classes:
        return ()
    number = np.asarray(requests.slo_class)
    members = [(item.name, item.slo, number == index) for index, item in enumerate(classes)]
    if (number < 0).any():
        members.append(("", default, number < 0))
    done = is_completed(requests)
    reports = []
    for name, slo, chosen in members:
        totals = RunTotals(
            duration_s=duration_s,
            num_requests=int(chosen.sum()),
            num_attaining=int(attains[chosen].sum()),
        )
        report = ClassReport(
            name=name,
            num_requests=int(chosen.sum()),
            num_completed=int(done[chosen].sum()),
            is_limited=slo.is_limited,
            **rates_of(totals, "goodput_rps", "slo_attainment_ratio"),
        )
        reports.append(replace(report, **_latencies(requests, chosen)))
    return tuple(reports)


def find_steady_window(record: ServingRecord, interval: Interval) -> SteadyWindow:
    """Return the figures of a run without its first and last tenth, as `SteadyWindow` says."""
    arrival = np.asarray(record.requests.arrival_ns)
    last_ns = int(arrival.max())
    if last_ns == interval.start_ns:
        last_ns = interval.end_ns
    margin_ns = int((last_ns - interval.start_ns) * _WARM_UP_RATIO)
    start_ns, end_ns = interval.start_ns + margin_ns, last_ns - margin_ns
    if end_ns <= start_ns:
        return SteadyWindow()
    return measure_window(record, start_ns, end_ns)


def measure_window(record: ServingRecord, start_ns: int, end_ns: int) -> SteadyWindow:
    """Return the figures of a part of a run that is not empty."""
    requests = record.requests
    arrival, finished = np.asarray(requests.arrival_ns), np.asarray(requests.finished_ns)
    num_tokens = 0
    for steps in record.steps:
        places = np.searchsorted(steps.seen_ns, (start_ns, end_ns))
        num_tokens += int(np.sum(count_outputs(steps)[places[0] : places[1]]))
    arrived = (arrival >= start_ns) & (arrival < end_ns)
    totals = RunTotals(
        duration_s=(end_ns - start_ns) / NS_PER_S,
        num_completed=float(np.sum((finished >= start_ns) & (finished < end_ns))),
        num_output_tokens=num_tokens,
    )
    window = SteadyWindow(
        start_s=start_ns / NS_PER_S,
        end_s=end_ns / NS_PER_S,
        num_requests=int(arrived.sum()),
        **rates_of(totals, "request_throughput_rps", "output_throughput_tps"),
    )
    return replace(window, **_latencies(requests, arrived))


def _latencies(requests: RequestRecord, chosen: Flags) -> dict[str, Any]:
    return {**summarize_latencies(instants_of(requests), OF_PARTS, chosen)}
