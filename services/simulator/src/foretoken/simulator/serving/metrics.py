"""From what engines did to times of requests, gaps between tokens, and their summaries."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.metrics.request import LATENCIES, Instants
from foretoken.domain.results.report import ITL_QUANTILES, Histogram, Percentiles, RequestColumns
from foretoken.domain.units import NS_PER_MS
from foretoken.simulator.grid import Flags, Floats, Ints
from foretoken.simulator.serving.record import (
    NOT_REACHED,
    RequestRecord,
    ServingRecord,
    StepRecord,
    TokenRuns,
)

_PERCENTS = (50, 90, 95, 99, 100)
# Room for a count and a value in one integer; the value has 43 bits, 2.4 hours in ns.
_COUNT_BITS = 20
# Ranges of a histogram; whole numbers up to this many have one each.
_MAX_RANGES = 64


def summarize(values: ArrayLike, counts: ArrayLike | None = None) -> Percentiles:
    """Return mean and percentiles (linear between ranks) of values, each taken `counts` times."""
    return describe(values, counts, ())[0]


def describe(
    values: ArrayLike, counts: ArrayLike | None, percents: Sequence[float], scale: float = 1.0
) -> tuple[Percentiles, tuple[float, ...]]:
    """Return the summary of values times `scale`, and their percentiles at `percents`.

    The second is empty where nothing was observed.
    """
    wanted = np.array((*_PERCENTS, *percents)) / 100
    if counts is None:
        observed = np.sort(np.asarray(values, dtype=np.float64))
        if len(observed) == 0:
            return Percentiles(), ()
        mean = float(observed.mean())
        found = _between_ranks(observed, wanted * (len(observed) - 1))
    else:
        observed, upto = _sort_values(values, counts)
        if len(observed) == 0:
            return Percentiles(), ()
        mean = float(observed @ np.diff(upto, prepend=0) / upto[-1])
        found = _between_counted_ranks(observed, upto, wanted * (upto[-1] - 1))
    p50, p90, p95, p99, largest, *quantiles = (found * scale).tolist()
    summary = Percentiles(mean=mean * scale, p50=p50, p90=p90, p95=p95, p99=p99, max=largest)
    return summary, tuple(quantiles)


def count_whole(values: ArrayLike, weights: ArrayLike | None = None) -> tuple[Floats, Floats]:
    """Return the distinct values of whole numbers from 0 on, ascending, and how often each is."""
    counts = np.bincount(np.asarray(values), None if weights is None else np.asarray(weights))
    distinct = np.flatnonzero(counts)
    return distinct.astype(np.float64), counts[distinct].astype(np.float64)


def summarize_over_time(values: ArrayLike, durations: ArrayLike) -> Percentiles:
    """Return mean and percentiles of a whole number that stayed at each value for a time.

    A percentile is the least value that was not exceeded for that share of the time.
    """
    distinct, times = count_whole(values, durations)
    if len(distinct) == 0 or not times.sum() > 0:
        return Percentiles()
    upto = np.cumsum(times)
    last = len(distinct) - 1
    places = np.searchsorted(upto, np.array(_PERCENTS) / 100 * upto[-1])
    p50, p90, p95, p99, largest = distinct[np.minimum(places, last)].tolist()
    mean = float(distinct @ times / upto[-1])
    return Percentiles(mean=mean, p50=p50, p90=p90, p95=p95, p99=p99, max=largest)


def make_histogram(distinct: Floats, counts: Floats) -> Histogram:
    """Return the histogram of distinct whole numbers and how often each was.

    Each has a range of its own where they are close together, else the ranges widen geometrically.
    """
    if len(distinct) == 0:
        return Histogram()
    lowest, highest = int(distinct[0]), int(distinct[-1])
    edges = np.arange(lowest, highest + 2, dtype=np.float64)
    if len(edges) > _MAX_RANGES + 1:
        widening = np.geomspace(max(lowest, 1), highest + 1, _MAX_RANGES)
        edges = np.unique(np.append(np.floor(widening[:-1]), (lowest, highest + 1)))
    shares, _ = np.histogram(distinct, edges, weights=counts)
    return Histogram(edges=tuple(edges.tolist()), shares=tuple((shares / counts.sum()).tolist()))


def _sort_values(values: ArrayLike, counts: ArrayLike) -> tuple[Floats, Floats]:
    """Return the values that occur, ascending, and how many there are up to each."""
    observed, times = np.asarray(values), np.asarray(counts)
    occurs = times > 0
    observed, times = observed[occurs], times[occurs]
    if _can_pack(observed, times):
        # Sorting one column of numbers is several times as fast as an order for two.
        packed = (observed.astype(np.int64) << _COUNT_BITS) | times
        packed.sort()
        observed, times = packed >> _COUNT_BITS, packed & ((1 << _COUNT_BITS) - 1)
    else:
        order = np.argsort(observed)
        observed, times = observed[order], times[order]
    return observed.astype(np.float64), np.cumsum(times, dtype=np.float64)


def _can_pack(observed: NDArray[Any], times: NDArray[Any]) -> bool:
    """Return whether value and count fit into one integer, the value first."""
    are_whole = all(np.issubdtype(column.dtype, np.integer) for column in (observed, times))
    return (
        are_whole
        and len(observed) > 0
        and observed.min() >= 0
        and int(observed.max()) < 1 << (63 - _COUNT_BITS)
        and int(times.max()) < 1 << _COUNT_BITS
    )


def _between_ranks(observed: Floats, ranks: Floats) -> Floats:
    lower = ranks.astype(np.int64)
    low, high = observed[lower], observed[np.minimum(lower + 1, len(observed) - 1)]
    return np.asarray(low + (high - low) * (ranks - lower))


def _between_counted_ranks(observed: Floats, upto: Floats, ranks: Floats) -> Floats:
    lower = np.floor(ranks)
    low = observed[np.searchsorted(upto, lower, side="right")]
    high = observed[np.searchsorted(upto, np.minimum(lower + 1, upto[-1] - 1), side="right")]
    return np.asarray(low + (high - low) * (ranks - lower))


# Latencies that need to know what requests did in running steps, and those that do not.
OF_EXECUTION = ("execution_ms", "preempted_ms")
_OF_INSTANTS = tuple(
    metric.name
    for metric in LATENCIES
    if metric.formula is not None and metric.name not in OF_EXECUTION
)
# What parts of a run say of their requests.
OF_PARTS = ("ttft_ms", "tpot_ms", "e2e_latency_ms")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedRuns:
    """The runs of tokens with their steps counted through all engines; `seen_ns` is per such step.

    Run i is the tokens of request `request[i]` of every `stride[i]`-th step from
    `first[i]` to `last[i]`, and `num_together[i]` more that left with the first. Its token was
    handed out at `handed_ns[i]` where that is another time than its step's (else -1).
    """

    request: Ints
    first: Ints
    last: Ints
    stride: Ints
    num_together: Ints
    handed_ns: Ints
    seen_ns: Ints


def place_runs(record: ServingRecord) -> PlacedRuns:
    """Return the runs of tokens over the steps of all engines, one engine after the other."""
    offsets = step_offsets(record.steps)
    runs: TokenRuns = record.tokens
    request = np.asarray(runs.request, dtype=np.int64)
    engine = runs.engine
    if engine is None:
        engine = np.asarray(record.requests.engine)[request]
    # A first token that the engine of the prompt computed leaves where the answer goes on.
    is_handed = np.asarray(engine) != np.asarray(record.requests.engine)[request]
    first = offsets[engine] + runs.first_step
    count, stride = np.asarray(runs.count, dtype=np.int64), np.asarray(runs.stride)
    return PlacedRuns(
        request=request,
        first=first,
        last=first + (count - 1) * stride,
        stride=np.maximum(stride, 1),
        num_together=np.where(stride == 0, count - 1, 0),
        handed_ns=np.where(is_handed, np.asarray(record.requests.first_token_ns)[request], -1),
        seen_ns=join_steps(record.steps, "seen_ns"),
    )


def step_offsets(steps: Sequence[StepRecord]) -> Ints:
    """Return the number of steps of all engines before each one, and of all together at the end."""
    return np.cumsum([0, *(len(engine.end_ns) for engine in steps)], dtype=np.int64)


def join_steps(steps: Sequence[StepRecord], column: str) -> Ints:
    """Return a column of all engines' steps, one engine after the other."""
    if len(steps) == 1:
        return np.asarray(getattr(steps[0], column))
    columns = [np.asarray(getattr(engine, column)) for engine in steps]
    return np.concatenate(columns) if columns else np.zeros(0, dtype=np.int64)


