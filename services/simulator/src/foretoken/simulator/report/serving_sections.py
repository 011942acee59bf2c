"""The sections of a page about a serving deployment under one or more loads."""

from collections.abc import Mapping, Sequence

from foretoken.domain.metrics.metric import STATISTICS
from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.metrics.registry import METRICS, list_figures, shown_at
from foretoken.domain.metrics.request import LIMITED
from foretoken.domain.metrics.serving import describe_load
from foretoken.domain.results.report import ServingReport, describe_shares
from foretoken.domain.units import MS_PER_S
from foretoken.page.block import Column, Table, Value
from foretoken.page.chart import BLUE, GREEN, GREY, LOG_CAPTION, ORANGE, SERIES, VERMILION, Plot
from foretoken.page.curve import Curve, draw_curves
from foretoken.page.section import Section
from foretoken.simulator.report import serving_detail as detail
from foretoken.simulator.report.palette import colors_of_loads, groups_chart, provenance_chart
from foretoken.simulator.report.question import configuration_section, refusal, remark_sections
from foretoken.simulator.report.serving_cluster import cluster_sections
from foretoken.simulator.report.serving_timeline import timeline, waterfall

_LOAD = Column(title="offered load (requests/s)", name="offered_rps")
_LATENCIES = tuple(LIMITED[name].on_page() for name in ("ttft_ms", "itl_ms", "e2e_latency_ms"))
_PERCENTILES = (("p50", BLUE), ("p90", ORANGE), ("p99", VERMILION))


def serving_sections(reports: Sequence[ServingReport]) -> list[Section]:
    """Return what a page says of one deployment under one or more loads, in order of load.

    What one load is enough for is shown of the heaviest.
    """
    ordered = sorted(reports, key=lambda report: report.offered_rps)
    sections = [_overview(ordered)]
    served = [report for report in ordered if report.num_completed > 0]
    if len(served) > 1:
        sections += [_latency_by_load(served), _throughput_by_load(served)]
    if not served and any(report.num_refused_by_reason for report in ordered):
        sections.append(detail.refusals(_by_load(ordered), "load"))
    if served:
        loads = _by_load(served)
        figures = list_figures("page", served)
        totals = Section(
            title="Numbers",
            intro=(
                "Rates count from the first arrival to the last completion. Steady leaves out the "
                "first and the last tenth of the arrivals' span."
            ),
            table=Table.listed(
                headers=("at load", *loads),
                rows=[(figure.title, *figure.texts()) for figure in figures],
            ),
        )
        sections += [totals, *_details(loads, "load"), *_heaviest(served[-1])]
    sections += remark_sections([note for report in ordered for note in report.notes])
    if ordered:
        sections.append(configuration_section(ordered[-1].scenario_json))
    return sections


def serving_charts(reports: Mapping[str, ServingReport]) -> list[Section]:
    """Return what several deployments did, by label: latencies, over time, where steps spend it."""
    served = {label: report for label, report in reports.items() if report.num_completed}
    if not served:
        return []
    sections = _details(served, "run")
    timed = {label: report for label, report in served.items() if len(report.series.start_s)}
    return [*sections, timeline(timed)] if timed else sections


def _by_load(reports: Sequence[ServingReport]) -> Mapping[str, ServingReport]:
    return {describe_load(report): report for report in reports}


def _details(reports: Mapping[str, ServingReport], what: str) -> list[Section]:
    sections = []
    if any(report.classes for report in reports.values()):
        sections.append(detail.classes(reports, what))
    if any(report.num_refused_by_reason for report in reports.values()):
        sections.append(detail.refusals(reports, what))
    colors = colors_of_loads(len(reports)) if what == "load" else SERIES[: len(reports)]
    return [*sections, detail.distributions(reports, colors), _time(reports, what)]


def _heaviest(report: ServingReport) -> list[Section]:
    load = describe_load(report)
    sections = [_percentiles(report, load)]
    if len(report.series.start_s):
        sections.append(timeline({"": report}))
    sections += waterfall(report)
    if report.batch_size_histogram.shares:
        sections.append(detail.batches(report))
    sections += cluster_sections(report, load)
    if report.memory:
        sections.append(detail.memory(report))
    if report.engines:
        sections.append(detail.engines(report))
    return sections


