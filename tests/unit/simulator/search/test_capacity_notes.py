"""What is said of an answer that rests on too few requests."""

import numpy as np
import pytest
from capacity_fakes import NUM_TOKENS, STEP_MS, single_server

from foretoken.domain.units import NS_PER_MS
from foretoken.simulator.search.capacity.load_search import (
    AnswerInterval,
    list_notes,
    unfinished_share,
)
from foretoken.simulator.search.capacity.probe import Resamples
from foretoken.simulator.serving.record import RequestRecord
from foretoken.simulator.workload.request_plan import plan_requests

_SERVICE_NS = round(NUM_TOKENS * STEP_MS * NS_PER_MS)


def _run(num_requests: int, gap_ns: int) -> RequestRecord:
    """Return requests of 100 ms each that arrive at the single server one gap apart."""
    arrivals = np.arange(num_requests) * gap_ns
    sizes = (np.full(num_requests, size) for size in (16, NUM_TOKENS))
    record = single_server().run(plan_requests(arrivals, *sizes), lambda _: None)
    return record.requests


@pytest.mark.parametrize(
    ("gap_ns", "expected"),
    # As fast as they are served: the last is alone. Twice as fast: half of them wait at the end.
    [(_SERVICE_NS, 1 / 100), (2 * _SERVICE_NS, 1 / 100), (_SERVICE_NS // 2, 51 / 100), (1, 1.0)],
)
def test_unfinished_share(gap_ns: int, expected: float) -> None:
    assert unfinished_share(_run(100, gap_ns)) == pytest.approx(expected)


def test_a_rate_that_cannot_be_sustained_is_noted() -> None:
    """At 20 requests/s half are unfinished in the end: sure are only the 10/s of the server."""
    requests = _run(1000, _SERVICE_NS // 2)
    (note,) = list_notes(requests, 20.0, None, 0.1, None)
    assert "50% of its 1,000 requests were not finished" in note
    assert "sure are only 9.98 requests/s" in note
    # 50.1 % is five times the tolerance, so 25 times the requests.
    assert "give it about 26,000 requests" in note


def test_a_long_workload_has_no_note() -> None:
    """One of a hundred requests is unfinished: less than the interval of 5 % leaves open."""
    requests = _run(100, _SERVICE_NS)
    interval = AnswerInterval(9.0, 11.0, 9.5, 10.5)
    resamples = Resamples([], 8)
    assert list_notes(requests, 10.0, interval, 0.001, None) == ()
    (note,) = list_notes(requests, 10.0, interval, 0.001, resamples)
    assert "longer trace" in note
    narrow = AnswerInterval(9.0, 11.0, 9.95, 10.5)
    (note,) = list_notes(requests, 10.0, narrow, 0.001, None)
    assert "give it about 400 requests" in note
