"""The charts that the pages of comparisons have of two runs."""

from collections.abc import Mapping, Sequence

from foretoken.domain.metrics.metric import SHARE
from foretoken.page.block import Chart, Column, Table
from foretoken.page.chart import Plot
from foretoken.page.curve import Curve, draw_curves
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