def _overview(reports: Sequence[ServingReport]) -> Section:
    served = [report for report in reports if report.num_completed > 0]
    warning = refusal("deployment cannot run", *(report.feasibility for report in reports))
    if not served:
        return Section(title="Serving", warning=warning or "No request could be served.")
    best = max(served, key=lambda report: (report.goodput_rps, report.request_throughput_rps))
    busiest = max(served, key=lambda report: report.output_throughput_tps)
    low, high = best.step_time_low_ratio - 1, best.step_time_high_ratio - 1
    whole = f"{format_number(best.usd_per_million_tokens)} of all tokens"
    power = f"{format_number(best.power_w_mean)} W on average, all devices"
    return Section(
        title="Serving",
        warning=warning,
        intro=(
            f"{len(served)} simulated load{'s' if len(served) > 1 else ''}. The figures below are "
            f"those of the load with the highest goodput, {describe_load(best)}. Its step "
            f"times rest on {describe_shares(best.step_time_ratio_by_provenance)} estimates; with "
            "every operator at its lower or upper 90 % bound they change by "
            f"{low:+.0%} to {high:+.0%}."
        ),
        facts=(
            Value.of(
                "goodput_rps", best, f"{best.slo_attainment_ratio:.0%} of requests meet the SLO"
            ),
            *(
                Value(
                    label=f"{metric.label} p99",
                    value=metric.value(best).p99,
                    unit=metric.unit,
                    note=f"median {format_number(metric.value(best).p50)} {metric.unit}",
                )
                for metric in (LIMITED[name] for name in ("ttft_ms", "itl_ms", "tpot_ms"))
            ),
            Value.of(
                "output_throughput_tps",
                busiest,
                f"at {describe_load(busiest)}; "
                f"{format_number(busiest.output_throughput_tps_per_gpu)} per GPU",
                label=f"most {METRICS['output_throughput_tps'].label}",
            ),
            Value.of(
                "utilization_ratio", best, f"MFU {best.mfu_ratio:.1%}, MBU {best.mbu_ratio:.1%}"
            ),
            *(
                Value.of(name, best, note)
                for name, is_known, note in (
                    ("usd_per_million_output_tokens", best.cost_usd, whole),
                    ("energy_j_per_output_token", best.power_w_mean, power),
                )
                if is_known > 0
            ),
        ),
    )


def _percentiles(report: ServingReport, label: str) -> Section:
    """Return the summaries of all distributions at one load."""
    metrics = [metric.on_page() for metric in shown_at("percentiles", report)]
    rows = [
        (metric.title, *(metric.text(metric.statistic(summary, name)) for name in STATISTICS))
        for metric in metrics
        if (summary := metric.value(report)).max != metric.neutral
    ]
    return Section(
        title="Percentiles",
        intro=(
            f"At {label}. ITL counts every token once, TPOT every request; running and waiting "
            "requests are of a replica and over time, while it works."
        ),
        table=Table.listed(headers=("", *STATISTICS), rows=rows),
    )


def _latency_by_load(reports: Sequence[ServingReport]) -> Section:
    loads = [report.offered_rps for report in reports]
    caption = f"Time to first token counts from arrival, queueing included. {LOG_CAPTION}"
    charts = [
        draw_curves(
            Plot(title=f"{metric.label} against load", caption=caption),
            [
                Curve(
                    label=percentile,
                    color=color,
                    x=loads,
                    y=[metric.statistic(metric.value(r), percentile) for r in reports],
                )
                for percentile, color in _PERCENTILES
            ],
            x=_LOAD,
            y=Column.of(metric),
        )
        for metric in _LATENCIES
    ]
    return Section(title="Latency against load", pictures=charts)


def _throughput_by_load(reports: Sequence[ServingReport]) -> Section:
    loads = [report.offered_rps for report in reports]
    completed = [report.request_throughput_rps for report in reports]
    tokens = METRICS["output_throughput_tps"]
    caption = "Where completed falls below offered, the queue grows for as long as the load lasts."
    requests = draw_curves(
        Plot(title="Requests", caption=caption),
        [
            Curve(label="offered", x=loads, y=loads, color=GREY, is_dashed=True),
            Curve(label="completed", x=loads, y=completed, color=BLUE),
            Curve(label="within the SLO", x=loads, y=[r.goodput_rps for r in reports], color=GREEN),
        ],
        x=_LOAD,
        y=Column(title="requests/s"),
    )
    output = draw_curves(
        Plot(title="Output tokens of all devices"),
        [Curve(label="all devices", x=loads, y=[tokens.value(report) for report in reports])],
        x=_LOAD,
        y=Column.of(tokens),
    )
    return Section(title="Throughput and goodput", pictures=(requests, output))


def _time(reports: Mapping[str, ServingReport], what: str) -> Section:
    steps_ms = {
        label: {
            group: time_s * MS_PER_S / report.num_serving_steps
            for group, time_s in report.step_time_s_by_group.items()
        }
        for label, report in reports.items()
        if report.num_serving_steps
    }
    caption = f"The mean step of each {what}, by what its operators do."
    time_ms = Column(title="time (ms)", name="time_ms")
    pictures = [groups_chart("Mean serving step", steps_ms, time_ms, caption)]
    times_s = {label: report.step_time_s_by_group for label, report in reports.items()}
    if len(reports) > 1:
        caption = "What the engines were busy with, by what operators do."
        whole = Column(title="time (s)", name="time_s")
        pictures.append(groups_chart("All steps of all engines", times_s, whole, caption))
    shares = {label: report.step_time_ratio_by_provenance for label, report in reports.items()}
    return Section(title="Where the time goes", pictures=[*pictures, provenance_chart(shares)])
