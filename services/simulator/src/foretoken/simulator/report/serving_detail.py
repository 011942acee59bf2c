"""The sections of a serving page beyond one figure per load: distributions, time line, memory."""

import json
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.metrics.metric import Metric, title_of
from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.metrics.request import LIMITED
from foretoken.domain.metrics.serving import describe_load
from foretoken.domain.results.report import (
    ITL_QUANTILES,
    ClassReport,
    Percentiles,
    SeriesColumns,
    ServingReport,
    ServingStageMemory,
)
from foretoken.domain.units import GIB, MS_PER_S
from foretoken.page.figure import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION
from foretoken.page.section import Cell, DataTable, Picture, Section
from foretoken.simulator.report.palette import OF_SERVING_MEMORY, colors_of_loads
from foretoken.simulator.report.plots import Series, draw_stacked_rows
from foretoken.simulator.report.serving_plots import (
    Bars,
    CumulativePanel,
    Track,
    draw_cumulative_panels,
    draw_histograms,
    draw_tracks,
)
from foretoken.simulator.serving.metrics import instants_of_columns, measure

Floats = NDArray[np.float64]

# A picture of more steps shows no more and makes the page large.
_MAX_INTERVALS = 600
# Latencies that have a picture of their distribution.
DISTRIBUTIONS = tuple(metric.on_page() for metric in LIMITED.values())
_REFUSALS = {
    "context_too_long": "prompt and answer are longer than the model's context",
    "exceeds_kv_cache": "prompt and answer are larger than the whole KV cache",
    "rejected": "every replica was full, and so was the queue before them",
    "lost": "their replicas failed, more often than a request may begin anew",
}


def distributions(reports: Sequence[ServingReport]) -> Section:
    """Return the cumulative distributions of the latencies, with the objectives that all share."""
    panels = []
    for metric in DISTRIBUTIONS:
        lines = [
            Series(label=describe_load(report), color=color, values=values)
            for report, color in zip(reports, colors_of_loads(len(reports)), strict=True)
            if (values := latency_quantiles(report, metric))
        ]
        if lines:
            limit_ms = slo_limits(reports[-1]).get(metric.name, 0.0)
            panels.append(
                CumulativePanel(
                    title=metric.label,
                    x_label=metric.unit,
                    percents=ITL_QUANTILES,
                    lines=lines,
                    limits=[(limit_ms / metric.scale, "SLO")] if limit_ms else [],
                )
            )
    caption = (
        "The share at or below a time; further left is better. An axis is logarithmic where its "
        "values span more than a factor of 40. A dashed line is the objective of requests without "
        "a class."
    )
    svg = draw_cumulative_panels("distributions", panels, "offered load") if panels else ""
    return Section(title="Distributions", pictures=[Picture(svg=svg, caption=caption)] * bool(svg))


def latency_quantiles(report: ServingReport, metric: Metric) -> list[float]:
    """Return a latency at `ITL_QUANTILES` in the metric's unit; empty where it is not known."""
    if metric.name == "itl_ms":
        return [metric.in_unit(value) for value in report.itl_ms_quantiles]
    values = measure(metric.name, instants_of_columns(report.requests)) * MS_PER_S / metric.scale
    return np.percentile(values, ITL_QUANTILES).tolist() if len(values) else []


def slo_limits(report: ServingReport) -> Mapping[str, float]:
    """Return the objectives in ms of requests without a class, by latency; 0 is none."""
    scenario = json.loads(report.scenario_json) if report.scenario_json else {}
    return {name: value or 0.0 for name, value in scenario.get("slo", {}).items()}


def timeline(report: ServingReport) -> Section:
    """Return a run second by second."""
    times_s, width_s, columns = thin_series(report.series)
    svg = draw_tracks(
        "timeline",
        describe_load(report),
        [*times_s.tolist(), times_s[-1] + width_s],
        _tracks(report, columns, width_s),
    )
    caption = (
        f"Every step of a curve is {format_number(width_s)} s: sums of what happened in it, means "
        "of what stood. Requests and blocks are those of all replicas."
    )
    return Section(title="Over time", pictures=[Picture(svg=svg, caption=caption)])


