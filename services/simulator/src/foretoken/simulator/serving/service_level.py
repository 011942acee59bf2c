"""How classes of requests fared, and a run without its warm-up."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.metrics.serving import RunTotals, rates_of
from foretoken.domain.requests.slo import Slo, SloClass
from foretoken.domain.results.report import ClassReport, SteadyWindow
from foretoken.domain.units import NS_PER_S
from foretoken.simulator.serving.metrics import (
    OF_PARTS,
    instants_of,
    is_completed,
    summarize_latencies,
)
from foretoken.simulator.serving.occupancy import Interval, count_outputs
from foretoken.simulator.serving.record import RequestRecord, ServingRecord

Bools = NDArray[np.bool_]

# The share of the arrivals' span that a steady window leaves out at either side.
_WARM_UP_RATIO = 0.1


def report_classes(
    classes: Sequence[SloClass],
    default: Slo,
    requests: RequestRecord,
    attains: Bools,
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
        places = np.searchsorted(steps.end_ns, (start_ns, end_ns))
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


def _latencies(requests: RequestRecord, chosen: Bools) -> dict[str, Any]:
    return {**summarize_latencies(instants_of(requests), OF_PARTS, chosen)}
