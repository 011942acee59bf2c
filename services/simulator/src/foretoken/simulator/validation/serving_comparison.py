"""A measured run compared with its simulation, by metric and by request."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.metrics.request import Instants
from foretoken.domain.requests.serving_run import MeasuredRequest, ServingRun
from foretoken.domain.results.report import Percentiles, RequestColumns, ServingReport
from foretoken.domain.units import MS_PER_S
from foretoken.simulator.grid import Flags, Floats
from foretoken.simulator.serving.metrics import defined_latencies, summarize


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """One entry per request, in the order they were sent; times in s, below 0 where not known."""

    arrival_s: Floats
    queued_s: Floats
    scheduled_s: Floats
    first_token_s: Floats
    last_token_s: Floats
    num_prefill_tokens: Floats
    num_decode_tokens: Floats

    @property
    def num_requests(self) -> int:
        """Number of requests."""
        return len(self.arrival_s)

    @property
    def has_schedule(self) -> bool:
        """Whether it is known of every request when the engine first scheduled it."""
        return bool(self.num_requests and np.all(self.scheduled_s >= 0))

    def latency_ms(self, name: str) -> Floats:
        """Return a latency of every request, by its metric; NaN where it has none."""
        times = Instants(
            arrival=self.arrival_s,
            scheduled=self.scheduled_s,
            first_token=self.first_token_s,
            finished=self.last_token_s,
            num_decode_tokens=self.num_decode_tokens,
        )
        values, is_defined = defined_latencies(name, times)
        return np.where(is_defined, values * MS_PER_S, np.nan)

    @property
    def makespan_s(self) -> float:
        """From the first arrival to the last token."""
        return float(self.last_token_s.max() - self.arrival_s.min())

    def keep(self, mask: Flags) -> "Timing":
        """Return the requests where the mask is true."""
        return Timing(**{name: getattr(self, name)[mask] for name in self.__slots__})


def timing_of_measured(requests: Sequence[MeasuredRequest]) -> Timing:
    """Return the timing of measured requests."""
    return Timing(
        **{
            name: np.array([getattr(request, name) for request in requests], dtype=np.float64)
            for name in Timing.__slots__
        }
    )


def timing_of_simulated(columns: RequestColumns) -> Timing:
    """Return the timing of simulated requests; those never finished have times below 0."""
    scheduled_s = np.asarray(columns.scheduled_s, dtype=np.float64)
    queued_s = np.asarray(columns.queued_s, dtype=np.float64)
    return Timing(
        arrival_s=np.asarray(columns.arrival_s, dtype=np.float64),
        queued_s=queued_s if len(queued_s) else np.full(len(scheduled_s), -1.0),
        scheduled_s=scheduled_s,
        first_token_s=np.asarray(columns.first_token_s, dtype=np.float64),
        last_token_s=np.asarray(columns.finished_s, dtype=np.float64),
        num_prefill_tokens=np.asarray(columns.num_prefill_tokens, dtype=np.float64),
        num_decode_tokens=np.asarray(columns.num_decode_tokens, dtype=np.float64),
    )


def check_same_workload(measured: Timing, simulated: Timing) -> None:
    """Check that both served the same requests in the same order.

    Raises:
        InvalidRequestError: they did not; names the first request that differs.

    """
    if measured.num_requests != simulated.num_requests:
        counts = f"{measured.num_requests} measured, {simulated.num_requests} simulated"
        raise InvalidRequestError.of_field("--measured", f"not the same requests: {counts}")
    for name in ("num_prefill_tokens", "num_decode_tokens"):
        ours, theirs = getattr(measured, name), getattr(simulated, name)
        differing = np.flatnonzero(ours != theirs)
        if len(differing):
            index = int(differing[0])
            problem = f"{ours[index]:.0f} measured, {theirs[index]:.0f} simulated"
            raise InvalidRequestError.of_field(
                "--measured", f"{name} of request {index}: {problem}"
            )


STATISTICS = ("mean", "p50", "p90", "p95", "p99")
_NUM_WORST = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricComparison:
    """One latency measured and simulated, in ms.

    Per-request errors are |simulated / measured - 1|; `bias_ratio` is the mean with its sign. They
    are 0 for ITL, which has no counterpart of each gap.
    """

    name: str
    measured: Percentiles
    simulated: Percentiles
    mape_ratio: float = 0.0
    median_ape_ratio: float = 0.0
    p90_ape_ratio: float = 0.0
    bias_ratio: float = 0.0

    def error_ratio(self, statistic: str) -> float:
        """Return simulated over measured less one of a statistic; 0 where nothing was measured."""
        measured = getattr(self.measured, statistic)
        return getattr(self.simulated, statistic) / measured - 1.0 if measured else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RateComparison:
    """A rate or duration of the whole run, measured and simulated."""

    name: str
    measured: float
    simulated: float

    @property
    def error_ratio(self) -> float:
        """Simulated over measured less one."""
        return self.simulated / self.measured - 1.0 if self.measured else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestComparison:
    """One request, measured and simulated; `index` is its place among those compared."""

    index: int
    arrival_s: float
    num_prefill_tokens: int
    num_decode_tokens: int
    measured_ttft_ms: float
    simulated_ttft_ms: float
    measured_e2e_latency_ms: float
    simulated_e2e_latency_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """The timing of the requests that were completed in both."""

    measured: Timing
    simulated: Timing
    requests: Sequence[MeasuredRequest]
    num_unfinished: int


def pair_up(run: ServingRun, report: ServingReport) -> Pair:
    """Return the requests of a run with those of its simulation.

    Raises:
        InvalidRequestError: the simulation is infeasible, completed nothing, or is of other
            requests.

    """
    if not report.feasibility.is_feasible:
        problem = f"the simulation says it cannot run: {report.feasibility.reason}"
        raise InvalidRequestError.of_field("scenario", problem)
    measured = timing_of_measured(run.completed)
    simulated = timing_of_simulated(report.requests)
    check_same_workload(measured, simulated)
    both = (simulated.last_token_s >= 0) & (simulated.first_token_s >= 0)
    if not both.any():
        raise InvalidRequestError.of_field("scenario", "the simulation completed no request")
    kept = [request for request, keep in zip(run.completed, both, strict=True) if keep]
    return Pair(
        measured=measured.keep(both),
        simulated=simulated.keep(both),
        requests=kept,
        num_unfinished=int(np.count_nonzero(~both)),
    )


def compare_metrics(pair: Pair, report: ServingReport) -> tuple[MetricComparison, ...]:
    """Return TTFT, TPOT, ITL where the run has token times, and end-to-end latency."""
    found = [_compare(name, pair) for name in ("ttft_ms", "tpot_ms", "e2e_latency_ms")]
    gaps = token_gaps_ms(pair.requests)
    if len(gaps):
        itl = MetricComparison(name="itl_ms", measured=summarize(gaps), simulated=report.itl_ms)
        found.insert(2, itl)
    return tuple(found)


def compare_rates(pair: Pair) -> tuple[RateComparison, ...]:
    """Return makespan and throughput, from the first arrival to the last token."""
    measured_s, simulated_s = pair.measured.makespan_s, pair.simulated.makespan_s
    tokens = float(pair.measured.num_decode_tokens.sum())
    requests = pair.measured.num_requests
    totals = (("output_throughput_tps", tokens), ("request_throughput_rps", float(requests)))
    return (
        RateComparison(name="makespan_s", measured=measured_s, simulated=simulated_s),
        *(
            RateComparison(name=name, measured=total / measured_s, simulated=total / simulated_s)
            for name, total in totals
        ),
    )


def compare_requests(pair: Pair) -> tuple[RequestComparison, ...]:
    """Return every request of the pair, in order."""
    ours, theirs = pair.measured, pair.simulated
    columns = (
        ours.arrival_s,
        ours.num_prefill_tokens,
        ours.num_decode_tokens,
        ours.latency_ms("ttft_ms"),
        theirs.latency_ms("ttft_ms"),
        ours.latency_ms("e2e_latency_ms"),
        theirs.latency_ms("e2e_latency_ms"),
    )
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return tuple(
        RequestComparison(
            index=index,
            arrival_s=row[0],
            num_prefill_tokens=int(row[1]),
            num_decode_tokens=int(row[2]),
            measured_ttft_ms=row[3],
            simulated_ttft_ms=row[4],
            measured_e2e_latency_ms=row[5],
            simulated_e2e_latency_ms=row[6],
        )
        for index, row in enumerate(rows)
    )


def find_worst(requests: Sequence[RequestComparison]) -> tuple[RequestComparison, ...]:
    """Return the requests whose end-to-end latency is furthest off, in ms, worst first."""
    ranked = sorted(
        requests,
        key=lambda item: -abs(item.simulated_e2e_latency_ms - item.measured_e2e_latency_ms),
    )
    return tuple(ranked[:_NUM_WORST])


def token_gaps_ms(requests: Sequence[MeasuredRequest]) -> Floats:
    """Return the gaps between output tokens; tokens that came in one piece have none between.

    Requests whose pieces held several tokens, nobody knows which, are left out.
    """
    requests = [request for request in requests if _has_token_times(request)]
    gaps = [np.diff(request.chunk_s) * MS_PER_S for request in requests]
    joined = np.concatenate(gaps) if gaps else np.zeros(0)
    num_together = sum(
        sum(request.chunk_tokens) - len(request.chunk_s)
        for request in requests
        if request.chunk_tokens
    )
    return np.concatenate([joined, np.zeros(max(num_together, 0))]) if len(joined) else joined


def _has_token_times(request: MeasuredRequest) -> bool:
    # The token that ends an answer may come without text, and so without a piece of its own.
    is_one_each = len(request.chunk_s) >= request.num_decode_tokens - 1
    return bool(request.chunk_s) and (is_one_each or bool(request.chunk_tokens))


def _compare(name: str, pair: Pair) -> MetricComparison:
    measured, simulated = pair.measured.latency_ms(name), pair.simulated.latency_ms(name)
    known = ~np.isnan(measured) & ~np.isnan(simulated)
    measured, simulated = measured[known], simulated[known]
    positive = measured > 0
    errors = simulated[positive] / measured[positive] - 1.0
    if not len(errors):
        errors = np.zeros(1)
    sizes = np.abs(errors)
    return MetricComparison(
        name=name,
        measured=summarize(measured),
        simulated=summarize(simulated),
        mape_ratio=float(sizes.mean()),
        median_ape_ratio=float(np.median(sizes)),
        p90_ape_ratio=float(np.percentile(sizes, 90)),
        bias_ratio=float(errors.mean()),
    )
