"""The charts of a training report, and how much of a missed interval chance explains."""

from collections.abc import Sequence

import numpy as np

from foretoken.domain.metrics.metric import SHARE
from foretoken.domain.results.report import OperatorTrainingReport, SplitScore
from foretoken.page.block import Chart, Column, Table
from foretoken.page.chart import BLUE, GREEN, ORANGE, VERMILION, Plot, Rule
from foretoken.page.curve import Curve, draw_curves, draw_intervals, draw_parts
from foretoken.predictor.report.scoring import resample_errors

NOMINAL_COVERAGE_RATIO = 0.9
_CONFIDENCE = 0.95


def coverage_by_chance(num_points: int) -> tuple[float, float]:
    """Return the range that 95 % of coverages fall in, were every interval a true 90 % one.

    That of the binomial distribution: points that err together, as neighbours do, stray further.
    """
    from scipy.stats import binom  # type: ignore[import-untyped]

    low, high = binom.interval(_CONFIDENCE, num_points, NOMINAL_COVERAGE_RATIO)
    return float(low) / num_points, float(high) / num_points


_OF_SPLIT = {"inside": BLUE, "gap": GREEN, "new configuration": ORANGE, "beyond": VERMILION}
_P90 = 0.9
# Errors smaller than this are the noise of measuring; a logarithmic axis needs an end.
_LEAST_ERROR_RATIO = 1e-3
_SHARE_OF_POINTS = Column(title="share of held-out points", name="share", unit=SHARE)


def errors_charts(splits: Sequence[SplitScore]) -> list[Chart]:
    """Return the share of points by signed error, and by its size, a line per split."""
    signed, sizes = [], []
    for score in splits:
        color = _OF_SPLIT[score.split]
        errors = resample_errors(score)
        levels = np.linspace(0.0, 1.0, len(errors))
        signed.append(Curve(label=score.split, x=errors.tolist(), y=levels.tolist(), color=color))
        size = np.sort(np.abs(errors))
        # Beyond its P90 the size of an error is known from the worst points alone.
        is_drawn = (levels <= _P90) & (size >= _LEAST_ERROR_RATIO)
        x, y = size[is_drawn].tolist(), levels[is_drawn].tolist()
        sizes.append(Curve(label=score.split, x=x, y=y, color=color))
    too_slow = Plot(
        title="Too fast, or too slow?",
        caption="All points of all operators. A line that is right of zero at 50 % estimates too"
        " slow more often than too fast.",
        rules=[Rule("x", 0.0)],
    )
    how_far = Plot(
        title="How far off?",
        caption="The error that a share of the points stays below, up to its P90.",
        rules=[Rule("y", _P90, "P90")],
    )
    error = Column(title="estimate over truth, less one", name="error", unit=SHARE)
    of_size = Column(title="size of the error", name="error", unit=SHARE)
    return [
        draw_curves(too_slow, signed, x=error, y=_SHARE_OF_POINTS),
        draw_curves(how_far, sizes, x=of_size, y=_SHARE_OF_POINTS),
    ]


def coverage_charts(
    reports: Sequence[OperatorTrainingReport], pooled: Sequence[SplitScore]
) -> list[Chart]:
    """Return how often the truth was in the interval: all together, and of every operator."""
    coverage = Column(title="share of truths in their 90 % interval", name="coverage", unit=SHARE)
    nominal = [Rule("x", NOMINAL_COVERAGE_RATIO, "90 %")]
    together = Plot(
        title="Coverage",
        caption="The bar is all together; its line is what chance explains around 90 %.",
        rules=nominal,
    )
    values = {}
    for total in pooled:
        low, high = coverage_by_chance(total.num_held_out)
        values[total.split] = (low, total.interval_coverage_ratio, high)
    columns = [
        Column.words("operator", "name"),
        Column.words("points left out", "split"),
        coverage,
        Column(title="points", name="points"),
    ]
    rows = [
        (name_of(report), score.split, score.interval_coverage_ratio, score.num_held_out)
        for report in reports
        for score in report.splits
    ]
    each = Plot(
        title="Coverage by operator",
        table=Table(columns=columns, rows=rows),
        x="coverage",
        y="points",
        by="split",
        colors=_OF_SPLIT,
        caption="A point per operator, device and kind of point: few points stray by chance.",
        rules=nominal,
        is_near=True,
    )
    return [draw_intervals(together, values, coverage), each.scatter()]


def operators_chart(reports: Sequence[OperatorTrainingReport], caption: str) -> Chart:
    """Return the mean error of every split, a row per operator, in the order given."""
    columns = [
        Column.words("operator", "name"),
        Column.words("points left out", "split"),
        Column(title="mean error (MAPE)", name="mape_ratio", unit=SHARE),
    ]
    rows = [
        (name_of(report), score.split, score.mape_ratio)
        for report in reports
        for score in report.splits
    ]
    plot = Plot(
        title="Mean error by operator",
        table=Table(columns=columns, rows=rows),
        x="mape_ratio",
        y="name",
        by="split",
        colors=_OF_SPLIT,
        caption=caption,
    )
    return plot.bars(stacked=False)


def members_chart(reports: Sequence[OperatorTrainingReport]) -> Chart:
    """Return what share each way of estimating has, a bar per operator, in the order given."""
    caption = (
        "What the answers are made of: each way of estimating counts by how well it did on points"
        " left out."
    )
    rows = {name_of(report): report.member_weights for report in reports}
    share = Column(title="share in the answers inside the grid", name="share", unit=SHARE)
    return draw_parts(Plot(title="Members", caption=caption), rows, share, part="member")


def name_of(report: OperatorTrainingReport) -> str:
    """Return how a row of a chart is called."""
    return f"{report.operator}  {report.device}"