def _tracks(
    report: ServingReport, columns: Mapping[str, Floats], width_s: float
) -> Sequence[Track]:
    def line(label: str, name: str, color: str, scale: float = 1.0) -> Series:
        values = (columns[name] / scale).tolist()
        # The last interval is drawn to its end.
        return Series(label=label, color=color, values=[*values, values[-1]])

    tracks = [
        Track(
            y_label="requests/s",
            series=[
                line("arrived", "num_arrivals", GREY, width_s),
                line("completed", "num_completions", BLUE, width_s),
            ],
        ),
        Track(
            y_label="requests",
            series=[
                line("running", "running_mean", GREEN),
                line("waiting", "waiting_mean", VERMILION),
            ],
        ),
        Track(
            y_label="tokens/s",
            series=[
                line("prompts", "num_prefill_tokens", ORANGE, width_s),
                line("output", "num_output_tokens", BLUE, width_s),
            ],
        ),
        Track(y_label="batch size", series=[line("", "batch_size_mean", SKY)], is_area=True),
        Track(
            y_label=METRICS["kv_utilization_ratio"].label,
            series=[line("", "kv_utilization_ratio", PURPLE)],
            is_area=True,
            is_ratio=True,
        ),
        Track(
            y_label=METRICS["utilization_ratio"].label,
            series=[line("", "utilization_ratio", GREEN)],
            is_area=True,
            is_ratio=True,
        ),
    ]
    # Only where there is something to see.
    replicas = columns["replicas_mean"]
    for title, name, color, is_drawn in (
        ("replicas", "replicas_mean", BLUE, replicas.max() > replicas.min()),
        ("power (W)", "power_w", ORANGE, report.power_w_mean > 0),
    ):
        if is_drawn:
            tracks.append(Track(y_label=title, series=[line("", name, color)], is_area=True))
    return tracks


def thin_series(series: SeriesColumns) -> tuple[Floats, float, dict[str, Floats]]:
    """Return a series in intervals that can be drawn: their starts, width in s, and columns."""
    starts = np.asarray(series.start_s, dtype=np.float64)
    width_s = float(starts[1] - starts[0]) if len(starts) > 1 else 1.0
    size = -(-len(starts) // _MAX_INTERVALS)
    firsts = np.arange(0, len(starts), size)
    lengths = np.diff(firsts, append=len(starts))
    columns = {}
    for name in series.__dataclass_fields__:
        sums = np.add.reduceat(np.asarray(getattr(series, name), dtype=np.float64), firsts)
        # Counts are of a whole interval, of which the last may be shorter.
        columns[name] = sums * size / lengths if name.startswith("num_") else sums / lengths
    return starts[firsts], width_s * size, columns


def batches(report: ServingReport) -> Section:
    """Return how large the steps of a run are."""
    histograms = [
        Bars(title=title, x_label=label, edges=histogram.edges, shares=histogram.shares)
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
        pictures=[
            Picture(
                svg=draw_histograms("batches", histograms),
                caption="How many steps are of which size.",
            )
        ],
    )


def memory(report: ServingReport) -> Section:
    """Return what occupies a device of each stage."""
    rows = {
        f"{stage.pool} stage {stage.stage}".strip(): _parts_gib(stage) for stage in report.memory
    }
    sizes_gib = {stage.device_bytes / GIB for stage in report.memory}
    device_gib = max(sizes_gib)
    svg = draw_stacked_rows(
        "memory",
        "Memory of one device",
        "GiB",
        rows,
        OF_SERVING_MEMORY,
        limit=(
            device_gib,
            f"{'largest ' * (len(sizes_gib) > 1)}device: {format_number(device_gib)} GiB",
        ),
    )
    caches = [("a replica", report.num_kv_blocks, report.kv_block_size)]
    if report.pools:
        caches = [
            (f"a replica of {pool.name}", pool.num_kv_blocks, pool.kv_block_size)
            for pool in report.pools
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
        pictures=[
            Picture(
                svg=svg,
                caption="Activations are their peak in the largest step the engine may run.",
            )
        ],
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


def classes(reports: Sequence[ServingReport]) -> Section:
    """Return how the classes of requests fared at each load."""
    headers = (
        "load",
        "class",
        "requests",
        METRICS["slo_attainment_ratio"].label,
        METRICS["goodput_rps"].title,
        *(title_of(f"{metric.label} p50 / p99", metric.unit) for metric in _OF_CLASSES),
    )
    rows = [
        (
            describe_load(report),
            item.name or "no class",
            f"{item.num_requests:,}",
            _attainment(item),
            format_number(item.goodput_rps),
            *(_pair(metric, metric.value(item)) for metric in _OF_CLASSES),
        )
        for report in reports
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
    return Cell(text=text, tone="alert") if item.slo_attainment_ratio < _LOW_ATTAINMENT else text


# A class that meets its objectives less often stands out.
_LOW_ATTAINMENT = 0.9


def refusals(reports: Sequence[ServingReport]) -> Section:
    """Return which requests the engines would not take, and why."""
    rows = [
        (
            describe_load(report),
            f"{count:,}",
            f"{count / report.num_requests:.1%}",
            _REFUSALS.get(reason, reason),
        )
        for report in reports
        for reason, count in report.num_refused_by_reason.items()
    ]
    return Section(
        title="Requests that were not served",
        intro="They count as requests that miss their objectives.",
        table=DataTable(
            headers=("load", "requests", "share", "reason"), rows=rows, text_columns=(3,)
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
