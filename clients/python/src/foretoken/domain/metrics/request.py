"""Latencies of requests, defined on the instants that a request goes through.

Formulas take columns or single requests alike, and any unit of time.
"""

from dataclasses import dataclass

from foretoken.domain.metrics.metric import Metric
from foretoken.domain.units import Quantity


@dataclass(frozen=True, kw_only=True, slots=True)
class Instants:
    """When requests reached what, in one unit of time; below 0 where they never did.

    `prefilled` is when the prompt was computed: before the first token is handed out where another
    replica does that. `execution` is the time in running steps. Tokens are those of the prompt and
    of the answer. A formula reads no more than it needs; the rest may be left out.
    """

    arrival: Quantity = None
    queued: Quantity = None
    scheduled: Quantity = None
    prefilled: Quantity = None
    first_token: Quantity = None
    finished: Quantity = None
    transferred: Quantity = None
    execution: Quantity = None
    num_prefill_tokens: Quantity = None
    num_decode_tokens: Quantity = None


def is_completed(times: Instants) -> Quantity:
    """Return which requests have all their tokens."""
    return times.finished >= 0


def _service(times: Instants) -> Quantity:
    return times.finished - times.scheduled


def _preempted(times: Instants) -> Quantity:
    # Of steps that overlap a request may have more than it waited for them.
    rest = _service(times) - times.execution
    return rest * (rest > 0)


# A table: every metric in as few lines as it needs.
# fmt: off
LATENCIES = (
    Metric("ttft_ms", "TTFT", "ms", "lower",
        "first token - arrival: time to first token, queueing included",
        formula=lambda times: times.first_token - times.arrival, is_defined=is_completed,
        shown=("terminal", "comparison", "ranking", "percentiles", "requests", "limit")),
    Metric("ttft_queued_ms", "TTFT from queued", "ms", "lower",
        "first token - queued: without the server before the engine",
        formula=lambda times: times.first_token - times.queued, is_defined=is_completed,
        shown=("percentiles", "requests")),
    Metric("tpot_ms", "TPOT", "ms", "lower",
        "(finished - first token) / (output tokens - 1), once per request: time per output token."
        " Answers of one token have none",
        formula=lambda times: (times.finished - times.first_token) / (times.num_decode_tokens - 1),
        is_defined=lambda times: is_completed(times) & (times.num_decode_tokens > 1),
        shown=("terminal", "comparison", "ranking", "percentiles", "requests", "limit")),
    Metric("itl_ms", "ITL", "ms", "lower",
        "gap between consecutive output tokens of a request, once per token: inter-token latency,"
        " preemptions and the move to a decode replica included",
        shown=("terminal", "comparison", "percentiles", "limit")),
    Metric("e2e_latency_ms", "end-to-end latency", "ms", "lower", "finished - arrival",
        formula=lambda times: times.finished - times.arrival, is_defined=is_completed,
        is_long_on_page=True, shown=("terminal", "comparison", "percentiles", "requests", "limit")),
    Metric("e2e_latency_ms_per_token", "end-to-end latency per output token", "ms", "lower",
        "(finished - arrival) / output tokens",
        formula=lambda times: (times.finished - times.arrival) / times.num_decode_tokens,
        is_defined=is_completed, shown=("percentiles",)),
    Metric("queueing_ms", "queueing time", "ms", "lower",
        "scheduled - arrival, of all requests that were scheduled",
        formula=lambda times: times.scheduled - times.arrival,
        is_defined=lambda times: times.scheduled >= 0,
        shown=("terminal", "comparison", "percentiles", "requests")),
    Metric("service_ms", "service time", "ms", "lower", "finished - scheduled", formula=_service,
        is_defined=is_completed, is_long_on_page=True),
    Metric("prefill_ms", "prefill time", "ms", "lower", "prefilled - scheduled",
        formula=lambda times: times.prefilled - times.scheduled, is_defined=is_completed,
        shown=("percentiles",)),
    Metric("prefill_ms_per_token", "prefill time per prompt token", "ms", "lower",
        "(prefilled - scheduled) / prompt tokens",
        formula=lambda times: (times.prefilled - times.scheduled) / times.num_prefill_tokens,
        is_defined=is_completed),
    Metric("decode_ms", "decode time", "ms", "lower", "finished - first token",
        formula=lambda times: times.finished - times.first_token, is_defined=is_completed,
        is_long_on_page=True, shown=("percentiles",)),
    Metric("execution_ms", "execution time", "ms", "", "time in running steps, at all attempts",
        formula=lambda times: times.execution, is_defined=is_completed, is_long_on_page=True,
        shown=("percentiles", "requests")),
    Metric("preempted_ms", "preempted time", "ms", "lower",
        "service time - execution time: preempted, passed over, between steps, or on the way to a"
        " decode replica", formula=_preempted, is_defined=is_completed,
        shown=("percentiles", "requests")),
    Metric("transfer_ms", "KV transfer time", "ms", "lower",
        "transferred - prefilled (0: before it), of requests that moved to a decode replica: the"
        " wait for room there, for ports, and the bytes",
        formula=lambda times: (times.transferred - times.prefilled).clip(min=0),
        is_defined=lambda times: is_completed(times) & (times.transferred >= 0), neutral=0.0,
        statistics=("p50", "p99"), shown=("terminal", "page", "percentiles")),
)
# fmt: on

# Those that an SLO or a target can limit, by name.
LIMITED = {metric.name: metric for metric in LATENCIES if "limit" in metric.shown}
