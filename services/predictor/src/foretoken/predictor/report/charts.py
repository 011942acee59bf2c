"""The charts of a training report, and how much of a missed interval chance explains."""

from collections.abc import Sequence

import numpy as np

from foretoken.domain.metrics.metric import SHARE
from foretoken.domain.results.report import OperatorTrainingReport, SplitScore
from foretoken.page.block import Chart, Column, Table
from foretoken.page.chart import BLUE, GREEN, ORANGE, VERMILION, Plot, Rule
from foretoken.page.curve import Curve, draw_curves, draw_intervals, draw_parts
from foretoken.predictor.scoring import resample_errors

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
LEFT_OUT = Column.words("points left out", "split")
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
    name = "interval_coverage_ratio"
    coverage = Column(title="share of truths in their 90 % interval", name=name, unit=SHARE)
    points = Column(title="points", name="num_held_out")
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
    each = Plot(
        title="Coverage by operator",
        table=_by_split(reports, coverage, points),
        x=coverage.name,
        y=points.name,
        by="split",
        colors=_OF_SPLIT,
        caption="A point per operator, device and kind of point: few points stray by chance.",
        rules=nominal,
        is_near=True,
    )
    return [draw_intervals(together, values, coverage), each.scatter()]


def _by_split(reports: Sequence[OperatorTrainingReport], *columns: Column) -> Table:
    """Return a row for every operator and kind of point."""
    scores = [(report, score) for report in reports for score in report.splits]
    operator = Column.words("operator", "name", name_of).part(0)
    return Table.of(scores, operator, *(column.part(1) for column in (LEFT_OUT, *columns)))


def operators_chart(reports: Sequence[OperatorTrainingReport], caption: str) -> Chart:
    """Return the mean error of every split, a row per operator, in the order given."""
    error = Column(title="mean error (MAPE)", name="mape_ratio", unit=SHARE)
    plot = Plot(
        title="Mean error by operator",
        table=_by_split(reports, error),
        x=error.name,
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
