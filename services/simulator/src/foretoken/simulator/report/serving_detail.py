"""The sections of a serving page beyond one figure per load: distributions, steps, memory."""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from foretoken.domain.metrics.metric import SHARE, Metric, title_of
from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.metrics.request import LIMITED
from foretoken.domain.metrics.serving import describe_load
from foretoken.domain.results.report import (
    ITL_QUANTILES,
    ClassReport,
    Histogram,
    Percentiles,
    ServingReport,
    ServingStageMemory,
)
from foretoken.domain.units import GIB, MS_PER_S
from foretoken.page.block import Cell, Chart, Column, Table
from foretoken.page.chart import Plot, Rule
from foretoken.page.curve import Curve, draw_curves, draw_parts
from foretoken.page.section import DataTable, Section
from foretoken.simulator.report.palette import OF_SERVING_MEMORY
from foretoken.simulator.serving.metrics import instants_of_columns, measure

# Runs by their loads, or by what else distinguishes them.
Reports = Mapping[str, ServingReport]

# Latencies that have a picture of their distribution.
DISTRIBUTIONS = tuple(metric.on_page() for metric in LIMITED.values())
_REFUSALS = {
    "context_too_long": "prompt and answer are longer than the model's context",
    "exceeds_kv_cache": "prompt and answer are larger than the whole KV cache",
    "rejected": "every replica was full, and so was the queue before them",
    "lost": "their replicas failed, more often than a request may begin anew",
}


def distributions(reports: Reports, colors: Sequence[str]) -> Section:
    """Return the shares of requests at or below a latency, a line for each report and its colour.

    An objective is marked where all have it.
    """
    charts = []
    caption = (
        "The share at or below a time; further left is better. An axis is logarithmic where its"
        " values span more than a factor of 40. A dashed line is the objective of requests without"
        " a class."
    )
    for metric in DISTRIBUTIONS:
        curves = [
            Curve(label=label, x=values, y=[p / 100 for p in ITL_QUANTILES], color=color)
            for (label, report), color in zip(reports.items(), colors, strict=True)
            if (values := _latency_quantiles(report, metric))
        ]
        limits = {_slo_limits(report).get(metric.name, 0.0) for report in reports.values()}
        # A limit that is not that of all would be read as theirs.
        limit_ms = limits.pop() if len(limits) == 1 else 0.0
        rules = [Rule("x", limit_ms / metric.scale, "SLO")] if limit_ms else []
        if curves:
            title = f"{metric.label}, distribution"
            plot = Plot(title=title, caption=caption, rules=rules, is_near=not rules)
            share = Column(title="share of all", name="share", unit=SHARE)
            charts.append(draw_curves(plot, curves, x=Column.of(metric), y=share))
    return Section(title="Distributions", pictures=charts)


def _latency_quantiles(report: ServingReport, metric: Metric) -> list[float]:
    """Return a latency at `ITL_QUANTILES` in the metric's unit; empty where it is not known."""
    if metric.name == "itl_ms":
        return [metric.in_unit(value) for value in report.itl_ms_quantiles]
    values = measure(metric.name, instants_of_columns(report.requests)) * MS_PER_S / metric.scale
    return np.percentile(values, ITL_QUANTILES).tolist() if len(values) else []


def _slo_limits(report: ServingReport) -> Mapping[str, float]:
    """Return the objectives in ms of requests without a class, by latency; 0 is none."""
    scenario = json.loads(report.scenario_json) if report.scenario_json else {}
    return {name: value or 0.0 for name, value in scenario.get("slo", {}).items()}


def batches(report: ServingReport) -> Section:
    """Return how large the steps of a run are."""
    charts = [
        _histogram(title, label, histogram)
        for title, label, histogram in (
            ("Batch size", "requests in a step", report.batch_size_histogram),
            ("Tokens", "tokens in a step", report.batch_tokens_histogram),
        )
    ]
    size, step = report.batch_size, report.step_ms
    return Section(
        title="Steps",
        intro=(
            f"At {describe_load(report)}: {report.num_serving_steps:,} steps of "
            f"{format_number(size.mean)} requests and {format_number(report.batch_tokens.mean)} "
            f"tokens on average. A step takes {format_number(step.p50)} ms in the median and "
            f"{format_number(step.p99)} ms at the 99th percentile, all stages together."
        ),
        pictures=charts,
    )


def _histogram(title: str, label: str, histogram: Histogram) -> Chart:
    columns = [Column.words(label, "size"), Column(title="share of steps", unit=SHARE)]
    rows = [
        (_describe_range(low, high), share)
        for (low, high), share in zip(pairwise(histogram.edges), histogram.shares, strict=True)
    ]
    table = Table(columns=columns, rows=rows)
    caption = "How many steps are of which size."
    plot = Plot(title=title, table=table, x="size", y="share_of_steps", caption=caption, height=180)
    return plot.histogram()


def _describe_range(low: float, high: float) -> str:
    """Return the whole numbers from an edge to before the next."""
    return f"{low:,.0f}" if high - low <= 1 else f"{low:,.0f} to {high - 1:,.0f}"


