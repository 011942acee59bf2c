"""Charts of the candidates of searches: two metrics against each other, and the best of both."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from foretoken.domain.metrics.registry import METRICS
from foretoken.page.block import Chart, Column, Scalar, Table
from foretoken.page.chart import GREY, SERIES, Plot, Rule
from foretoken.simulator.report.search_candidates import Row

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
    words: Mapping[str, Callable[[Row], str]]
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
    x, y = METRICS[front.x], METRICS[front.y]
    columns = [
        Column.words("candidate", "name"),
        Column.words("group"),
        Column.of(x),
        Column.of(y),
        *(Column.words(title) for title in looks.words),
        Column.words("Pareto front", "front"),
        Column.words("label"),
    ]
    if front.bounds:
        columns += [
            Column(title=f"{y.title}, {end}", name=end, unit=y.unit) for end in ("low", "high")
        ]
    cells = []
    for row in rows:
        group = looks.group(row)
        line = (group if looks.is_line_by_group else "on it") if row[front.column] else ""
        cell: list[Scalar] = [row["name"], group, x.value(row), y.value(row)]
        cell += [told(row) for told in looks.words.values()]
        cell += [line, looks.labels.get(row["name"], "")]
        if front.bounds:
            low, high = front.bounds(row)
            cell += [low, high] if high > 0 else [None, None]
        cells.append(cell)
    groups = dict.fromkeys(str(cell[1]) for cell in cells)
    plot = Plot(
        title=front.title,
        table=Table(columns=columns, rows=cells),
        x=columns[2].name,
        y=columns[3].name,
        by="group",
        colors=group_colors(groups),
        caption=front.caption,
        rules=rules,
        is_near=front.is_near,
        height=400,
    )
    bounds = ("low", "high") if front.bounds else None
    return plot.scatter(front="front", intervals=bounds, label="label")


def group_colors(groups: Collection[str]) -> dict[str, str]:
    """Return a colour for each group, grey for what is ruled out, which comes last."""
    named = [group for group in groups if group != RULED_OUT]
    colors = {group: SERIES[place % len(SERIES)] for place, group in enumerate(named)}
    return colors | ({RULED_OUT: GREY} if RULED_OUT in groups else {})
