"""Metrics of a serving deployment, its pools and its steps."""

from dataclasses import dataclass
from typing import Any

from foretoken.domain.metrics.metric import EVERYWHERE, SHARE, Metric
from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.results.report import ServingReport
from foretoken.domain.units import S_PER_HOUR

_MILLION = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTotals:
    """What a run, a part of it or a class of its requests came to, which rates are made from.

    `num_input_tokens` and `num_output_tokens` are those of the requests that completed;
    `num_devices` is how many were held on average. Prompt tokens were `num_cached_tokens` found
    and `num_computed_tokens` computed.
    """

    duration_s: float = 0.0
    num_devices: float = 0.0
    num_requests: float = 0.0
    num_completed: float = 0.0
    num_attaining: float = 0.0
    num_input_tokens: float = 0.0
    num_output_tokens: float = 0.0
    num_cached_tokens: float = 0.0
    num_computed_tokens: float = 0.0
    energy_j: float = 0.0
    cost_usd: float = 0.0


def _over(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _hit_ratio(run: RunTotals) -> float:
    return _over(run.num_cached_tokens, run.num_cached_tokens + run.num_computed_tokens)


def _usd_per_million(run: RunTotals) -> float:
    return _over(run.cost_usd, run.num_output_tokens + run.num_input_tokens) * _MILLION


def _interval(report: ServingReport) -> str:
    return f"{report.step_time_low_ratio:.2f} to {report.step_time_high_ratio:.2f} x"


def describe_load(report: ServingReport, digits: int = 3) -> str:
    """Return the rate that was offered: `4/s`, or that all requests came at once."""
    rate_rps = report.offered_rps
    return f"{format_number(rate_rps, digits)}/s" if rate_rps else "all at once"


def _describe_refused(report: ServingReport) -> str:
    counts = report.num_refused_by_reason.items()
    return ", ".join(f"{count} {reason}" for reason, count in counts if count) or "0"


# A table: every metric in as few lines as it needs.
# fmt: off
_RATES = (
    Metric("num_requests", "requests", "", "",
        "requests that arrived; of a pool those that had a part computed there",
        shown=("page", "pool")),
    Metric("num_completed", "completed requests", "", "higher",
        "requests that got all their tokens", shown=EVERYWHERE),
    Metric("duration_s", "duration", "s", "", "from the first arrival to the last completion",
        shown=("page",)),
    Metric("makespan_s", "makespan", "s", "lower",
        "of a measured run, from the first arrival to the last token"),
    Metric("offered_rps", "offered requests/s", "requests/s", "",
        "rate of the arrivals; 0 where all arrive at once", shown=("comparison",)),
    Metric("request_throughput_rps", "completed requests/s", "requests/s", "higher",
        "completed requests / duration",
        formula=lambda run: _over(run.num_completed, run.duration_s), shown=EVERYWHERE),
    Metric("request_throughput_rps_per_gpu", "completed requests/s per GPU", "requests/s",
        "higher", "completed requests / duration / GPUs held on average",
        formula=lambda run: _over(_over(run.num_completed, run.duration_s), run.num_devices)),
    Metric("goodput_rps", "goodput", "requests/s", "higher",
        "requests that met every limit of their SLO / duration",
        formula=lambda run: _over(run.num_attaining, run.duration_s), shown=EVERYWHERE),
    Metric("slo_attainment_ratio", "SLO attainment", SHARE, "higher",
        "share of all requests that completed and met every limit of their SLO; those refused,"
        " rejected or lost do not",
        formula=lambda run: _over(run.num_attaining, run.num_requests), shown=EVERYWHERE),
    Metric("input_throughput_tps", "input tokens/s", "tokens/s", "higher",
        "prompt tokens of completed requests / duration",
        formula=lambda run: _over(run.num_input_tokens, run.duration_s), shown=EVERYWHERE),
    Metric("input_throughput_tps_per_gpu", "input tokens/s per GPU", "tokens/s", "higher",
        "prompt tokens of completed requests / duration / GPUs held on average",
        formula=lambda run: _over(_over(run.num_input_tokens, run.duration_s), run.num_devices)),
    Metric("output_throughput_tps", "output tokens/s", "tokens/s", "higher",
        "output tokens of completed requests / duration",
        formula=lambda run: _over(run.num_output_tokens, run.duration_s), shown=EVERYWHERE),
    Metric("output_throughput_tps_per_gpu", "output tokens/s per GPU", "tokens/s", "higher",
        "output tokens of completed requests / duration / GPUs held on average",
        formula=lambda run: _over(_over(run.num_output_tokens, run.duration_s), run.num_devices),
        shown=("terminal", "page", "comparison", "ranking")),
    Metric("steady.output_throughput_tps", "output tokens/s, steady", "tokens/s", "higher",
        "output tokens that left in the steady window / its length", of=(ServingReport,),
        read=lambda report: report.steady.output_throughput_tps, shown=("page",)),
    Metric("steady.ttft_ms.p50", "TTFT p50, steady", "ms", "lower",
        "median TTFT of the requests that arrived in the steady window", of=(ServingReport,),
        read=lambda report: report.steady.ttft_ms.p50, shown=("page",)),
    Metric("tps_per_user", "output tokens/s per user", "tokens/s", "higher", "1000 / TPOT in ms",
        shown=("ranking",)),
    Metric("session_latency_ms", "session latency", "ms", "lower",
        "last token - first arrival of a session of several requests that completed whole: turns,"
        " branches and joins, times to think included", neutral=0.0, is_long_on_page=True,
        statistics=("p50", "p99"), shown=("terminal", "comparison", "percentiles")),
    Metric("num_retries", "retried requests", "", "lower",
        "times requests began anew after their replica had failed", neutral=0.0,
        shown=("terminal", "page")),
    Metric("num_refused_by_reason", "requests not served", "", "",
        "`context_too_long`, `exceeds_kv_cache`, `rejected` by a full router, `lost` with a"
        " replica once too often", neutral=0.0, of=(ServingReport,),
        read=lambda report: _describe_refused(report) if report.num_refused_by_reason else 0,
        shown=("terminal",)),
)
# fmt: on

# A table: every metric in as few lines as it needs.
# fmt: off
_USE = (
    Metric("num_devices", "GPUs", "", "",
        "devices of the layout, or of all replicas that a pool can have",
        shown=(*EVERYWHERE, "ranking", "pool")),
    Metric("utilization_ratio", "GPU utilization", SHARE, "",
        "busy time of a pipeline stage / duration; the mean of all stages and replicas",
        shown=("terminal", "page", "comparison", "pool")),
    Metric("mfu_ratio", "MFU", SHARE, "higher",
        "model FLOPs utilization: FLOPs that the model needs once, over what the GPUs could do at"
        " their peak. Serving counts completed requests, not what the prefix cache held nor what"
        " was computed again; training three times the forward FLOPs of matrix products and"
        " causal attention", shown=("terminal", "page", "comparison", "ranking", "pool")),
    Metric("mbu_ratio", "MBU", SHARE, "higher",
        "memory bandwidth utilization: bytes that have to be read, over what the GPUs could read:"
        " in each step the weights once (of experts those hit) and the KV cache that its"
        " attention reads", shown=("terminal", "page", "comparison", "pool")),
    Metric("num_kv_blocks", "KV blocks", "", "", "blocks of the KV cache of each replica",
        shown=("terminal", "pool")),
    Metric("kv_block_size", "tokens of a KV block", "", "",
        "tokens whose keys and values one block of the KV cache holds"),
    Metric("kv_utilization_ratio", "KV cache usage", SHARE, "",
        "share of the KV blocks that requests hold"),
    Metric("kv_utilization_ratio_mean", "KV cache usage, mean", SHARE, "",
        "share of the KV blocks that requests hold, over the duration",
        shown=("terminal", "page", "comparison", "pool")),
    Metric("kv_utilization_ratio_max", "KV cache usage, max", SHARE, "",
        "the most of the KV blocks that requests held at once", shown=("page",)),
    Metric("prefix_cache_hit_ratio", "prefix cache hit rate", SHARE, "higher",
        "prompt tokens found over those found and computed, at all admissions", neutral=0.0,
        formula=_hit_ratio, shown=EVERYWHERE),
    Metric("num_cached_tokens", "cached tokens", "", "",
        "prompt tokens, and tokens to compute again, found in the prefix cache"),
    Metric("num_loaded_tokens", "loaded tokens", "", "",
        "of these, tokens that a tier below the device's memory had"),
    Metric("num_preemptions", "preemptions", "", "lower",
        "times that a request lost its KV blocks", shown=EVERYWHERE),
    Metric("num_serving_steps", "serving steps", "", "", "steps of all engines", shown=EVERYWHERE),
    Metric("batch_size_mean", "batch size, mean", "", "", "requests in a step, mean over steps",
        shown=("terminal", "comparison", "pool")),
    Metric("tokens_per_decode_mean", "tokens per decode step", "", "",
        "tokens that a decoding sequence gets in a step; above 1 with speculation", neutral=1.0,
        shown=("terminal", "page")),
    Metric("step_ms", "serving step time", "ms", "",
        "of a step, from the start of the first stage to the end of the last",
        shown=("percentiles",)),
    Metric("batch_size", "batch size", "", "", "requests in a step", shown=("percentiles",)),
    Metric("batch_tokens", "tokens in a step", "", "", "prompt and decode tokens of a step",
        shown=("percentiles",)),
    Metric("running", "running requests", "", "",
        "requests of a replica that run, over time while it works", shown=("percentiles",)),
    Metric("waiting", "waiting requests", "", "",
        "requests of a replica that wait, over time while it works", shown=("percentiles",)),
    Metric("interarrival_ms", "interarrival time", "ms", "", "from an arrival to the next"),
    Metric("prompt_tokens", "input tokens", "", "", "prompt tokens of a request"),
    Metric("answer_tokens", "output tokens", "", "", "tokens asked for, of a request"),
    Metric("request_preemptions", "preemptions of a request", "", "lower",
        "times that a request lost its KV blocks, per request"),
)
# fmt: on

# A table: every metric in as few lines as it needs.
# fmt: off
_COST = (
    Metric("cost_usd", "cost", "USD", "lower",
        "price of the GPUs for the duration, in a cluster for the time they were held",
        neutral=0.0, shown=("pool",)),
    Metric("usd_per_million_output_tokens", "cost per million output tokens", "USD", "lower",
        "cost / output tokens, of a million of them", neutral=0.0,
        formula=lambda run: _over(run.cost_usd, run.num_output_tokens) * _MILLION,
        shown=("terminal", "page", "comparison", "ranking")),
    Metric("usd_per_million_tokens", "cost per million tokens", "USD", "lower",
        "cost / (prompt and output tokens), of a million of them", neutral=0.0,
        formula=_usd_per_million, shown=("terminal", "page")),
    Metric("power_w_mean", "mean power", "W", "lower", "energy / duration, of all GPUs",
        neutral=0.0, formula=lambda run: _over(run.energy_j, run.duration_s),
        shown=("terminal", "page")),
    Metric("energy_wh", "energy", "Wh", "lower",
        "busy power while a stage is busy, idle power for the rest of the duration", neutral=0.0,
        formula=lambda run: run.energy_j / S_PER_HOUR, shown=("page",)),
    Metric("energy_j_per_output_token", "energy per output token", "J", "lower",
        "energy / output tokens", neutral=0.0,
        formula=lambda run: _over(run.energy_j, run.num_output_tokens), shown=EVERYWHERE),
)
# fmt: on

# A table: every metric in as few lines as it needs.
# fmt: off
_TIME = (
    Metric("step_time_low_ratio", "step time interval", "", "",
        "busy time with every operator at its lower bound, over that at its estimate",
        of=(ServingReport,), read=_interval, shown=("terminal", "page")),
    Metric("step_time_high_ratio", "step time at the upper bounds", "", "",
        "busy time with every operator at its upper bound, over that at its estimate"),
    Metric("step_time_s_by_group", "{} in all steps", "s", "",
        "busy time by group of operators, all stages and replicas together", shown=("comparison",)),
)
# fmt: on

SERVING = (*_RATES, *_USE, *_COST, *_TIME)
# What `RunTotals` defines, by name.
RATES = {metric.name: metric.formula for metric in SERVING if metric.formula is not None}


def rates_of(totals: RunTotals, *names: str) -> dict[str, Any]:
    """Return the named rates of a run, of a part of it or of a class, by name."""
    return {name: RATES[name](totals) for name in names}
