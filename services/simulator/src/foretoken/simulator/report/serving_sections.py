"""The sections of a page about a serving deployment under one or more loads."""

from collections.abc import Sequence

from foretoken.domain.number_text import format_number
from foretoken.domain.report import ServingReport, describe_shares
from foretoken.domain.units import MS_PER_S
from foretoken.page.figure import BLUE, GREEN, GREY, ORANGE, VERMILION
from foretoken.page.section import DataTable, Fact, Picture, Section
from foretoken.simulator.report import serving_detail as detail
from foretoken.simulator.report import serving_numbers as numbers
from foretoken.simulator.report.echo_section import with_echo
from foretoken.simulator.report.palette import color_of_group, label_of_group
from foretoken.simulator.report.plots import Panel, Series, draw_panels, draw_stacked_rows
from foretoken.simulator.report.provenance import (
    configuration_section,
    provenance_picture,
)
from foretoken.simulator.report.serving_cluster import cluster_sections

_LOAD_LABEL = "offered load (requests/s)"
_LATENCIES = (
    ("Time to first token", "ttft_ms", "ms", 1.0),
    ("Inter-token latency", "itl_ms", "ms", 1.0),
    ("End-to-end latency", "e2e_latency_ms", "s", MS_PER_S),
)
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
        labels = [detail.label_load(report) for report in served]
        sections += [numbers.totals(served, labels), *_details(served), *_heaviest(served[-1])]
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
    sections = [numbers.percentiles(report, detail.label_load(report))]
    if len(report.series.start_s):
        sections.append(detail.timeline(report))
    if report.batch_size_histogram.shares:
        sections.append(detail.batches(report))
    sections += cluster_sections(report, detail.label_load(report))
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
            f"those of the load with the highest goodput, {detail.label_load(best)}. Its step "
            f"times rest on {describe_shares(best.step_time_ratio_by_provenance)} estimates; with "
            "every operator at its lower or upper 90 % bound they change by "
            f"{low:+.0%} to {high:+.0%}."
        ),
        facts=(
            Fact(
                label="goodput, requests/s",
                value=f"{format_number(best.goodput_rps)}",
                note=f"{best.slo_attainment_ratio:.0%} of requests meet the SLO",
            ),
            Fact(
                label="time to first token, p99",
                value=f"{format_number(best.ttft_ms.p99)} ms",
                note=f"median {format_number(best.ttft_ms.p50)} ms",
            ),
            Fact(
                label="inter-token latency, p99",
                value=f"{format_number(best.itl_ms.p99)} ms",
                note=f"median {format_number(best.itl_ms.p50)} ms",
            ),
            Fact(
                label="time per output token, p99",
                value=f"{format_number(best.tpot_ms.p99)} ms",
                note=f"median {format_number(best.tpot_ms.p50)} ms",
            ),
            Fact(
                label="most output, tokens/s",
                value=f"{format_number(busiest.output_throughput_tps)}",
                note=f"at {detail.label_load(busiest)}; "
                f"{format_number(busiest.output_throughput_tps_per_gpu)} per device",
            ),
            Fact(
                label="devices busy",
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
                label="energy per output token",
                value=f"{format_number(report.energy_j_per_output_token)} J",
                note=f"{format_number(report.power_w_mean)} W on average, all devices",
            )
        )
    return facts


def _latency_by_load(reports: Sequence[ServingReport]) -> Section:
    loads = [report.offered_rps for report in reports]
    panels = [
        Panel(
            title=title,
            x_label=_LOAD_LABEL,
            y_label=unit,
            x=loads,
            series=[
                Series(
                    label=percentile,
                    color=color,
                    values=[getattr(getattr(r, name), percentile) / scale for r in reports],
                )
                for percentile, color in _PERCENTILES
            ],
            may_be_log=True,
        )
        for title, name, unit, scale in _LATENCIES
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
        detail.label_load(report): {
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
                {detail.label_load(r): r.step_time_ratio_by_provenance for r in reports},
            ),
        ),
    )
