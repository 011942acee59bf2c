"""What a comparison says in words, tables and charts of two runs, and what to do about it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from foretoken.domain.metrics.metric import SHARE
from foretoken.page.block import Cell, Chart, Column, Table, Value
from foretoken.page.chart import Plot
from foretoken.page.curve import Curve, draw_curves
from foretoken.page.section import Section
from foretoken.simulator.grid import Floats


def shares_chart(plot: Plot, series: Mapping[str, Sequence[float]], value: Column) -> Chart:
    """Return the share of values at or below x, one step line per series."""
    curves = [
        Curve(
            label=label,
            x=sorted(values),
            y=[(index + 1) / len(values) for index in range(len(values))],
            color=plot.colors[label],
        )
        for label, values in series.items()
    ]
    share = Column(title="share of requests", name="share", unit=SHARE)
    return draw_curves(plot, curves, x=value, y=share, is_step=True)


def pairs_chart(plot: Plot, label: str, measured: Floats, simulated: Floats) -> Chart:
    """Return a dot per request, measured against simulated, and the line where they agree."""
    columns = [
        Column(title=f"{label}, measured", name="measured"),
        Column(title="simulated", name="simulated"),
    ]
    rows = list(zip(measured.tolist(), simulated.tolist(), strict=True))
    drawn = Plot(
        title=plot.title,
        caption=plot.caption,
        table=Table(columns=columns, rows=rows),
        x="measured",
        y="simulated",
        height=400,
    )
    return drawn.scatter(diagonal=True)


# Runs of one server on one workload, and steps of one run, differ by about this much.
NOTABLE_RATIO = 0.02
# Estimates that rest on measurements for less than this share of the time are spoken of.
_WELL_MEASURED_SHARE = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing to know, most important first: what, and what to do about it (may be empty)."""

    component: str
    text: str
    advice: str = ""


def find_estimates(
    shares: Mapping[str, float], text: str, low_ratio: float, high_ratio: float
) -> Iterator[Finding]:
    """Yield what simulated times rest on, where that is not measurements.

    `shares` are those of the time by provenance, `low_ratio` and `high_ratio` the bounds of it over
    the estimate.
    """
    measured = sum(shares.get(name, 0.0) for name in ("measured", "interpolated"))
    if shares and measured < _WELL_MEASURED_SHARE:
        yield Finding(
            component="estimates",
            text=f"{text}, which may be off by {low_ratio - 1:+.0%} to {high_ratio - 1:+.0%}.",
            advice="Measure or import the operators of this device before anything else:"
            " `foretoken plan` says which, `foretoken profile` measures them.",
        )


def findings_section(intro: str, facts: Sequence[Value], findings: Iterable[Finding]) -> Section:
    """Return what a comparison says in words, with what it is of and its first figures."""
    rows = [(item.component, item.text, item.advice) for item in findings]
    table = Table.listed(
        headers=("component", "finding", "what to do"), rows=rows, text_columns=(1, 2)
    )
    return Section(title="What the comparison says", intro=intro, facts=facts, table=table)


def error_cell(error_ratio: float, alert_ratio: float) -> str | Cell:
    """Return simulated over measured less one; pointed out above a size."""
    text = f"{error_ratio:+.1%}"
    return Cell(value=text, tone="alert") if abs(error_ratio) > alert_ratio else text
