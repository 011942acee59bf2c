"""The sections of a page about a serving deployment under one or more loads."""

from collections.abc import Sequence

from foretoken.domain.metrics.metric import STATISTICS
from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.metrics.registry import METRICS, list_figures, shown_at
from foretoken.domain.metrics.request import LIMITED
from foretoken.domain.metrics.serving import describe_load
from foretoken.domain.results.report import ServingReport, describe_shares
from foretoken.domain.units import MS_PER_S
from foretoken.page.figure import BLUE, GREEN, GREY, ORANGE, VERMILION
from foretoken.page.section import DataTable, Fact, Picture, Section
from foretoken.simulator.report import serving_detail as detail
from foretoken.simulator.report.echo_section import with_echo
from foretoken.simulator.report.palette import color_of_group, label_of_group
from foretoken.simulator.report.plots import Panel, Series, draw_panels, draw_stacked_rows
from foretoken.simulator.report.provenance import (
    configuration_section,
    provenance_picture,
)
from foretoken.simulator.report.serving_cluster import cluster_sections

_LOAD_LABEL = "offered load (requests/s)"
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
        sections.append(detail.refusals(ordered))
    if served:
        labels = [describe_load(report) for report in served]
        sections += [_totals(served, labels), *_details(served), *_heaviest(served[-1])]
    if notes := dict.fromkeys(note for report in ordered for note in report.notes):
        rows = [(note,) for note in notes]
        table = DataTable(headers=("what to know of this result",), rows=rows, text_columns=(0,))
        sections.append(Section(title="Remarks", table=table))
    if ordered:
        sections.append(configuration_section(ordered[-1].scenario_json))
    return with_echo(sections, *(report.echo for report in reports))


def _details(served: Sequence[ServingReport]) -> list[Section]:
    sections = []
    if any(report.classes for report in served):
        sections.append(detail.classes(served))
    if any(report.num_refused_by_reason for report in served):
        sections.append(detail.refusals(served))
    return [*sections, detail.distributions(served), _time(served)]


def _heaviest(report: ServingReport) -> list[Section]:
    sections = [_percentiles(report, describe_load(report))]
    if len(report.series.start_s):
        sections.append(detail.timeline(report))
    if report.batch_size_histogram.shares:
        sections.append(detail.batches(report))
    sections += cluster_sections(report, describe_load(report))
    if report.memory:
        sections.append(detail.memory(report))
    if report.engines:
        sections.append(detail.engines(report))
    return sections


def _overview(reports: Sequence[ServingReport]) -> Section:
    refused = [report for report in reports if not report.feasibility.is_feasible]
    served = [report for report in reports if report.num_completed > 0]
    warning = ""
    if refused:
        warning = f"This deployment cannot run: {refused[0].feasibility.reason}."
    if not served:
        warning = warning or "No request could be served."
        return Section(title="Serving", warning=warning)
    best = max(served, key=lambda report: (report.goodput_rps, report.request_throughput_rps))
    busiest = max(served, key=lambda report: report.output_throughput_tps)
    low, high = best.step_time_low_ratio - 1, best.step_time_high_ratio - 1
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
            Fact(
                label=METRICS["goodput_rps"].title,
                value=f"{format_number(best.goodput_rps)}",
                note=f"{best.slo_attainment_ratio:.0%} of requests meet the SLO",
            ),
            *(
                Fact(
                    label=f"{metric.label} p99",
                    value=f"{format_number(metric.value(best).p99)} {metric.unit}",
                    note=f"median {format_number(metric.value(best).p50)} {metric.unit}",
                )
                for metric in (LIMITED[name] for name in ("ttft_ms", "itl_ms", "tpot_ms"))
            ),
            Fact(
                label=f"most {METRICS['output_throughput_tps'].label}",
                value=f"{format_number(busiest.output_throughput_tps)}",
                note=f"at {describe_load(busiest)}; "
                f"{format_number(busiest.output_throughput_tps_per_gpu)} per GPU",
            ),
            Fact(
                label=METRICS["utilization_ratio"].label,
                value=f"{best.utilization_ratio:.0%}",
                note=f"MFU {best.mfu_ratio:.1%}, MBU {best.mbu_ratio:.1%}",
            ),
            *_price_facts(best),
        ),
    )