def is_completed(requests: RequestRecord) -> Flags:
    """Return which requests have all their tokens."""
    return np.asarray(requests.finished_ns) >= 0


def instants_of(requests: RequestRecord, execution: Ints | None = None) -> Instants:
    """Return when the requests of a record reached what, in ns; `execution` if it is known."""
    transferred, prefilled = requests.transferred_ns, requests.prefilled_ns
    return Instants(
        arrival=np.asarray(requests.arrival_ns),
        queued=np.asarray(requests.queued_ns),
        scheduled=np.asarray(requests.scheduled_ns),
        prefilled=np.asarray(requests.first_token_ns if prefilled is None else prefilled),
        first_token=np.asarray(requests.first_token_ns),
        finished=np.asarray(requests.finished_ns),
        transferred=np.asarray(NOT_REACHED if transferred is None else transferred),
        execution=execution,
        num_prefill_tokens=np.asarray(requests.num_prefill_tokens),
        num_decode_tokens=np.asarray(requests.num_decode_tokens),
    )


def instants_of_columns(columns: RequestColumns) -> Instants:
    """Return when the requests of a report reached what, in s; a column it has not never."""
    length = len(columns.arrival_s)
    found = {
        name: np.asarray(column if len(column) == length else np.full(length, NOT_REACHED))
        for name, column in (
            ("arrival", columns.arrival_s),
            ("queued", columns.queued_s),
            ("scheduled", columns.scheduled_s),
            ("prefilled", columns.prompt_end_s),
            ("first_token", columns.first_token_s),
            ("finished", columns.finished_s),
            ("transferred", columns.transferred_s),
            ("num_prefill_tokens", columns.num_prefill_tokens),
            ("num_decode_tokens", columns.num_decode_tokens),
        )
    }
    return Instants(**{name: column.astype(np.float64) for name, column in found.items()})


