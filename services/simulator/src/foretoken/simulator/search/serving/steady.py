"""The steady part of a run: the requests after those that filled it, before those that empty it."""

from dataclasses import fields, replace
from typing import Any

import numpy as np

from foretoken.domain.report import SteadyWindow
from foretoken.simulator.serving.record import RequestRecord, ServingRecord, TokenRuns
from foretoken.simulator.serving.service_level import measure_window

# Where the means of a steady part's halves are closer than this, it is steady.
_STEADY_RATIO = 0.05


def take_requests(record: ServingRecord, first: int, end: int) -> ServingRecord:
    """Return a record with the requests from `first` to before `end` only, all steps left in it.

    Token runs are of those requests, whose numbers count from 0 again.
    """
    requests = record.requests
    columns = {item.name: getattr(requests, item.name) for item in fields(RequestRecord)}
    taken: dict[str, Any] = {
        name: column if column is None else np.asarray(column)[first:end]
        for name, column in columns.items()
    }
    runs = record.tokens
    numbers = np.asarray(runs.request)
    chosen = (numbers >= first) & (numbers < end)
    columns = {item.name: getattr(runs, item.name) for item in fields(TokenRuns)}
    kept: dict[str, Any] = {
        name: column if column is None else np.asarray(column)[chosen]
        for name, column in columns.items()
    }
    kept["request"] = numbers[chosen] - first
    return replace(record, requests=RequestRecord(**taken), tokens=TokenRuns(**kept))


def measure_between(record: ServingRecord, first: int, end: int) -> SteadyWindow:
    """Return the figures of the time in which the requests from `first` to before `end` come."""
    arrival = np.asarray(record.requests.arrival_ns)
    start_ns, end_ns = int(arrival[first:end].min()), int(arrival[first:end].max())
    if end_ns <= start_ns:
        return SteadyWindow()
    return measure_window(record, start_ns, end_ns)


def is_steady(record: ServingRecord) -> bool:
    """Whether requests that came later waited, and were answered, about as long as those before.

    Where both means of the second half of the requests are within 5 % of the first half's.
    """
    requests = record.requests
    done = np.asarray(requests.finished_ns) >= 0
    first_ns = (np.asarray(requests.first_token_ns) - requests.arrival_ns)[done]
    answer_ns = (np.asarray(requests.finished_ns) - requests.first_token_ns)[done]
    half = len(first_ns) // 2
    for span_ns in (first_ns, answer_ns):
        if half == 0:
            return True
        means = span_ns[:half].mean(), span_ns[half:].mean()
        if abs(means[1] - means[0]) > _STEADY_RATIO * max(means):
            return False
    return True
