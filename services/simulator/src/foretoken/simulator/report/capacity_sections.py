"""The sections of a page about the highest rate of a deployment."""

import json
from collections.abc import Callable, Mapping, Sequence

from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.metrics.registry import ATTAINMENT, METRICS, describe_limit
from foretoken.domain.requests.search import CapacityProbe, CapacityReport
from foretoken.page.block import Cell, Chart, Column, Table, Value
from foretoken.page.chart import LOG_CAPTION, Plot, Rule
from foretoken.page.curve import draw_intervals
from foretoken.page.section import Section
from foretoken.simulator.report.palette import describe_interval
from foretoken.simulator.report.question import configuration_section, sentence
from foretoken.simulator.report.search_candidates import limits_of, missed_outcomes
from foretoken.simulator.report.search_finalists import load_charts
from foretoken.simulator.report.serving_sections import serving_sections


def capacity_sections(report: CapacityReport) -> list[Section]:
    """Return what a page says of a capacity: the rate, how it was found, the run at that rate."""
    sections = [_overview(report)]
    if report.probes:
        rules = [Rule("x", report.capacity_rps, "capacity")] if report.capacity_rps else []
        if report.high_rps > report.low_rps:
            rules.append(Rule("x", report.low_rps, end=report.high_rps))
        remark = "The line is the capacity, the shaded range its interval."
        sections += [*_load_sections({"run": report}, remark, rules), _probes(report.probes)]
    if report.capacity_rps > 0:
        at_capacity = serving_sections([report.at_capacity])
        return [*sections, *at_capacity]
    return [*sections, configuration_section(report.scenario_json)]


def capacity_charts(reports: Mapping[str, CapacityReport]) -> list[Section]:
    """Return the rates with their intervals, and the latencies of all runs over the rate."""
    rates = {
        label: (report.low_rps or rate, rate, report.high_rps or rate)
        for label, report in reports.items()
        if (rate := report.capacity_rps) > 0
    }
    charts = []
    if rates:
        caption = "A bar's line is its interval: the workload's chance and the estimates' error."
        plot = Plot(title="Highest rate that meets the targets", caption=caption)
        charts.append(draw_intervals(plot, rates, Column.of(METRICS["capacity_rps"])))
    shared = "A line is a limit that all share."
    return _load_sections(reports, shared, before=charts)


def _load_sections(
    reports: Mapping[str, CapacityReport],
    remark: str,
    rules: Sequence[Rule] = (),
    before: Sequence[Chart] = (),
) -> list[Section]:
    """Return the charts of latencies over the rate, after others; nothing where there are none."""
    probes = {
        label: sorted(report.probes, key=lambda probe: probe.rate_rps)
        for label, report in reports.items()
    }
    caption = (
        "Each point is a simulation at that rate; a ring misses a target, or was cut short as its"
        f" queue only grew. {remark} {LOG_CAPTION}"
    )
    charts = [*before, *load_charts(probes, caption, rules)]
    return [Section(title="Load and latency", pictures=charts)] if charts else []


def _overview(report: CapacityReport) -> Section:
    if not report.feasibility.is_feasible or report.capacity_rps <= 0:
        reason = report.feasibility.reason or "not even the lowest rate meets the targets"
        return Section(title="Capacity", warning=f"There is no rate: {reason}.")
    found = (
        f"The targets are met at {format_number(report.capacity_rps)} requests/s and missed at"
        f" {format_number(report.first_miss_rps)}."
        if report.first_miss_rps
        else f"The targets are met at {format_number(report.capacity_rps)} requests/s, the highest"
        " rate that was tried."
    )
    limiting = f" {report.limiting} fails first." if report.limiting else ""
    scenario = json.loads(report.scenario_json or "{}")
    seed = f" Seed {scenario['seed']}." if "seed" in scenario else ""
    facts = [
        Value.of("capacity_rps", report, _bounds(report.low_rps, report.high_rps)),
        Value(
            label="of that by the workload's chance",
            value=_bounds(report.sampling_low_rps, report.sampling_high_rps) or "-",
            note="the rest is the estimates' error",
        ),
        Value.of(
            "capacity_rps_per_gpu",
            report,
            f"{report.num_devices:,} {'GPU' if report.num_devices == 1 else 'GPUs'}",
        ),
    ]
    if report.usd_per_million_output_tokens > 0:
        facts.append(Value.of("usd_per_million_output_tokens", report, "at that rate"))
    return Section(
        title="Capacity",
        intro=f"{found}{limiting} {len(report.probes)} runs, {report.cpu_s:.3g} s of CPU"
        f" time.{seed}",
        warning=" ".join(sentence(note) for note in report.notes),
        facts=facts,
    )


def _probes(probes: Sequence[CapacityProbe]) -> Section:
    table = Table.of(
        probes,
        Column.words("requests/s", read=lambda probe: format_number(probe.rate_rps)),
        Column(title="requests", name="num_requests"),
        Column.of("output_throughput_tps"),
        *(_outcome(metric, percentile) for metric, percentile in limits_of(probes)),
        Column.words("verdict", read=_verdict),
    )
    return Section(
        title="Runs",
        intro="In the order they were made. A run that was cut short could have become no better.",
        table=table,
    )


def _outcome(metric: str, percentile: float) -> Column:
    """Return the column of a figure; that of a run cut short is the best it could have become."""
    is_share = metric == ATTAINMENT
    write: Callable[[float], str] = "{:.1%}".format if is_share else format_number

    def read(probe: CapacityProbe) -> str:
        cut = ("<= " if is_share else ">= ") * probe.is_cut_short
        return "".join(
            cut + write(outcome.value)
            for outcome in probe.outcomes
            if (outcome.metric, outcome.percentile) == (metric, percentile)
        )

    return Column(title=describe_limit(metric, percentile) + " (ms)" * (not is_share), read=read)


def _verdict(probe: CapacityProbe) -> str | Cell:
    if probe.is_met:
        return "meets the targets"
    missed = missed_outcomes(probe.outcomes)
    if probe.is_cut_short:
        missed = ["the queue only grew; cut short", *missed]
    return Cell(value="; ".join(missed) or "misses the targets", tone="alert")


def _bounds(low: float, high: float) -> str:
    return describe_interval(low, high, "") if high > 0 else ""