def _price_facts(report: ServingReport) -> list[Fact]:
    facts = []
    if report.cost_usd > 0:
        facts.append(
            Fact(
                label="cost",
                value=f"{format_number(report.usd_per_million_output_tokens)} USD",
                note="a million output tokens; "
                f"{format_number(report.usd_per_million_tokens)} of all tokens",
            )
        )
    if report.power_w_mean > 0:
        facts.append(
            Fact(
                label=METRICS["energy_j_per_output_token"].label,
                value=f"{format_number(report.energy_j_per_output_token)} J",
                note=f"{format_number(report.power_w_mean)} W on average, all devices",
            )
        )
    return facts


def _totals(reports: Sequence[ServingReport], labels: Sequence[str]) -> Section:
    """Return one figure a row, one load a column; prices only where there are any."""
    figures = list_figures("page", reports)
    return Section(
        title="Numbers",
        intro=(
            "Rates count from the first arrival to the last completion. Steady leaves out the "
            "first and the last tenth of the arrivals' span."
        ),
        table=DataTable(
            headers=("at load", *labels),
            rows=[(figure.title, *figure.texts()) for figure in figures],
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
        table=DataTable(headers=("", *STATISTICS), rows=rows),
    )


def _latency_by_load(reports: Sequence[ServingReport]) -> Section:
    loads = [report.offered_rps for report in reports]
    panels = [
        Panel(
            title=metric.label,
            x_label=_LOAD_LABEL,
            y_label=metric.unit,
            x=loads,
            series=[
                Series(
                    label=percentile,
                    color=color,
                    values=[metric.statistic(metric.value(r), percentile) for r in reports],
                )
                for percentile, color in _PERCENTILES
            ],
            may_be_log=True,
        )
        for metric in _LATENCIES
    ]
    return Section(
        title="Latency against load",
        pictures=(
            Picture(
                svg=draw_panels("latency", panels),
                caption=(
                    "Time to first token counts from arrival, queueing included. An axis is "
                    "logarithmic where its values span more than a factor of 40."
                ),
            ),
        ),
    )


def _throughput_by_load(reports: Sequence[ServingReport]) -> Section:
    loads = [report.offered_rps for report in reports]
    requests = Panel(
        title="Requests",
        x_label=_LOAD_LABEL,
        y_label="requests/s",
        x=loads,
        series=[
            Series(label="offered", values=loads, color=GREY, is_dashed=True),
            Series(
                label="completed", values=[r.request_throughput_rps for r in reports], color=BLUE
            ),
            Series(label="within the SLO", values=[r.goodput_rps for r in reports], color=GREEN),
        ],
    )
    tokens = Panel(
        title="Output tokens of all devices",
        x_label=_LOAD_LABEL,
        y_label="tokens/s",
        x=loads,
        series=[
            Series(
                label="all devices", values=[r.output_throughput_tps for r in reports], color=BLUE
            ),
        ],
    )
    return Section(
        title="Throughput and goodput",
        pictures=(
            Picture(
                svg=draw_panels("throughput", [requests, tokens]),
                caption=(
                    "Where completed falls below offered, the queue grows for as long as the load "
                    "lasts."
                ),
            ),
        ),
    )


def _time(reports: Sequence[ServingReport]) -> Section:
    rows = {
        describe_load(report): {
            label_of_group(group): time_s * MS_PER_S / report.num_serving_steps
            for group, time_s in report.step_time_s_by_group.items()
        }
        for report in reports
        if report.num_serving_steps
    }
    totals = {
        group: sum(report.step_time_s_by_group.get(group, 0.0) for report in reports)
        for report in reports
        for group in report.step_time_s_by_group
    }
    ranked = sorted(totals, key=lambda group: -totals[group])
    colors = {label_of_group(group): color_of_group(group) for group in ranked}
    return Section(
        title="Where the time goes",
        pictures=(
            Picture(
                svg=draw_stacked_rows("time", "Mean serving step", "time (ms)", rows, colors),
                caption="The mean step at each load, by what its operators do.",
            ),
            provenance_picture(
                "provenance",
                {describe_load(r): r.step_time_ratio_by_provenance for r in reports},
            ),
        ),
    )
