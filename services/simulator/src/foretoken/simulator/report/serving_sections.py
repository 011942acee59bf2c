"""The sections of a page about a serving deployment under one or more loads."""

from collections.abc import Sequence

from foretoken.domain.report import ServingReport, describe_shares
from foretoken.domain.units import MS_PER_S
from foretoken.page.figure import BLUE, GREEN, GREY, ORANGE, VERMILION
from foretoken.page.section import DataTable, Fact, Picture, Section
from foretoken.simulator.report.palette import color_of_group, colors_of_loads, label_of_group
from foretoken.simulator.report.plots import (
    Panel,
    Series,
    draw_cumulative,
    draw_panels,
    draw_stacked_rows,
    format_number,
)
from foretoken.simulator.report.provenance import (
    configuration_section,
    provenance_picture,
)

_LOAD_LABEL = "offered load (requests/s)"
_LATENCIES = (
    ("Time to first token", "ttft_ms", "ms", 1.0),
    ("Inter-token latency", "itl_ms", "ms", 1.0),
    ("End-to-end latency", "e2e_latency_ms", "s", MS_PER_S),
)
_PERCENTILES = (("p50", BLUE), ("p90", ORANGE), ("p99", VERMILION))


def serving_sections(reports: Sequence[ServingReport]) -> list[Section]:
    """Return overview, latency, throughput, time and configuration, in order of load."""
    ordered = sorted(reports, key=lambda report: report.offered_rps)
    sections = [_overview(ordered)]
    served = [report for report in ordered if report.num_completed > 0]
    if len(served) > 1:
        sections += [_latency_by_load(served), _throughput_by_load(served)]
    if served:
        sections += [_first_tokens(served), _time(served), _numbers(served)]
    if ordered:
        sections.append(configuration_section(ordered[-1].scenario_json))
    return sections


def _overview(reports: Sequence[ServingReport]) -> Section:
    refused = [report for report in reports if not report.feasibility.is_feasible]
    served = [report for report in reports if report.num_completed > 0]
    warning = ""
    if refused:
        warning = f"This deployment cannot run: {refused[0].feasibility.reason}."
    if not served:
        return Section(title="Serving", warning=warning)
    best = max(served, key=lambda report: (report.goodput_rps, report.request_throughput_rps))
    heaviest = served[-1]
    low, high = best.step_time_low_ratio - 1, best.step_time_high_ratio - 1
    return Section(
        title="Serving",
        warning=warning,
        intro=(
            f"{len(served)} simulated load{'s' if len(served) > 1 else ''}. The figures below are "
            f"those of the load with the highest goodput, {_load_label(best)}. Its step times rest "
            f"on {describe_shares(best.step_time_ratio_by_provenance)} estimates; with every "
            f"operator at its lower or upper 90 % bound they change by {low:+.0%} to {high:+.0%}."
        ),
        facts=(
            Fact(
                label="goodput",
                value=f"{format_number(best.goodput_rps)} requests/s",
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
                label="most output",
                value=f"{format_number(heaviest.output_throughput_tps)} tokens/s",
                note=f"at {_load_label(heaviest)}; "
                f"{format_number(heaviest.output_throughput_tps_per_gpu)} per device",
            ),
        ),
    )


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


def _first_tokens(reports: Sequence[ServingReport]) -> Section:
    series = {
        _load_label(report): [
            (first - arrival) * MS_PER_S
            for arrival, first in zip(
                report.requests.arrival_s, report.requests.first_token_s, strict=True
            )
            if first >= 0
        ]
        for report in reports
    }
    shown = {label: values for label, values in series.items() if values}
    svg = draw_cumulative(
        "ttft",
        "Requests whose first token came within a time",
        "time to first token (ms)",
        shown,
        colors_of_loads(len(shown)),
    )
    caption = "Each line is one load; further left is better."
    return Section(title="First tokens", pictures=(Picture(svg=svg, caption=caption),))


def _time(reports: Sequence[ServingReport]) -> Section:
    rows = {
        _load_label(report): {
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
                {_load_label(r): r.step_time_ratio_by_provenance for r in reports},
            ),
        ),
    )


def _numbers(reports: Sequence[ServingReport]) -> Section:
    headers = (
        "load",
        "TTFT p50 / p99 (ms)",
        "ITL p50 / p99 (ms)",
        "e2e p50 / p99 (s)",
        "output tokens/s",
        "goodput (1/s)",
        "SLO met",
        "busy",
        "MFU",
        "KV in use, mean",
        "preempted",
        "step time interval",
    )
    rows = [
        (
            _load_label(report),
            _pair(report.ttft_ms.p50, report.ttft_ms.p99),
            _pair(report.itl_ms.p50, report.itl_ms.p99),
            _pair(report.e2e_latency_ms.p50 / MS_PER_S, report.e2e_latency_ms.p99 / MS_PER_S),
            format_number(report.output_throughput_tps),
            format_number(report.goodput_rps),
            f"{report.slo_attainment_ratio:.0%}",
            f"{report.utilization_ratio:.0%}",
            f"{report.mfu_ratio:.1%}",
            f"{report.kv_utilization_ratio_mean:.0%}",
            str(report.num_preemptions),
            f"{report.step_time_low_ratio:.2f} to {report.step_time_high_ratio:.2f} x",
        )
        for report in reports
    ]
    return Section(title="Numbers", table=DataTable(headers=headers, rows=rows))


def _load_label(report: ServingReport) -> str:
    return f"{format_number(report.offered_rps)}/s"


def _pair(first: float, second: float) -> str:
    return f"{format_number(first)} / {format_number(second)}"