def memory(report: ServingReport) -> Section:
    """Return what occupies a device of each stage."""
    rows = {
        f"{stage.pool} stage {stage.stage}".strip(): _parts_gib(stage) for stage in report.memory
    }
    sizes_gib = {stage.device_bytes / GIB for stage in report.memory}
    device_gib = max(sizes_gib)
    limit = f"{'largest ' * (len(sizes_gib) > 1)}device: {format_number(device_gib)} GiB"
    plot = Plot(
        title="Memory of one device",
        caption="Activations are their peak in the largest step the engine may run.",
        colors=OF_SERVING_MEMORY,
        rules=[Rule("x", device_gib, limit)],
    )
    caches = [("a replica", report.num_kv_blocks, report.kv_block_size)]
    if report.pools:
        caches = [
            (f"a replica of {pool.name}", pool.num_kv_blocks, pool.kv_block_size)
            for pool in report.pools
            if pool.role != "encoder"
        ]
    sizes = " ".join(
        f"The KV cache of {what} has {num_blocks:,} blocks of {size} tokens, "
        f"{num_blocks * size:,} in all."
        for what, num_blocks, size in caches
    )
    return Section(
        title="Memory",
        intro=(
            f"{sizes} At {describe_load(report)} "
            f"{report.kv_utilization_ratio_mean:.1%} of them are in use on average, "
            f"{report.kv_utilization_ratio_max:.1%} at most."
        ),
        pictures=[draw_parts(plot, rows, Column(title="GiB"))],
    )


def _parts_gib(stage: ServingStageMemory) -> dict[str, float]:
    return {
        name: getattr(stage, f"{field}_bytes") / GIB
        for name, field in zip(
            OF_SERVING_MEMORY,
            ("weights", "kv", "activations", "graphs", "reserved"),
            strict=True,
        )
    }


_OF_CLASSES = tuple(LIMITED[name].on_page() for name in ("ttft_ms", "tpot_ms", "e2e_latency_ms"))


def classes(reports: Reports, what: str) -> Section:
    """Return how the classes of requests fared; `what` the labels of reports are, `load`."""
    headers = (
        what,
        "class",
        "requests",
        METRICS["slo_attainment_ratio"].label,
        METRICS["goodput_rps"].title,
        *(title_of(f"{metric.label} p50 / p99", metric.unit) for metric in _OF_CLASSES),
    )
    rows = [
        (
            label,
            item.name or "no class",
            f"{item.num_requests:,}",
            _attainment(item),
            format_number(item.goodput_rps),
            *(_pair(metric, metric.value(item)) for metric in _OF_CLASSES),
        )
        for label, report in reports.items()
        for item in report.classes
    ]
    return Section(
        title="Classes",
        table=DataTable(headers=headers, rows=rows, text_columns=(1,)),
    )


def _attainment(item: ClassReport) -> str | Cell:
    if not item.is_limited:
        return "no limits"
    text = f"{item.slo_attainment_ratio:.0%}"
    return Cell(value=text, tone="alert") if item.slo_attainment_ratio < _LOW_ATTAINMENT else text


# A class that meets its objectives less often stands out.
_LOW_ATTAINMENT = 0.9


def refusals(reports: Reports, what: str) -> Section:
    """Return which requests the engines would not take, and why."""
    rows = [
        (
            label,
            f"{count:,}",
            f"{count / report.num_requests:.1%}",
            _REFUSALS.get(reason, reason),
        )
        for label, report in reports.items()
        for reason, count in report.num_refused_by_reason.items()
    ]
    return Section(
        title="Requests that were not served",
        intro="They count as requests that miss their objectives.",
        table=DataTable(
            headers=(what, "requests", "share", "reason"), rows=rows, text_columns=(3,)
        ),
    )


_OF_ENGINES = ("num_requests", "num_serving_steps", "num_preemptions")
_OF_STAGES = ("utilization_ratio", "mfu_ratio", "mbu_ratio")


def engines(report: ServingReport) -> Section:
    """Return how much of each pipeline stage of each replica was used."""
    headers = (
        "replica and stage",
        *(METRICS[name].label for name in _OF_ENGINES),
        *(METRICS[name].label for name in _OF_STAGES),
        f"{METRICS['kv_utilization_ratio_mean'].label} / max",
    )
    rows = [
        (
            f"{engine.pool} {engine.engine}, stage {stage.stage}".strip(),
            *(METRICS[name].text(getattr(engine, name)) for name in _OF_ENGINES),
            *(METRICS[name].text(getattr(stage, name)) for name in _OF_STAGES),
            f"{engine.kv_utilization_ratio_mean:.0%} / {engine.kv_utilization_ratio_max:.0%}",
        )
        for engine in report.engines
        for stage in engine.stages
    ]
    return Section(
        title="Devices",
        intro=(
            f"At {describe_load(report)}. Utilization is the share of time with work on the GPU; "
            "MFU and MBU are the FLOPs and the memory traffic that the requests needed, over what "
            "the device could do in the time that it was held."
        ),
        table=DataTable(headers=headers, rows=rows),
    )


def _pair(metric: Metric, summary: Percentiles) -> str:
    return " / ".join(metric.text(metric.statistic(summary, name)) for name in ("p50", "p99"))
