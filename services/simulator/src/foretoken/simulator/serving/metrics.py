"""From finished requests and step columns to what users see."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.report import Percentiles, RequestColumns
from foretoken.domain.slo import Slo
from foretoken.domain.units import NS_PER_MS, NS_PER_S
from foretoken.simulator.serving.percentile import summarize
from foretoken.simulator.serving.request import SimRequest

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_NOT_REACHED_NS = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestTimes:
    """One entry per request in order of arrival; times in ns, -1 where not reached."""

    arrival_ns: Ints
    scheduled_ns: Ints
    first_token_ns: Ints
    finished_ns: Ints
    num_prefill_tokens: Ints
    num_decode_tokens: Ints
    num_preemptions: Ints

    @property
    def is_completed(self) -> NDArray[np.bool_]:
        """Which requests have all their tokens."""
        return self.finished_ns >= 0

    @property
    def ttft_ns(self) -> Ints:
        """Arrival to first token of completed requests."""
        return (self.first_token_ns - self.arrival_ns)[self.is_completed]

    @property
    def e2e_ns(self) -> Ints:
        """Arrival to last token of completed requests."""
        return (self.finished_ns - self.arrival_ns)[self.is_completed]

    @property
    def tpot_ns(self) -> Floats:
        """Mean token gap of completed requests; NaN for answers of one token."""
        gaps = (self.num_decode_tokens - 1)[self.is_completed]
        return np.where(gaps > 0, (self.e2e_ns - self.ttft_ns) / np.maximum(gaps, 1), np.nan)

    def columns(self) -> RequestColumns:
        """Return the times in s."""
        return RequestColumns(
            arrival_s=_seconds(self.arrival_ns),
            scheduled_s=_seconds(self.scheduled_ns),
            first_token_s=_seconds(self.first_token_ns),
            finished_s=_seconds(self.finished_ns),
            num_prefill_tokens=tuple(self.num_prefill_tokens.tolist()),
            num_decode_tokens=tuple(self.num_decode_tokens.tolist()),
            num_preemptions=tuple(self.num_preemptions.tolist()),
        )


def collect_times(requests: Sequence[SimRequest], step_ends_ns: Sequence[Ints]) -> RequestTimes:
    """Return the times of all requests; `step_ends_ns` are the ends of each replica's steps."""
    rows = np.array(
        [
            (
                request.arrival_ns,
                request.scheduled_ns,
                _token_ns(request, step_ends_ns, is_last=False),
                _token_ns(request, step_ends_ns, is_last=True),
                request.num_prefill_tokens,
                request.num_decode_tokens,
                request.num_preemptions,
            )
            for request in requests
        ],
        dtype=np.int64,
    ).reshape(-1, 7)
    names = RequestTimes.__dataclass_fields__
    return RequestTimes(**dict(zip(names, rows.T, strict=True)))


def summarize_token_gaps(
    requests: Sequence[SimRequest], step_ends_ns: Sequence[Ints]
) -> Percentiles:
    """Return the gaps between consecutive tokens of a request in ms, every token counting once.

    Within a run of tokens a gap is that of two steps, so it is enough to count for every pair of
    consecutive steps how many requests got a token in both.
    """
    starts = [np.zeros(len(ends) + 1, dtype=np.int64) for ends in step_ends_ns]
    pauses: list[int] = []
    for request in requests:
        if request.replica < 0:
            continue
        changes, ends = starts[request.replica], step_ends_ns[request.replica]
        previous = -1
        for first, count in request.token_runs:
            changes[first] += 1
            changes[first + count - 1] -= 1
            if previous >= 0:
                pauses.append(ends[first] - ends[previous])
            previous = first + count - 1
    gaps = [np.diff(ends) for ends in step_ends_ns]
    counts = [np.cumsum(changes)[: len(gap)] for changes, gap in zip(starts, gaps, strict=True)]
    gaps.append(np.array(pauses, dtype=np.int64))
    counts.append(np.ones(len(pauses), dtype=np.int64))
    return summarize(np.concatenate(gaps) / NS_PER_MS, np.concatenate(counts))


def count_attaining(
    times: RequestTimes, slo: Slo, requests: Sequence[SimRequest], step_ends_ns: Sequence[Ints]
) -> int:
    """Return how many requests completed and met every limit."""
    meets = np.ones(int(times.is_completed.sum()), dtype=bool)
    for limit_ms, values_ns in (
        (slo.ttft_ms, times.ttft_ns),
        (slo.tpot_ms, np.nan_to_num(times.tpot_ns)),
        (slo.e2e_latency_ms, times.e2e_ns),
    ):
        if limit_ms > 0:
            meets &= values_ns <= limit_ms * NS_PER_MS
    if slo.itl_ms > 0:
        completed = [request for request in requests if request.is_finished]
        meets &= np.array(
            [
                _gap_percentile_ns(request, step_ends_ns[request.replica], slo.itl_percentile)
                for request in completed
            ]
        ) <= (slo.itl_ms * NS_PER_MS)
    return int(meets.sum())


def _gap_percentile_ns(request: SimRequest, ends_ns: Ints, percentile: float) -> float:
    token_ns = np.concatenate(
        [ends_ns[first : first + count] for first, count in request.token_runs]
    )
    return float(np.percentile(np.diff(token_ns), percentile)) if len(token_ns) > 1 else 0.0


def _token_ns(request: SimRequest, step_ends_ns: Sequence[Ints], *, is_last: bool) -> int:
    if not request.token_runs or (is_last and not request.is_finished):
        return _NOT_REACHED_NS
    if is_last:
        first, count = request.token_runs[-1]
        return int(step_ends_ns[request.replica][first + count - 1])
    return int(step_ends_ns[request.replica][request.token_runs[0][0]])


def _seconds(times_ns: Ints) -> tuple[float, ...]:
    return tuple(np.where(times_ns < 0, -1.0, times_ns / NS_PER_S).tolist())
