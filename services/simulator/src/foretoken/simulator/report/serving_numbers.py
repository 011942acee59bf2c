"""The table of a serving page: every figure of every load."""

from collections.abc import Callable, Sequence

from foretoken.domain.number_text import format_number
from foretoken.domain.report import ServingReport
from foretoken.domain.units import MS_PER_S
from foretoken.page.section import DataTable, Section

_Cell = Callable[[ServingReport], str]

# (row, name of the percentiles, of the unit)
_PERCENTILES = (
    ("TTFT (ms)", "ttft_ms", 1.0),
    ("TTFT from queued (ms)", "ttft_queued_ms", 1.0),
    ("ITL (ms)", "itl_ms", 1.0),
    ("TPOT (ms)", "tpot_ms", 1.0),
    ("end-to-end latency (s)", "e2e_latency_ms", MS_PER_S),
    ("end-to-end per output token (ms)", "e2e_latency_ms_per_token", 1.0),
    ("queueing (ms)", "queueing_ms", 1.0),
    ("prefill, schedule to first token (ms)", "prefill_ms", 1.0),
    ("decode, first to last token (s)", "decode_ms", MS_PER_S),
    ("in running steps (s)", "execution_ms", MS_PER_S),
    ("preempted or passed over (ms)", "preempted_ms", 1.0),
    ("KV transfer (ms)", "transfer_ms", 1.0),
    ("step (ms)", "step_ms", 1.0),
    ("requests in a step", "batch_size", 1.0),
    ("tokens in a step", "batch_tokens", 1.0),
    ("running requests", "running", 1.0),
    ("waiting requests", "waiting", 1.0),
)
_STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")


def _number(name: str) -> _Cell:
    return lambda report: format_number(getattr(report, name))


def _count(name: str) -> _Cell:
    return lambda report: f"{getattr(report, name):,}"


def _ratio(name: str) -> _Cell:
    return lambda report: f"{getattr(report, name):.1%}"


_TOTALS: Sequence[tuple[str, _Cell]] = (
    ("requests", _count("num_requests")),
    ("completed", _count("num_completed")),
    ("duration (s)", _number("duration_s")),
    ("completed requests/s", _number("request_throughput_rps")),
    ("goodput (requests/s)", _number("goodput_rps")),
    ("SLO met", _ratio("slo_attainment_ratio")),
    ("prompt tokens/s", _number("input_throughput_tps")),
    ("output tokens/s", _number("output_throughput_tps")),
    ("output tokens/s per device", _number("output_throughput_tps_per_gpu")),
    ("output tokens/s, steady", lambda r: format_number(r.steady.output_throughput_tps)),
    ("TTFT p50, steady (ms)", lambda r: format_number(r.steady.ttft_ms.p50)),
    ("devices busy", _ratio("utilization_ratio")),
    ("MFU", _ratio("mfu_ratio")),
    ("MBU", _ratio("mbu_ratio")),
    ("KV in use, mean", _ratio("kv_utilization_ratio_mean")),
    ("KV in use, max", _ratio("kv_utilization_ratio_max")),
    ("prefix cache hits", _ratio("prefix_cache_hit_ratio")),
    ("preemptions", _count("num_preemptions")),
    ("steps", _count("num_serving_steps")),
    (
        "step time interval",
        lambda r: f"{r.step_time_low_ratio:.2f} to {r.step_time_high_ratio:.2f} x",
    ),
)
_CLUSTER: Sequence[tuple[str, _Cell]] = (
    ("replicas, mean", lambda r: format_number(sum(p.running_engines_mean for p in r.pools))),
    ("replica failures", lambda r: f"{sum(p.num_failures for p in r.pools):,}"),
    ("requests begun anew", _count("num_retries")),
)
_TRANSFERS: Sequence[tuple[str, _Cell]] = (
    ("KV transfer p50 (ms)", lambda r: format_number(r.transfer_ms.p50)),
    ("KV transfer p99 (ms)", lambda r: format_number(r.transfer_ms.p99)),
)
_PRICES: Sequence[tuple[str, str, _Cell]] = (
    ("cost_usd", "USD per million output tokens", _number("usd_per_million_output_tokens")),
    ("cost_usd", "USD per million tokens", _number("usd_per_million_tokens")),
    ("power_w_mean", "mean power (W)", _number("power_w_mean")),
    ("power_w_mean", "energy (Wh)", _number("energy_wh")),
    ("power_w_mean", "J per output token", _number("energy_j_per_output_token")),
)


def totals(reports: Sequence[ServingReport], labels: Sequence[str]) -> Section:
    """Return one figure a row, one load a column; prices only where there are any."""
    rows = [(title, *(cell(report) for report in reports)) for title, cell in _TOTALS]
    if any(report.pools for report in reports):
        rows += [(title, *(cell(report) for report in reports)) for title, cell in _CLUSTER]
    if any(_moves_caches(report) for report in reports):
        rows += [(title, *(cell(report) for report in reports)) for title, cell in _TRANSFERS]
    if any(report.tokens_per_decode_mean != 1 for report in reports):
        decoded = (format_number(report.tokens_per_decode_mean) for report in reports)
        rows.append(("tokens of a decoding request in a step", *decoded))
    rows += [
        (title, *(cell(report) for report in reports))
        for name, title, cell in _PRICES
        if any(getattr(report, name) > 0 for report in reports)
    ]
    return Section(
        title="Numbers",
        intro=(
            "Rates count from the first arrival to the last completion. Steady leaves out the "
            "first and the last tenth of the arrivals' span."
        ),
        table=DataTable(headers=("at load", *labels), rows=rows),
    )


def percentiles(report: ServingReport, label: str) -> Section:
    """Return the summaries of all distributions at one load."""
    rows = []
    for title, name, scale in _PERCENTILES:
        summary = getattr(report, name)
        if name == "transfer_ms" and not _moves_caches(report):
            continue
        values = [getattr(summary, statistic) / scale for statistic in _STATISTICS]
        rows.append((title, *(format_number(value) for value in values)))
    return Section(
        title="Percentiles",
        intro=(
            f"At {label}. ITL counts every token once, TPOT every request; running and waiting "
            "requests are of a replica and over time, while it works."
        ),
        table=DataTable(headers=("", *_STATISTICS), rows=rows),
    )


def _moves_caches(report: ServingReport) -> bool:
    """Whether requests are prefilled in one pool and decoded in another."""
    return any(pool.role == "prefill" for pool in report.pools)
