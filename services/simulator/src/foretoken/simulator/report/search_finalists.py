"""The part of a search's page about simulated deployments, and what load does to latencies."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle

from foretoken.domain.metrics.metric import SHARE, title_of
from foretoken.domain.metrics.registry import ATTAINMENT, METRICS, describe_limit
from foretoken.domain.metrics.request import LIMITED
from foretoken.domain.requests.search import CandidateColumns, CapacityProbe, Finalist
from foretoken.page.block import Cell, Chart, Column, Table
from foretoken.page.chart import LOG_CAPTION, SERIES, Plot, Rule
from foretoken.page.curve import Curve, draw_curves
from foretoken.page.section import Section
from foretoken.simulator.report import search_candidates as candidates
from foretoken.simulator.report.palette import groups_chart

_THROUGHPUT = "output_throughput_tps_per_gpu"


def finalist_sections(found: Sequence[tuple[Finalist, CandidateColumns]]) -> list[Section]:
    """Return the figures of finalists, each with its search's candidates, and what load does."""
    finalists = [finalist for finalist, _ in found]
    shares = {
        finalist.name: {
            group: time_s / (sum(times_s.values()) or 1.0) for group, time_s in times_s.items()
        }
        for finalist in finalists
        if (times_s := finalist.report.step_time_s_by_group)
    }
    unit = Column(title="share of the busy time", name="share", unit=SHARE)
    caption = "What the engines were busy with, by what operators do."
    figures = Section(
        title="Simulated request by request",
        intro=(
            "The best in closed form, run at the load they are proposed for: queues, batches and "
            "percentiles are in these figures, of the requests that come once the load is steady. "
            "What misses a target then has no rank; the next best is simulated in its place."
        ),
        pictures=[groups_chart("Steps of all engines", shares, unit, caption)] if shares else [],
        table=Table.of(found, *finalist_columns(found)),
    )
    caption = (
        "Each point is a run, by the requests/s that were served; the load rises along a curve,"
        " with the same random numbers at each. A ring misses a target, or was cut short as its"
        f" queue only grew. {LOG_CAPTION}"
    )
    charts = load_charts({finalist.name: finalist.load for finalist in finalists}, caption)
    loads = Section(title="Load and latency of the finalists", pictures=charts)
    return [figures, loads] if charts else [figures]


def finalist_columns(found: Sequence[tuple[Finalist, CandidateColumns]]) -> list[Column]:
    """Return the columns of finalists, each with its search's candidates."""
    latencies = [
        title_of(f"{metric.label} {statistic}", metric.unit)
        for metric in (LIMITED["ttft_ms"], LIMITED["tpot_ms"])
        for statistic in ("mean", "p99")
    ]
    columns = [
        Column.words("deployment", read=lambda one: one[0].name),
        Column(title="requests/s", read=lambda one: candidates.proposed_rate(one[0])),
        *(
            Column(title=title, read=partial(_steady, place))
            for place, title in enumerate((METRICS[_THROUGHPUT].title, *latencies))
        ),
    ]
    # Without an SLO every request would be in it.
    scenarios = [json.loads(finalist.scenario_json or "{}") for finalist, _ in found]
    if any(one.get("slo_classes") or any((one.get("slo") or {}).values()) for one in scenarios):
        columns.append(Column.of("slo_attainment_ratio").part("report").part(0))
    columns.append(Column.words("verdict", read=_verdict).part(0))
    return columns


def _steady(place: int, found: tuple[Finalist, CandidateColumns]) -> float:
    return candidates.steady_figures(*found)[place]


def _verdict(finalist: Finalist) -> str | Cell:
    missed = ", ".join(candidates.missed_outcomes(finalist.outcomes))
    return "meets the targets" if finalist.is_met else Cell(value=f"misses {missed}", tone="alert")


def load_charts(
    probes: Mapping[str, Sequence[CapacityProbe]], caption: str, rules: Sequence[Rule] = ()
) -> list[Chart]:
    """Return a chart for every limit, with a curve for each name; limits that all share are drawn.

    `probes` are in the order that lines go through them.
    """
    limits: dict[tuple[str, float], set[float]] = {}
    for of_one in probes.values():
        for key, limit in candidates.limits_of(of_one).items():
            limits.setdefault(key, set()).add(limit)
    charts = []
    for (metric, percentile), of_all in limits.items():
        limit = of_all.pop() if len(of_all) == 1 else 0.0
        is_share = metric == ATTAINMENT
        name = describe_limit(metric, percentile)
        marked = [Rule("y", limit, "at least" if is_share else "limit")] if limit else []
        y = Column(title=name if is_share else f"{name} (ms)", name=metric, unit=SHARE * is_share)
        plot = Plot(title=f"{name} by load", caption=caption, rules=[*rules, *marked])
        curves = [
            Curve(
                label=label,
                x=[probe.rate_rps for probe, _ in points],
                y=[value for _, value in points],
                color=color,
                is_hollow=[not probe.is_met or probe.is_cut_short for probe, _ in points],
            )
            for (label, of_one), color in zip(probes.items(), cycle(SERIES), strict=False)
            if (points := candidates.curve_of(of_one, metric, percentile))
        ]
        rate = Column(title="requests/s", name="rate_rps")
        charts.append(draw_curves(plot, curves, x=rate, y=y))
    return charts