def defined_latencies(name: str, times: Instants) -> tuple[NDArray[np.number], Flags]:
    """Return a latency of every request in the unit of its instants, and which are defined."""
    metric = METRICS[name]
    if metric.formula is None or metric.is_defined is None:
        raise KeyError(name)
    # What is not defined may divide by 0.
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(metric.formula(times)), np.asarray(metric.is_defined(times))


def measure(name: str, times: Instants, chosen: Flags | None = None) -> NDArray[np.number]:
    """Return a latency of the requests that have one, or of those of them that are chosen."""
    values, is_defined = defined_latencies(name, times)
    return np.asarray(values[is_defined if chosen is None else is_defined & chosen])


def summarize_latencies(
    times: Instants, names: Sequence[str], chosen: Flags | None = None
) -> dict[str, Percentiles]:
    """Return summaries in ms of latencies by name; instants are in ns."""
    return {name: summarize(measure(name, times, chosen) / NS_PER_MS) for name in names}


def summarize_requests(record: ServingRecord) -> dict[str, Any]:
    """Return the summaries over requests by their names in `ServingReport`.

    Latencies are those of completed requests; what they were given counts for all.
    """
    requests = record.requests
    gaps = np.ediff1d(np.sort(requests.arrival_ns))
    return {
        **summarize_latencies(instants_of(requests), _OF_INSTANTS),
        "session_latency_ms": summarize(session_latencies_ns(requests) / NS_PER_MS),
        "interarrival_ms": summarize(gaps / NS_PER_MS),
        "prompt_tokens": summarize(requests.num_prefill_tokens),
        "answer_tokens": summarize(requests.num_decode_tokens),
        "request_preemptions": summarize(requests.num_preemptions),
    }


def session_latencies_ns(requests: RequestRecord) -> Ints:
    """Return the times of sessions of several requests that completed whole."""
    if requests.session is None:
        return np.zeros(0, dtype=np.int64)
    names, session, counts = np.unique(requests.session, return_inverse=True, return_counts=True)
    # One that did not complete was never finished: its session is left out.
    first_ns = np.full(len(names), np.iinfo(np.int64).max)
    np.minimum.at(first_ns, session, requests.arrival_ns)
    last_ns = np.full(len(names), NOT_REACHED)
    np.maximum.at(last_ns, session, requests.finished_ns)
    num_done = np.bincount(session, is_completed(requests), len(names))
    is_whole = (counts > 1) & (num_done == counts)
    latencies_ns: Ints = (last_ns - first_ns)[is_whole]
    return latencies_ns


def summarize_token_gaps(runs: PlacedRuns) -> tuple[Percentiles, tuple[float, ...]]:
    """Return the gaps between consecutive tokens of a request in ms, every token counting once.

    The second are their percentiles at `ITL_QUANTILES`.
    """
    return describe(*count_token_gaps(runs), ITL_QUANTILES, scale=1 / NS_PER_MS)


