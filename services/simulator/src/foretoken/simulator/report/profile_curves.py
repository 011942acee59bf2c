"""Pictures of a profile: what was measured of an operator, and what the predictor made of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from foretoken.domain.metrics.metric import SHARE
from foretoken.page.block import Chart, Column, Table
from foretoken.page.chart import BLUE, ORANGE, VERMILION, Plot
from foretoken.page.curve import Curve, draw_curves
from foretoken.page.html import render_sections
from foretoken.page.picture import write_picture
from foretoken.page.section import Section
from foretoken.simulator.measured_curves import CurveKey, FittedCurve, MeasuredCurve

# More panels than this nobody looks at; the table has all curves.
MAX_PANELS = 24
_SUBTITLE = "Measurements of the catalog, and the predictor's answers. Drawn by Foretoken."


def profile_sections(
    curves: Sequence[FittedCurve],
    max_panels: int = MAX_PANELS,
    left_out: Sequence[MeasuredCurve] = (),
) -> list[Section]:
    """Return a section for each operator on each device and topology.

    `left_out` are curves of flagged points, which nothing was fitted to.
    """
    places = dict.fromkeys(_place(curve) for curve in curves)
    flagged = {curve.key: curve for curve in left_out}
    return [
        _section([curve for curve in curves if _place(curve) == place], max_panels, flagged)
        for place in places
    ]


def render_profile(
    title: str, curves: Sequence[FittedCurve], left_out: Sequence[MeasuredCurve] = ()
) -> str:
    """Return the pictures as a page; see `profile_sections`."""
    return render_sections(title, _SUBTITLE, profile_sections(curves, left_out=left_out))


def write_profile_figure(path: Path, curves: Sequence[FittedCurve]) -> None:
    """Write the panels of one operator as a picture, in the format of the path's ending."""
    write_picture(path, _curve_charts(curves[:MAX_PANELS], "", {}))


def _curve_charts(
    curves: Sequence[FittedCurve], caption: str, flagged: Mapping[CurveKey, MeasuredCurve]
) -> list[Chart]:
    """Return a chart for each curve: its points, and the fitted line with its interval."""
    charts = []
    for fitted in curves:
        key, measured = fitted.measured.key, fitted.measured
        # The longest time is the lowest rate.
        low, high, middle = (
            key.rates(fitted.sizes, times_us).tolist()
            for times_us in (fitted.high_us, fitted.low_us, fitted.latency_us)
        )
        line = Curve(
            label="fitted", x=fitted.sizes.tolist(), y=middle, low=low, high=high, color=BLUE
        )
        drawn = [line, _measured_curve("measured", measured, ORANGE)]
        if key in flagged:
            drawn.append(_measured_curve("flagged, left out", flagged[key], VERMILION))
        what = "message (bytes)" if key.spec.is_collective else key.moving
        plot = Plot(title=key.title, caption=caption, height=200)
        x, y = Column(title=what, name="size"), Column(title=key.unit, name="rate")
        charts.append(draw_curves(plot, drawn, x=x, y=y))
        caption = ""
    return charts


def _measured_curve(label: str, measured: MeasuredCurve, color: str) -> Curve:
    rates = measured.key.rates(measured.sizes, measured.latency_us).tolist()
    sizes = measured.sizes.tolist()
    return Curve(label=label, x=sizes, y=rates, color=color, is_dotted=True)


def _work_chart(curves: Sequence[FittedCurve]) -> Chart:
    """Return all points of an operator over the FLOP of their calls, measured and fitted."""
    columns = [Column.words("what"), Column(title="FLOP of a call", name="flop")]
    columns.append(Column(title=curves[0].measured.key.unit, name="rate"))
    rows = []
    for label in ("measured", "fitted"):
        for curve in curves:
            key, measured = curve.measured.key, curve.measured
            times_us = curve.at_points_us if label == "fitted" else measured.latency_us
            rates = key.rates(measured.sizes, times_us)
            work = key.work(measured.sizes)
            rows += [(label, float(w), float(r)) for w, r in zip(work, rates, strict=True)]
    plot = Plot(
        title="All points together",
        table=Table(columns=columns, rows=rows),
        x="flop",
        y="rate",
        by="what",
        colors={"measured": ORANGE, "fitted": BLUE},
        caption="Over the FLOP of a call: measured, and the predictor's.",
    )
    return plot.scatter()


def _place(curve: FittedCurve) -> tuple[str, str, str]:
    key = curve.measured.key
    return key.operator, key.device, key.topology


def _section(
    curves: Sequence[FittedCurve], max_panels: int, flagged: Mapping[CurveKey, MeasuredCurve]
) -> Section:
    operator, device, topology = _place(curves[0])
    key = curves[0].measured.key
    what = "message" if key.spec.is_collective else key.moving
    caption = (
        f"Points are measured ({key.unit} over {what}); the line is the predictor's answer with"
    )
    caption += " its 90 % interval."
    if len(curves) > max_panels:
        caption += f" Drawn are the {max_panels} curves with the most points of {len(curves)}."
    where = f"{device}, {topology}" if topology else device
    pictures = _curve_charts(curves[:max_panels], caption, flagged)
    if key.has_flops and len(curves) > 1:
        pictures.insert(0, _work_chart(curves))
    return Section(
        title=f"{operator} on {where}",
        pictures=pictures,
        table=_table(curves),
    )


def _table(curves: Sequence[FittedCurve]) -> Table:
    return Table.of(
        curves,
        Column.words("curve", read=lambda curve: curve.measured.key.title),
        Column(title="points", read=lambda curve: len(curve.measured.sizes)),
        Column(
            title=f"highest ({curves[0].measured.key.unit})",
            read=lambda curve: max(_measured_curve("", curve.measured, "").y),
        ),
        Column(
            title="median error",
            unit=SHARE,
            read=lambda curve: float(np.median(np.abs(curve.error_ratio))),
        ),
        Column(
            title="worst error",
            unit=SHARE,
            read=lambda curve: float(np.abs(curve.error_ratio).max()),
        ),
        Column.words("rests on", "provenance"),
    )
