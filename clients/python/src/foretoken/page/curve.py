"""Charts of numbers that are at hand as curves, bars and parts, of which the tables are made."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from foretoken.domain.metrics.metric import SHARE
from foretoken.page.block import Chart, Column, Table
from foretoken.page.chart import GREY, Plot


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Values at places; those of `is_hollow` are drawn as rings, `low` and `high` are bounds.

    One that `is_dotted` has points and no line, next to others that have a line alone.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: str = ""
    is_dashed: bool = False
    is_dotted: bool = False
    is_hollow: Sequence[bool] = ()
    low: Sequence[float] = ()
    high: Sequence[float] = ()


_ROW = Column.words("", "row")


def _ends(of: Column) -> list[Column]:
    """Return the columns of the bounds of a figure."""
    return [replace(of, title=f"{of.title}, {end}", name=end) for end in ("low", "high")]


def draw_curves(
    plot: Plot, curves: Sequence[Curve], *, x: Column, y: Column, is_step: bool = False
) -> Chart:
    """Return the lines of curves as a plot says, whose table, axes and colours are made of them."""
    columns = [Column.words("curve", "label"), x, y]
    has_bounds = any(len(curve.low) for curve in curves)
    has_rings = any(curve.is_hollow for curve in curves)
    if has_bounds:
        columns += _ends(y)
    if has_rings:
        columns.append(Column(title="misses a target", name="hollow"))
    rows = []
    for curve in curves:
        parts: list[Iterable[float | bool]] = [curve.x, curve.y]
        if has_bounds:
            parts += [bound if len(bound) else curve.y for bound in (curve.low, curve.high)]
        if has_rings:
            parts.append(curve.is_hollow or [False] * len(curve.x))
        rows += [(curve.label, *row) for row in zip(*parts, strict=True)]
    drawn = replace(
        plot,
        table=Table(columns=columns, rows=rows),
        x=x.name,
        y=y.name,
        by="label" if len(curves) > 1 else "",
        colors={curve.label: curve.color for curve in curves if curve.color},
    )
    return drawn.lines(
        band=("low", "high") if has_bounds else None,
        hollow="hollow" if has_rings else "",
        dashed=[curve.label for curve in curves if curve.is_dashed],
        dotted=[curve.label for curve in curves if curve.is_dotted],
        is_step=is_step,
    )


def draw_parts(
    plot: Plot, rows: Mapping[str, Mapping[str, float]], unit: Column, *, part: str = "part"
) -> Chart:
    """Return a horizontal bar for every row, of its parts in the order of the plot's colours."""
    names = dict.fromkeys((*plot.colors, *(name for parts in rows.values() for name in parts)))
    cells = [
        (label, name, parts[name])
        for label, parts in rows.items()
        for name in names
        if parts.get(name)
    ]
    table = Table(columns=(_ROW, Column.words(part, "part"), unit), rows=cells)
    return replace(plot, table=table, x=unit.name, y="row", by="part").bars()


def draw_spans(plot: Plot, table: Table) -> Chart:
    """Return a Gantt chart: the first words of a table are its rows, the next what a span is.

    Its first numbers are where spans begin, the next where they end.
    """
    (row, kind, *_), (start, end, *_) = (
        [column.name for column in table.columns if column.is_text is is_text]
        for is_text in (True, False)
    )
    return replace(plot, table=table, x=start, y=row, by=kind).spans(end)


def draw_counts(plot: Plot, values: Mapping[str, float], unit: Column, total: float = 0) -> Chart:
    """Return a bar for each name with its share of the `total` (0: of their sum)."""
    whole = total or sum(values.values()) or 1
    rows = [(name, value, value / whole) for name, value in values.items()]
    table = Table(columns=(_ROW, unit, Column(title="share", unit=SHARE)), rows=rows)
    colors = {name: plot.colors.get(name, GREY) for name in values}
    return replace(plot, table=table, x=unit.name, y="row", by="row", colors=colors).bars()


def draw_intervals(
    plot: Plot, values: Mapping[str, tuple[float, float, float]], unit: Column
) -> Chart:
    """Return a bar for each name with its interval; `values` are low, value and high."""
    rows = [(name, value, low, high) for name, (low, value, high) in values.items()]
    table = Table(columns=(_ROW, unit, *_ends(unit)), rows=rows)
    return replace(plot, table=table, x=unit.name, y="row").bars(bounds=("low", "high"))