def count_token_gaps(runs: PlacedRuns) -> tuple[Ints, NDArray[np.integer]]:
    """Return gaps between consecutive tokens of a request in ns, and how often each occurs.

    Within a run of tokens a gap is that of two steps, so it is enough to count for every pair of
    steps that are a stride apart how many requests got one token in the first and the next in the
    second. Between tokens that left together there is a gap of 0.
    """
    num_steps = len(runs.seen_ns)
    if num_steps == 0:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    gaps_ns = [pauses_ns(runs)]
    counts: list[NDArray[np.integer]] = [np.ones(len(gaps_ns[0]), dtype=np.int32)]
    if num_together := int(runs.num_together.sum()):
        gaps_ns.append(np.zeros(1, dtype=np.int64))
        counts.append(np.array([num_together]))
    for stride, chosen in _by_stride(runs):
        changes = np.bincount(runs.first[chosen], minlength=num_steps)
        changes -= np.bincount(runs.last[chosen], minlength=num_steps)
        counts.append(_cumulate(changes.astype(np.int32), stride)[:-stride])
        gaps_ns.append(runs.seen_ns[stride:] - runs.seen_ns[:-stride])
    return np.concatenate(gaps_ns), np.concatenate(counts)


def _by_stride(runs: PlacedRuns) -> list[tuple[int, Flags]]:
    """Return each stride, and which runs have it."""
    return [(int(stride), runs.stride == stride) for stride in np.unique(runs.stride)]


def _cumulate(values: NDArray[np.integer], stride: int) -> NDArray[np.integer]:
    """Return the sum of each value and of those a multiple of the stride before it."""
    num_rows = -(-len(values) // stride)
    padded = np.zeros(num_rows * stride, dtype=values.dtype)
    padded[: len(values)] = values
    sums = np.cumsum(padded.reshape(num_rows, stride), axis=0, dtype=values.dtype)
    return sums.ravel()[: len(values)]


def pauses_ns(runs: PlacedRuns) -> Ints:
    """Return the gaps between the runs of a request, each from its last token to the next first."""
    follows = runs.request[1:] == runs.request[:-1]
    left_ns = np.where(runs.handed_ns < 0, runs.seen_ns[runs.last], runs.handed_ns)
    gaps = runs.seen_ns[runs.first[1:]] - left_ns[:-1]
    return np.asarray(gaps[follows], dtype=np.int64)


def busy_ns(steps: StepRecord, num_stages: int) -> Ints:
    """Return how long each step occupies its engine, by the clock.

    On one stage a step ends for the device where the next one starts: what the host does with its
    tokens after that is hidden. On several stages steps overlap and each counts whole.
    """
    start, end = np.asarray(steps.start_ns), np.asarray(steps.end_ns)
    if num_stages > 1 or len(end) == 0:
        return np.asarray(end - start)
    return np.asarray(np.minimum(end, np.append(start[1:], end[-1])) - start)


def execution_ns(record: ServingRecord, runs: PlacedRuns, num_stages: Sequence[int]) -> Ints:
    """Return the time of each request in running steps, at all its attempts.

    `num_stages` are the pipeline stages of each engine.
    """
    num_requests = len(record.requests.arrival_ns)
    total = np.zeros(num_requests)
    if not record.steps:
        return total.astype(np.int64)
    busy = np.concatenate([busy_ns(*each) for each in zip(record.steps, num_stages, strict=True)])
    for stride, chosen in _by_stride(runs):
        first, last = runs.first[chosen], runs.last[chosen]
        upto = _cumulate(busy, stride)
        in_runs = upto[last] - upto[first] + busy[first]
        total += np.bincount(runs.request[chosen], weights=in_runs, minlength=num_requests)
    offsets = step_offsets(record.steps)
    step = np.concatenate(
        [steps.prefill_step + offset for steps, offset in zip(record.steps, offsets, strict=False)]
    )
    request = join_steps(record.steps, "prefill_request")
    is_new = ~_has_token(runs, request, step)
    in_prefills = busy[step][is_new]
    total += np.bincount(request[is_new], weights=in_prefills, minlength=num_requests)
    return total.astype(np.int64)


def _has_token(runs: PlacedRuns, request: Ints, step: Ints) -> Flags:
    """Return whether the request of each pair got a token in its step."""
    if len(runs.request) == 0:
        return np.zeros(len(step), dtype=bool)
    # Runs ascend by request and, on one engine, by step, so one number orders both; those of a
    # request that moved to an engine before its first are put in place.
    num_steps = len(runs.seen_ns)
    keys = runs.request * num_steps + runs.first
    order = np.argsort(keys, kind="stable")
    wanted = request.astype(np.int64) * num_steps + step
    place = np.searchsorted(keys, wanted, side="right", sorter=order) - 1
    at = order[np.maximum(place, 0)]
    is_of_run = (place >= 0) & (runs.request[at] == request) & (step <= runs.last[at])
    return np.asarray(is_of_run & ((step - runs.first[at]) % runs.stride[at] == 0))
