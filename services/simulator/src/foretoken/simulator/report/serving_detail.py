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
    REFUSALS,
    ClassReport,
    Histogram,
    ServingReport,
)
from foretoken.domain.units import GIB, MS_PER_S
from foretoken.page.block import Cell, Chart, Column, Table
from foretoken.page.chart import LOG_CAPTION, Plot, Rule
from foretoken.page.curve import Curve, draw_curves, draw_parts
from foretoken.page.section import Section
from foretoken.simulator.report.palette import OF_SERVING_MEMORY
from foretoken.simulator.serving.metrics import instants_of_columns, measure

# Runs by their loads, or by what else distinguishes them.
Reports = Mapping[str, ServingReport]


def distributions(reports: Reports, colors: Sequence[str]) -> Section:
    """Return the shares of requests at or below a latency, a line for each report and its colour.

    An objective is marked where all have it.
    """
    charts = []
    caption = (
        f"The share at or below a time; further left is better. {LOG_CAPTION} A dashed line is the"
        " objective of requests without a class."
    )
    slos = [json.loads(r.scenario_json or "{}").get("slo", {}) for r in reports.values()]
    for metric in (metric.on_page() for metric in LIMITED.values()):
        curves = [
            Curve(label=label, x=values, y=[p / 100 for p in ITL_QUANTILES], color=color)
            for (label, report), color in zip(reports.items(), colors, strict=True)
            if (values := _latency_quantiles(report, metric))
        ]
        limits = {slo.get(metric.name) or 0.0 for slo in slos}
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


def batches(report: ServingReport) -> Section:
    """Return how large the steps of a run are."""
    size, step = report.batch_size, report.step_ms
    return Section(
        title="Steps",
        intro=(
            f"At {describe_load(report)}: {report.num_serving_steps:,} steps of "
            f"{format_number(size.mean)} requests and {format_number(report.batch_tokens.mean)} "
            f"tokens on average. A step takes {format_number(step.p50)} ms in the median and "
            f"{format_number(step.p99)} ms at the 99th percentile, all stages together."
        ),
        pictures=[
            _histogram("Batch size", "requests in a step", report.batch_size_histogram),
            _histogram("Tokens", "tokens in a step", report.batch_tokens_histogram),
        ],
    )


def _histogram(title: str, label: str, histogram: Histogram) -> Chart:
    ranges = [
        # Whole numbers from an edge to before the next.
        f"{low:,.0f}" if high - low <= 1 else f"{low:,.0f} to {high - 1:,.0f}"
        for low, high in pairwise(histogram.edges)
    ]
    columns = (
        Column.words(label, "size").part(0),
        Column(title="share of steps", unit=SHARE).part(1),
    )
    table = Table.of(zip(ranges, histogram.shares, strict=True), *columns)
    caption = "How many steps are of which size."
    plot = Plot(title=title, table=table, x="size", y="share_of_steps", caption=caption, height=180)
    return plot.histogram()


def memory(report: ServingReport) -> Section:
    """Return what occupies a device of each stage."""
    fields = ("weights", "kv", "activations", "graphs", "reserved")
    parts = dict(zip(OF_SERVING_MEMORY, fields, strict=True))
    rows = {
        f"{stage.pool} stage {stage.stage}".strip(): {
            name: getattr(stage, f"{part}_bytes") / GIB for name, part in parts.items()
        }
        for stage in report.memory
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


def classes(reports: Reports, what: str) -> Section:
    """Return how the classes of requests fared; `what` the labels of reports are, `load`."""
    metrics = (LIMITED[name].on_page() for name in ("ttft_ms", "tpot_ms", "e2e_latency_ms"))
    columns = (
        Column.words("class", read=lambda item: item.name or "no class"),
        Column(title="requests", name="num_requests"),
        Column(title=METRICS["slo_attainment_ratio"].label, read=_attainment),
        Column.of("goodput_rps"),
        *(_pair(metric) for metric in metrics),
    )
    found = [(label, item) for label, report in reports.items() for item in report.classes]
    table = Table.of(found, Column.words(what).part(0), *(column.part(1) for column in columns))
    return Section(title="Classes", table=table)


def _attainment(item: ClassReport) -> str | Cell:
    if not item.is_limited:
        return "no limits"
    text = f"{item.slo_attainment_ratio:.0%}"
    return Cell(value=text, tone="alert") if item.slo_attainment_ratio < _LOW_ATTAINMENT else text


def _pair(metric: Metric) -> Column:
    """Return the column of a summary's median and its 99th percentile."""

    def read(item: ClassReport) -> str:
        summary = metric.value(item)
        return " / ".join(metric.text(metric.statistic(summary, name)) for name in ("p50", "p99"))

    title = title_of(f"{metric.label} p50 / p99", metric.unit)
    return Column(title=title, name=metric.name, read=read)


# A class that meets its objectives less often stands out.
_LOW_ATTAINMENT = 0.9


def refusals(reports: Reports, what: str) -> Section:
    """Return which requests the engines would not take, and why."""
    rows = [
        (label, count, f"{count / report.num_requests:.1%}", REFUSALS.get(reason, reason))
        for label, report in reports.items()
        for reason, count in report.num_refused_by_reason.items()
    ]
    return Section(
        title="Requests that were not served",
        intro="They count as requests that miss their objectives.",
        table=Table.listed((what, "requests", "share", "reason"), rows, (3,)),
    )


def engines(report: ServingReport) -> Section:
    """Return how much of each pipeline stage of each replica was used."""
    table = Table.of(
        [(engine, stage) for engine in report.engines for stage in engine.stages],
        Column.words(
            "replica and stage",
            read=lambda of: f"{of[0].pool} {of[0].engine}, stage {of[1].stage}".strip(),
        ),
        *(Column.of(name).part(0) for name in ("num_requests", "num_serving_steps")),
        Column.of("num_preemptions").part(0),
        *(Column.of(name).part(1) for name in ("utilization_ratio", "mfu_ratio", "mbu_ratio")),
        Column(
            title=f"{METRICS['kv_utilization_ratio_mean'].label} / max",
            read=lambda engine: (
                f"{engine.kv_utilization_ratio_mean:.0%} / {engine.kv_utilization_ratio_max:.0%}"
            ),
        ).part(0),
    )
    return Section(
        title="Devices",
        intro=(
            f"At {describe_load(report)}. Utilization is the share of time with work on the GPU; "
            "MFU and MBU are the FLOPs and the memory traffic that the requests needed, over what "
            "the device could do in the time that it was held."
        ),
        table=table,
    )
