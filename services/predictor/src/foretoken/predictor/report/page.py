"""Write a training report as one HTML page with pictures."""

from collections.abc import Sequence
from datetime import datetime

from foretoken.domain.metrics.metric import SHARE
from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.results.report import (
    HeldOutCase,
    OperatorTrainingReport,
    PredictorTrainingReport,
    SplitScore,
)
from foretoken.page.block import Cell, Column, Table, Value
from foretoken.page.html import render_sections
from foretoken.page.section import Section
from foretoken.predictor.report import charts
from foretoken.predictor.scoring import merge_splits

# Rows of a picture, and cases of the last table; the report as JSON has all.
_PICTURED_MAX = 40
_CASES_MAX = 30
_CASES_PER_OPERATOR = 3

_SPLIT_MEANINGS = {
    "inside": "single points left out among measured ones",
    "gap": "a whole value of a size left out, with all its points",
    "new configuration": "a whole shape or head configuration left out",
    "beyond": "the largest sizes left out",
}
_HOW_TO_READ = (
    "Points were left out of training, estimated by models that had not seen them, and compared"
    " with what was measured. MAPE is the mean size of the error, P90 the error that nine in ten"
    " points stay below. Coverage is the share of truths inside their interval, which should be"
    " 90 %. Next to it stands the range that chance alone explains for that many points: ▼ is"
    " below it, so the intervals promise too much; ▲ is above it, so they are wider than they"
    " need be. Points that err together stray further than chance says."
)
_WHAT_TO_DO = (
    "Where an error is too large for you or a coverage is marked ▼, measure more there:"
    " foretoken plan ranks the points that help most for the time they take. An error that is"
    " large beyond the grid only calls for larger sizes, one in new configurations for shapes like"
    " yours. Points in the last table that look wrong, rather than hard, are measurements to"
    " check: foretoken catalog check."
)


def render_page(report: PredictorTrainingReport) -> str:
    """Return the page as HTML."""
    judged = sorted(
        (operator for operator in report.operators if operator.splits),
        key=lambda operator: -operator.held_out_mape_ratio,
    )
    pooled = merge_splits(score for operator in judged for score in operator.splits)
    sections = [_overview(report, pooled)]
    if judged:
        ordered = sorted(judged, key=lambda report: (report.device, report.operator))
        columns = (*_OF_OPERATOR, *(column.part(1) for column in (charts.LEFT_OUT, *_SCORES)))
        scores = Table.of([(one, score) for one in ordered for score in one.splits], *columns)
        sections += [
            Section(title="How to read it", intro=_HOW_TO_READ),
            Section(title="What to do", intro=_WHAT_TO_DO),
            _by_split(judged, pooled),
            _by_operator(judged),
            Section(title="By operator, device and kind of point", table=scores),
            _worst(judged),
        ]
    made = ""
    if report.created_at:
        made = f", made {datetime.fromisoformat(report.created_at):%Y-%m-%d %H:%M} UTC"
    subtitle = (
        f"Model {report.model_version or 'without a version'}{made}: how far its estimates are off"
        " on points it was not trained on."
    )
    return render_sections("Training report", subtitle, sections)


def _overview(report: PredictorTrainingReport, pooled: Sequence[SplitScore]) -> Section:
    num_held_out = sum(score.num_held_out for score in pooled)
    facts = [
        Value(label="rows", value=f"{report.num_rows:,}", note=report.snapshot_hash[:12]),
        Value(
            label="operators on devices",
            value=f"{len(report.operators):,}",
            note=f"{report.num_reused:,} models kept from before",
        ),
        Value(label="training", value=f"{report.cpu_s:,.1f} s", note="of CPU time"),
        Value(label="points held out", value=f"{num_held_out:,}"),
    ]
    if pooled:
        first = pooled[0]
        note = f"P90 {first.p90_ratio:.1%}, of all operators"
        facts.append(Value(label=f"MAPE {first.split}", value=f"{first.mape_ratio:.1%}", note=note))
    warning = "Too few points to leave any out: nothing is known of errors."
    return Section(title="Model", warning="" if pooled else warning, facts=facts)


def _by_split(judged: Sequence[OperatorTrainingReport], pooled: Sequence[SplitScore]) -> Section:
    how = Column.words("how", read=lambda score: _SPLIT_MEANINGS[score.split])
    return Section(
        title="By kind of point",
        pictures=[*charts.errors_charts(pooled), *charts.coverage_charts(judged, pooled)],
        table=Table.of(pooled, charts.LEFT_OUT, how, *_SCORES),
    )


def _by_operator(judged: Sequence[OperatorTrainingReport]) -> Section:
    drawn = judged[:_PICTURED_MAX]
    left_out = len(judged) - len(drawn)
    rest = f" {left_out} with smaller errors are in the table alone." if left_out else ""
    pictures = [charts.operators_chart(drawn, f"The largest error over all comes first.{rest}")]
    weighted = [operator for operator in drawn if operator.member_weights]
    if weighted:
        pictures.append(charts.members_chart(weighted))
    return Section(title="By operator", pictures=pictures)


def _worst(judged: Sequence[OperatorTrainingReport]) -> Section:
    cases = [(one, case) for one in judged for case in one.worst[:_CASES_PER_OPERATOR]]
    cases.sort(key=lambda found: -_factor(found[1]))
    columns = (*_OF_OPERATOR, *(column.part(1) for column in _CASES))
    return Section(
        title="Furthest off",
        intro=f"At most {_CASES_PER_OPERATOR} points of an operator on a device, those with the"
        " largest ratio of estimate and truth. Times are in µs; ▼ marks an interval that does not"
        " have the truth in it. The report as JSON has more.",
        table=Table.of(cases[:_CASES_MAX], *columns),
    )


def _coverage(score: SplitScore) -> str | Cell:
    coverage = score.interval_coverage_ratio
    low, high = charts.coverage_by_chance(score.num_held_out)
    if coverage < low:
        return Cell(value=f"▼ {coverage:.1%}", tone="alert")
    if coverage > high:
        return Cell(value=f"▲ {coverage:.1%}", tone="calm")
    return f"{coverage:.1%}"


def _interval(case: HeldOutCase) -> str | Cell:
    interval = f"{format_number(case.low_us)} - {format_number(case.high_us)}"
    is_covered = case.low_us <= case.measured_us <= case.high_us
    return interval if is_covered else Cell(value=f"▼ {interval}", tone="alert")


def _factor(case: HeldOutCase) -> float:
    return max(case.estimate_us / case.measured_us, case.measured_us / case.estimate_us)


_OF_OPERATOR = tuple(Column.words(name).part(0) for name in ("operator", "device"))
_SCORES = (
    Column(title="points", name="num_held_out"),
    Column(title="MAPE", name="mape_ratio", unit=SHARE),
    Column(title="P90", name="p90_ratio", unit=SHARE),
    Column(title="coverage", read=_coverage),
    Column(
        title="by chance",
        read=lambda score: "{:.1%} - {:.1%}".format(*charts.coverage_by_chance(score.num_held_out)),
    ),
)
_CASES = (
    charts.LEFT_OUT,
    Column(title="measured", name="measured_us"),
    Column(title="estimate", name="estimate_us"),
    Column(title="error", read=lambda case: f"{case.estimate_us / case.measured_us - 1:+.0%}"),
    Column(title="90 % interval", read=_interval),
    Column.words(
        "dimensions",
        read=lambda case: ", ".join(f"{name}\u00a0{size}" for name, size in case.dims.items()),
    ),
)
