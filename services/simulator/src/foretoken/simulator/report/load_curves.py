"""Charts of what load does to latencies: a point for every run, rings where a target is missed."""

from collections.abc import Mapping, Sequence

from foretoken.domain.metrics.metric import SHARE
from foretoken.domain.metrics.registry import ATTAINMENT, describe_limit
from foretoken.domain.requests.search import CapacityProbe
from foretoken.page.block import Chart, Column
from foretoken.page.chart import SERIES, Plot, Rule
from foretoken.page.curve import Curve, draw_curves
from foretoken.simulator.report.search_candidates import curve_of, limits_of

_RATE = Column(title="requests/s", name="rate_rps")


def load_charts(
    probes: Mapping[str, Sequence[CapacityProbe]], caption: str, rules: Sequence[Rule] = ()
) -> list[Chart]:
    """Return a chart for every limit, with a curve for each name; limits that all share are drawn.

    `probes` are in the order that lines go through them.
    """
    limits: dict[tuple[str, float], set[float]] = {}
    for of_one in probes.values():
        for key, limit in limits_of(of_one).items():
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
            curve
            for (label, of_one), color in zip(probes.items(), _colors(len(probes)), strict=True)
            if (curve := _curve(label, of_one, (metric, percentile), color)).x
        ]
        charts.append(draw_curves(plot, curves, x=_RATE, y=y))
    return charts


def _colors(number: int) -> list[str]:
    return [SERIES[place % len(SERIES)] for place in range(number)]


def _curve(
    label: str, probes: Sequence[CapacityProbe], limit: tuple[str, float], color: str
) -> Curve:
    points = curve_of(probes, *limit)
    return Curve(
        label=label,
        x=[probe.rate_rps for probe, _ in points],
        y=[value for _, value in points],
        color=color,
        is_hollow=[not probe.is_met or probe.is_cut_short for probe, _ in points],
    )
