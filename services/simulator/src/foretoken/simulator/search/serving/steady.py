"""The steady part of a run: the requests after those that filled it, before those that empty it."""

from dataclasses import fields, replace
from typing import Any

import numpy as np

from foretoken.domain.results.report import SteadyWindow
from foretoken.domain.units import MS_PER_S
from foretoken.simulator.grid import Floats
from foretoken.simulator.serving.metrics import is_completed
from foretoken.simulator.serving.record import RequestRecord, ServingRecord, TokenRuns
from foretoken.simulator.serving.service_level import measure_window

# Where the means of a steady part's halves are closer than this, it is steady.
_STEADY_RATIO = 0.05
# Observations of a batch. Source: MSER-5, White, Cobb and Spratt (2000), "A comparison of five
# steady-state truncation heuristics for simulation".
_BATCH = 5


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


def measure_between(
    record: ServingRecord, first: int, end: int, *, is_loop: bool = False
) -> SteadyWindow:
    """Return the figures of the time from the arrival of request `first` to that of `end`.

    Where there is none of that number, to the last arrival. Of a closed loop the rates are what is
    under way over how long each request is: Little's law. Completions that are counted come near it
    only over very many rounds, for those begun before the window and those left after it are never
    as many. Source: Glynn and Whitt (1989), "Indirect estimation via L = lambda W".
    """
    arrival = np.asarray(record.requests.arrival_ns)
    start_ns, end_ns = int(arrival[first:end].min()), int(arrival[first : end + 1].max())
    if end_ns <= start_ns:
        return SteadyWindow()
    window = measure_window(record, start_ns, end_ns)
    if not is_loop or not window.e2e_latency_ms.mean:
        return window
    rate_rps = mean_under_way(record, start_ns, end_ns) / window.e2e_latency_ms.mean * MS_PER_S
    came = (arrival >= start_ns) & (arrival < end_ns) & is_completed(record.requests)
    answers = np.asarray(record.requests.num_decode_tokens)[came]
    return replace(
        window,
        request_throughput_rps=rate_rps,
        output_throughput_tps=rate_rps * float(answers.mean()),
    )


def mean_under_way(record: ServingRecord, start_ns: int, end_ns: int) -> float:
    """Return how many requests are under way on average from one time to another."""
    arrival, finished = np.asarray(record.requests.arrival_ns), record.requests.finished_ns
    # What is not answered is not under way.
    ended = np.where(np.asarray(finished) < 0, arrival, finished)
    inside = np.minimum(ended, end_ns) - np.maximum(arrival, start_ns)
    return float(np.maximum(inside, 0).sum()) / (end_ns - start_ns)


def find_warm_up(record: ServingRecord) -> int:
    """Return how many of the first requests are still of the warm-up; all where it never ends.

    Leaving them out makes the mean of the others' waits and answers as sure as it gets: MSER-5. Of
    one for which no place in the first half is better than its end, none is steady.
    """
    return max(_truncate(span_ns) for span_ns in _spans_ns(record))


def _truncate(span_ns: Floats) -> int:
    """Return where the standard error of what is left is least."""
    num = len(span_ns) // _BATCH
    if num == 0:
        return len(span_ns)
    batches = span_ns[: num * _BATCH].reshape(num, _BATCH).mean(axis=1)
    batches -= batches.mean()
    left = np.arange(num, 0, -1)
    total, squares = (np.cumsum(each[::-1])[::-1] for each in (batches, batches**2))
    errors = np.maximum(squares - total**2 / left, 0.0) / left**2
    # Few batches have little spread by chance, so only those of the first half are looked at.
    best = int(np.argmin(errors[: num // 2 + 1]))
    return best * _BATCH if best < max(num // 2, 1) else len(span_ns)


def _spans_ns(record: ServingRecord) -> tuple[Floats, Floats]:
    """Return how long requests that are done waited for their first token, then for the rest."""
    requests = record.requests
    done = np.asarray(requests.finished_ns) >= 0
    first_ns = (np.asarray(requests.first_token_ns) - requests.arrival_ns)[done]
    answer_ns = (np.asarray(requests.finished_ns) - requests.first_token_ns)[done]
    return first_ns.astype(np.float64), answer_ns.astype(np.float64)


def is_steady(record: ServingRecord) -> bool:
    """Whether requests that came later waited, and were answered, about as long as those before.

    Where both means of the second half of the requests are within 5 % of the first half's.
    """
    for span_ns in _spans_ns(record):
        half = len(span_ns) // 2
        if half == 0:
            return True
        means = span_ns[:half].mean(), span_ns[half:].mean()
        if abs(means[1] - means[0]) > _STEADY_RATIO * max(means):
            return False
    return True
