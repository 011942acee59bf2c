"""Pictures of a profile: what was measured of an operator, and what the predictor made of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from foretoken.domain.metrics.number_text import format_number
from foretoken.page.block import Chart, Column, Table
from foretoken.page.chart import Plot
from foretoken.page.curve import Curve, draw_curves
from foretoken.page.figure import BLUE, INK, ORANGE, STYLE, VERMILION, WIDTH_INCHES
from foretoken.page.html import render_sections
from foretoken.page.section import DataTable, Section
from foretoken.simulator.report.profile_groups import CurveKey, FittedCurve, MeasuredCurve

_PANELS_IN_ROW = 3
# More panels than this nobody looks at; the table has all curves.
MAX_PANELS = 24
_PANEL_INCHES = 2.5
_LEGEND_INCHES = 0.7
_DOTS_PER_INCH = 150
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
    with rc_context({**STYLE, "figure.facecolor": "white"}):
        _figure(curves[:MAX_PANELS]).savefig(path, dpi=_DOTS_PER_INCH, facecolor="white")


def _curve_charts(
    curves: Sequence[FittedCurve], caption: str, flagged: Mapping[CurveKey, MeasuredCurve]
) -> list[Chart]:
    """Return a chart for each curve: its points, and the fitted line with its interval."""
    charts = []
    for fitted in curves:
        key, measured = fitted.measured.key, fitted.measured
        unit, scale = rate_unit(key)
        # The longest time is the lowest rate.
        low, high, middle = (
            (key.rates(fitted.sizes, times_us) / scale).tolist()
            for times_us in (fitted.high_us, fitted.low_us, fitted.latency_us)
        )
        line = Curve(
            label="fitted", x=fitted.sizes.tolist(), y=middle, low=low, high=high, color=BLUE
        )
        drawn = [line, _measured_curve("measured", measured, scale, ORANGE)]
        if key in flagged:
            drawn.append(_measured_curve("flagged, left out", flagged[key], scale, VERMILION))
        what = "message (bytes)" if key.spec.is_collective else key.moving
        plot = Plot(title=key.title, caption=caption, height=200)
        x, y = Column(title=what, name="size"), Column(title=unit, name="rate")
        charts.append(draw_curves(plot, drawn, x=x, y=y))
        caption = ""
    return charts


def _measured_curve(label: str, measured: MeasuredCurve, scale: float, color: str) -> Curve:
    rates = (measured.key.rates(measured.sizes, measured.latency_us) / scale).tolist()
    return Curve(label=label, x=measured.sizes.tolist(), y=rates, color=color)


def _work_chart(curves: Sequence[FittedCurve]) -> Chart:
    """Return all points of an operator over the FLOP of their calls, measured and fitted."""
    unit, scale = rate_unit(curves[0].measured.key)
    columns = [Column.words("what"), Column(title="FLOP of a call", name="flop")]
    columns.append(Column(title=unit, name="rate"))
    rows = []
    for label, is_fit in (("measured", False), ("fitted", True)):
        points = [_points(curve, is_fit=is_fit) for curve in curves]
        work, rates = (np.concatenate(parts) for parts in zip(*points, strict=True))
        rows += [(label, float(w), float(r)) for w, r in zip(work, rates / scale, strict=True)]
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


def _points(curve: FittedCurve, *, is_fit: bool) -> tuple[Any, Any]:
    measured = curve.measured
    times_us = curve.at_points_us if is_fit else measured.latency_us
    return measured.key.work(measured.sizes), measured.key.rates(measured.sizes, times_us)


def rate_unit(key: CurveKey) -> tuple[str, float]:
    """Return the unit a rate is given in, and how many per second are one of it."""
    return ("TFLOP/s", 1e12) if key.has_flops else ("GB/s", 1e9)


def _place(curve: FittedCurve) -> tuple[str, str, str]:
    key = curve.measured.key
    return key.operator, key.device, key.topology


def _section(
    curves: Sequence[FittedCurve], max_panels: int, flagged: Mapping[CurveKey, MeasuredCurve]
) -> Section:
    operator, device, topology = _place(curves[0])
    key = curves[0].measured.key
    unit, _ = rate_unit(key)
    what = "message" if key.spec.is_collective else key.moving
    caption = f"Points are measured ({unit} over {what}); the line is the predictor's answer with"
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
        table=_table(curves, unit),
    )


def _figure(curves: Sequence[FittedCurve]) -> Figure:
    num_columns = min(len(curves), _PANELS_IN_ROW)
    num_rows = -(-len(curves) // num_columns)
    size = (WIDTH_INCHES, _LEGEND_INCHES + num_rows * _PANEL_INCHES * (3 / num_columns) ** 0.5)
    figure = Figure(figsize=size, layout="constrained")
    all_axes = np.ravel(figure.subplots(num_rows, num_columns, squeeze=False))
    for axes, curve in zip(all_axes, curves, strict=False):
        _draw(axes, curve)
    for axes in all_axes[len(curves) :]:
        axes.set_visible(False)
    handles, names = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names))
    return figure


def _draw(axes: Any, curve: FittedCurve) -> None:
    measured, key = curve.measured, curve.measured.key
    unit, scale = rate_unit(key)
    # The longest time is the lowest rate.
    low, high, middle = (
        key.rates(curve.sizes, times_us) / scale
        for times_us in (curve.high_us, curve.low_us, curve.latency_us)
    )
    axes.fill_between(curve.sizes, low, high, color=BLUE, alpha=0.18, linewidth=0)
    axes.plot(curve.sizes, middle, color=BLUE, label="fitted, with its 90 % interval")
    axes.plot(
        measured.sizes,
        key.rates(measured.sizes, measured.latency_us) / scale,
        "o",
        color=ORANGE,
        markeredgecolor=INK,
        markeredgewidth=0.4,
        label="measured",
    )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=5))
    axes.xaxis.set_minor_formatter(NullFormatter())
    formatter = _format_bytes if key.spec.is_collective else _format_count
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: formatter(value)))
    axes.set_ylim(bottom=0)
    axes.grid(visible=True)
    axes.set_title(key.title, fontsize=9)
    axes.set_xlabel("message (bytes)" if key.spec.is_collective else key.moving)
    axes.set_ylabel(unit)


def _format_bytes(value: float) -> str:
    for size, unit in ((2**30, "Gi"), (2**20, "Mi"), (2**10, "Ki")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _format_count(value: float) -> str:
    return f"{value:,.6g}"


def _table(curves: Sequence[FittedCurve], unit: str) -> DataTable:
    rows = []
    for curve in curves:
        key, measured = curve.measured.key, curve.measured
        _, scale = rate_unit(key)
        errors = np.abs(curve.error_ratio)
        rates = key.rates(measured.sizes, measured.latency_us) / scale
        rows.append(
            (
                key.title,
                f"{len(measured.sizes):,}",
                format_number(float(rates.max())),
                f"{float(np.median(errors)):.1%}",
                f"{float(errors.max()):.1%}",
                curve.provenance,
            )
        )
    headers = ("curve", "points", f"highest ({unit})", "median error", "worst error", "rests on")
    return DataTable(headers=headers, rows=rows, text_columns=(5,))
