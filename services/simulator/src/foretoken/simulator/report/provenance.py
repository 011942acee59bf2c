"""Say in words and pictures how far an estimate can be trusted."""

from collections.abc import Mapping

from foretoken.domain.metrics.metric import SHARE
from foretoken.domain.metrics.number_text import format_number
from foretoken.page.block import Chart, Column
from foretoken.page.chart import Plot
from foretoken.page.curve import draw_parts
from foretoken.simulator.report.palette import OF_PROVENANCE

BOUNDS_CAPTION = (
    "A bar's line is its interval: every operator at its lower, and at its upper, 90 % bound."
)


def describe_interval(low: float, high: float, unit: str) -> str:
    """Return an interval with its unit."""
    return f"{format_number(low)} to {format_number(high)} {unit}".rstrip()


def provenance_chart(rows: Mapping[str, Mapping[str, float]]) -> Chart:
    """Return the chart of what the busy time of each row rests on."""
    caption = (
        "Measured: this very operator call was timed on this device. Interpolated: a latency"
        " model inside what was measured. Extrapolated: the same model outside of it."
        " Transferred: from the operator's efficiency on other devices. Analytical: from the"
        " device's data sheet and what other operators make of it."
    )
    plot = Plot(title="What the times rest on", caption=caption, colors=OF_PROVENANCE)
    unit = Column(title="share of the busy time", name="share", unit=SHARE)
    return draw_parts(plot, rows, unit, part="rests on")
