"""Charts of the candidates of searches: two metrics against each other, and the best of both."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from foretoken.page.block import Chart, Column, Table
from foretoken.page.chart import GREY, SERIES, Plot, Rule
from foretoken.simulator.report.search_candidates import Row, bound_columns

RULED_OUT = "ruled out"
# More points of a kind than this make a page slow to open; the rest are left out evenly.
_MAX_POINTS = 2500


@dataclass(frozen=True, kw_only=True, slots=True)
class Front:
    """Two metrics, and the column that says which candidates nothing beats in both.

    `bounds` returns the bounds of `y` (none above 0: it has none). `is_near`: the axes begin near
    the points.
    """

    title: str
    x: str
    y: str
    column: str
    caption: str
    bounds: Callable[[Row], tuple[float, float]] | None = None
    is_near: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Looks:
    """How candidates are distinguished: the group that colours each, and words on each.

    `labels` are written next to the points of these names. `is_line_by_group`: a front for each.
    """

    group: Callable[[Row], str]
    words: Sequence[Column]
    labels: Mapping[str, str]
    is_line_by_group: bool = False


def front_charts(
    fronts: Sequence[Front], rows: Sequence[Row], looks: Looks, rules: Sequence[Sequence[Rule]] = ()
) -> list[Chart]:
    """Return the charts of those that have points; `rules` are marks of each."""
    placed = [[row for row in rows if row[front.x] and row[front.y] > 0] for front in fronts]
    marked = [*rules, *[()] * (len(fronts) - len(rules))]
    return [
        _front_chart(front, found, looks, marks)
        for front, found, marks in zip(fronts, placed, marked, strict=True)
        if found
    ]


def thin_rows(rows: Sequence[Row], names: Collection[str], most: int = _MAX_POINTS) -> list[Row]:
    """Return those with these names, and of the others as many as can be drawn, evenly."""
    others = [row for row in rows if row["name"] not in names]
    return [row for row in rows if row["name"] in names] + others[:: -(-len(others) // most) or 1]


def _front_chart(front: Front, rows: Sequence[Row], looks: Looks, rules: Sequence[Rule]) -> Chart:
    """Return the chart of candidates that have both metrics."""

    def line(row: Row) -> str:
        on_it = looks.group(row) if looks.is_line_by_group else "on it"
        return on_it if row[front.column] else ""

    bounds = bound_columns(front.y, front.bounds) if front.bounds else ()
    table = Table.of(
        rows,
        Column.words("candidate", "name"),
        Column.words("group", read=looks.group),
        *(Column.of(name) for name in (front.x, front.y)),
        *looks.words,
        Column.words("Pareto front", "front", line),
        Column.words("label", read=lambda row: looks.labels.get(row["name"], "")),
        *bounds,
    )
    plot = Plot(
        title=front.title,
        table=table,
        x=front.x,
        y=front.y,
        by="group",
        colors=group_colors(dict.fromkeys(map(str, table.values("group")))),
        caption=front.caption,
        rules=rules,
        is_near=front.is_near,
        height=400,
    )
    low_and_high = (bounds[0].name, bounds[1].name) if bounds else None
    return plot.scatter(front="front", intervals=low_and_high, label="label")


def group_colors(groups: Collection[str]) -> dict[str, str]:
    """Return a colour for each group, grey for what is ruled out, which comes last."""
    named = [group for group in groups if group != RULED_OUT]
    colors = {group: SERIES[place % len(SERIES)] for place, group in enumerate(named)}
    return colors | ({RULED_OUT: GREY} if RULED_OUT in groups else {})
