"""Our kinds of charts, as Vega-Lite specifications over a table's columns.

Colours that people with any colour vision can tell apart: Okabe and Ito, "Color Universal Design",
2008. Whether a chart is drawn on light or on dark is the page's business.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretoken.domain.metrics.metric import SHARE
from foretoken.page.block import Chart, Column, Table

BLUE, ORANGE, GREEN = "#0072b2", "#e69f00", "#009e73"
VERMILION, SKY, PURPLE = "#d55e00", "#56b4e9", "#cc79a7"
YELLOW, GREY = "#d8c92f", "#8f959c"
SERIES = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION)

_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
_HEIGHT, _ROW, _MOST_HEIGHT = 300, 22, 900
# An axis is logarithmic where its values span more than this.
_LOG_SPAN = 40.0
# The wheel scrolls the page unless shift is held.
_ZOOM = {"type": "interval", "zoom": "wheel![event.shiftKey]"}
_FAINT = 0.12
# A row's place in its table, which the page adds: parts of a bar stand in the table's order.
_ORDER = "_row"
_DASHES = [5, 4]
# Pointed at, a mark tells its row of the table.
_TOLD: Mapping[str, Any] = {"tooltip": {"content": "data"}}

Spec = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """What to draw of a table: the names of its columns along `x` and `y`, and apart `by` colour.

    Its methods are the kinds of charts. `colors` are those of the values of `by`, in the order of
    the legend; others are given some.
    """

    title: str
    table: Table
    x: str
    y: str
    by: str = ""
    colors: Mapping[str, str] = field(default_factory=dict)
    caption: str = ""

    def lines(
        self,
        *,
        band: tuple[str, str] | None = None,
        limit: float | None = None,
        hollow: str = "",
        dashed: Sequence[str] = (),
    ) -> Chart:
        """Return lines of `y` over `x` with their points, one for each value of `by`.

        `band` names the columns of the bounds around each line, `hollow` a column that is true
        where a point is a ring, `limit` is a level across, `dashed` the lines that are dashed.
        """
        color = self._color()
        encoding: Spec = {"x": self._axis(self.x), "y": self._axis(self.y), **color}
        layers: list[Spec] = []
        if band:
            low, high = band
            edges = {"y": {**encoding["y"], "field": low}, "y2": {"field": high}}
            layers.append(_layer("area", {**encoding, **edges}, opacity=0.18))
        dash = {"strokeDash": self._dash(dashed)} if dashed else {}
        layers.append(_layer("line", {**encoding, **dash}))
        points = dict(encoding)
        if hollow:
            ring = {"test": f"datum[{hollow!r}]", "value": "transparent"}
            points["fill"] = {"condition": ring, **color["color"], "legend": None}
        layers.append(_layer("point", points, filled=not hollow, size=36, **_TOLD))
        if limit is not None:
            rule = _layer("rule", {"y": {"datum": limit}}, strokeDash=_DASHES, opacity=0.6)
            layers.append(rule)
        return self._chart({"layer": self._with_params(layers)})

    def scatter(
        self,
        *,
        front: str = "",
        intervals: tuple[str, str] | None = None,
        label: str = "",
        diagonal: bool = False,
        log: bool | None = None,
    ) -> Chart:
        """Return a point a row; points that fall on one pixel are drawn once.

        `front` names a column of words that are equal along a line through points (empty: on no
        line), `intervals` the columns of the bounds of `y`, `label` a column of words next to
        points. `diagonal` draws where both axes are equal.
        """
        color = self._color()
        axes: Spec = {"x": self._axis(self.x, log=log), "y": self._axis(self.y, log=log)}
        points = {**axes, **color}
        layers = [_layer("point", points, filled=True, size=30, opacity=0.75, **_TOLD)]
        if intervals:
            low, high = intervals
            bounds = {"y": {**axes["y"], "field": low}, "y2": {"field": high}}
            layers.append(_layer("rule", {**axes, **bounds, **color}, opacity=0.5))
        if front:
            line = _layer("line", {**axes, **color, "detail": {"field": front}}, strokeWidth=1.5)
            layers.append({**line, "transform": [{"filter": f"datum[{front!r}] !== ''"}]})
        if label:
            words = {**axes, "text": {"field": label}}
            layers.append(_layer("text", words, align="left", dx=6, fontSize=10))
        if diagonal:
            numbers = [*_numbers(self.table, self.x), *_numbers(self.table, self.y)]
            least, most = (of(numbers, default=1) for of in (min, max))
            ends = {"x": least, "y": least, "x2": most, "y2": most}
            places = {axis: {"datum": value} for axis, value in ends.items()}
            layers.append(_layer("rule", places, strokeDash=_DASHES, opacity=0.6))
        return self._chart({"layer": self._with_params(layers)}, thinned=(self.x, self.y))

    def bars(self, *, bounds: tuple[str, str] | None = None, stacked: bool = True) -> Chart:
        """Return horizontal bars of length `x`, one for each `y`, of parts by `by`.

        `bounds` names the columns of each bar's interval; bars that are not `stacked` stand next to
        one another.
        """
        rows = self._rows()
        length: Spec = {**self._axis(self.x), "scale": {"type": "linear"}}
        length["stack"] = "zero" if stacked else None
        encoding: Spec = {"y": rows, "x": length, **self._color()}
        num_rows = _count(self.table, self.y)
        if self.by and stacked:
            encoding["order"] = {"field": _ORDER, "type": "quantitative"}
        elif self.by:
            encoding["yOffset"] = {"field": self.by, "sort": None}
            num_rows *= max(1, _count(self.table, self.by) // 2)
        layers = [_layer("bar", encoding, **_TOLD)]
        if bounds:
            low, high = bounds
            ends = {"x": {"field": low, "type": "quantitative"}, "x2": {"field": high}}
            layers.append(_layer("rule", {"y": rows, **ends}, strokeWidth=2))
        return self._chart({"layer": layers}, height=_rows_height(num_rows))

    def histogram(self) -> Chart:
        """Return vertical bars of height `y` at each `x`, which are numbers or words."""
        axis: Spec = {"field": self.x, "type": "ordinal", "sort": None}
        axis |= {"title": self.table.column(self.x).title}
        axis["axis"] = {"labelOverlap": True, "labelAngle": 0, **_axis_format(self.table, self.x)}
        length = {**self._axis(self.y), "stack": "zero", "scale": {"type": "linear"}}
        encoding = {"x": axis, "y": length, **self._color()}
        return self._chart({"layer": [_layer("bar", encoding, **_TOLD)]})

    def heat_map(self, value: str) -> Chart:
        """Return boxes where rows `y` and columns `x` meet, coloured by the value in them."""
        across: Spec = {"field": self.x, "type": "ordinal", "sort": None}
        across |= {"title": self.table.column(self.x).title}
        across["axis"] = {"orient": "top", "labelAngle": 0, "labelLimit": 120}
        number = self.table.column(value)
        place: Spec = {"x": across, "y": self._rows()}
        shade: Spec = {"field": value, "type": "quantitative", "title": number.title}
        shade |= {"scale": {"scheme": "viridis"}, "legend": {"format": _format(number)}}
        text = {"field": value, "type": "quantitative", "format": _format(number)}
        numbers = _numbers(self.table, value)
        middle = (min(numbers, default=0) + max(numbers, default=0)) / 2
        dark = {"test": f"datum[{value!r}] > {middle}", "value": "#16191d"}
        ink = {"condition": dark, "value": "#ffffff"}
        layers = [
            _layer("rect", {**place, "color": shade}, **_TOLD),
            _layer("text", {**place, "text": text, "color": ink}, fontSize=10),
        ]
        height = _rows_height(_count(self.table, self.y)) + 2 * _ROW
        return self._chart({"layer": layers}, height=height)

    def spans(self, end: str) -> Chart:
        """Return spans from `x` to `end` along the rows `y`: a Gantt chart."""
        start = {**self._axis(self.x), "scale": {"type": "linear", "zero": True}}
        ends = {"x": start, "x2": {"field": end}}
        encoding = {"y": self._rows(), **ends, **self._color()}
        layer = _layer("bar", encoding, **_TOLD)
        zoom = {"name": "zoom", "select": {**_ZOOM, "encodings": ["x"]}, "bind": "scales"}
        spec = {"layer": [{**layer, "params": [zoom]}]}
        return self._chart(spec, height=_rows_height(_count(self.table, self.y)))

    def _chart(self, spec: Spec, *, height: int = _HEIGHT, thinned: tuple[str, ...] = ()) -> Chart:
        whole = {"$schema": _SCHEMA, "width": "container", "height": height, **spec}
        return Chart(
            title=self.title, spec=whole, table=self.table, caption=self.caption, thinned=thinned
        )

    def _axis(self, name: str, *, log: bool | None = None) -> Spec:
        """Return the channel of numbers along an axis."""
        column = self.table.column(name)
        numbers = _numbers(self.table, name)
        least, most = min(numbers, default=0), max(numbers, default=0)
        is_log = least > 0 and (most / least > _LOG_SPAN if log is None else log)
        scale = {"type": "log", "nice": False} if is_log else {"type": "linear", "zero": False}
        channel = {"field": name, "type": "quantitative", "title": column.title, "scale": scale}
        return {**channel, "axis": _axis_format(self.table, name)}

    def _rows(self) -> Spec:
        title = self.table.column(self.y).title
        rows: Spec = {"field": self.y, "type": "nominal", "sort": None, "title": title or None}
        return {**rows, "axis": {"labelLimit": 260}}

    def _color(self) -> Spec:
        if not self.by:
            return {"color": {"value": BLUE}}
        names = self._names()
        shown = [name for name in self.colors if name in names]
        shown += [name for name in names if name not in shown]
        range_ = [self.colors.get(name, SERIES[n % len(SERIES)]) for n, name in enumerate(shown)]
        legend = {"orient": "bottom", "columns": 4, "labelLimit": 320, "symbolOpacity": 1}
        color = {"field": self.by, "type": "nominal", "title": self.table.column(self.by).title}
        return {"color": {**color, "scale": {"domain": shown, "range": range_}, "legend": legend}}

    def _dash(self, dashed: Sequence[str]) -> Spec:
        names = self._names()
        dashes = [_DASHES if name in dashed else [1, 0] for name in names]
        return {"field": self.by, "scale": {"domain": names, "range": dashes}, "legend": None}

    def _names(self) -> list[str]:
        return [str(name) for name in dict.fromkeys(self.table.values(self.by))]

    def _with_params(self, layers: list[Spec]) -> list[Spec]:
        """Let the picture be zoomed, and its legend pick what does not fade."""
        zoom: Spec = {"name": "zoom", "select": _ZOOM, "bind": "scales"}
        layers[0]["params"] = [zoom]
        if self.by:
            picked = {"type": "point", "fields": [self.by]}
            layers[0]["params"].append({"name": "pick", "select": picked, "bind": "legend"})
            for layer in layers:
                if "color" in layer["encoding"]:
                    usual = layer["mark"].pop("opacity", 1)
                    shown = {"param": "pick", "value": usual}
                    faded = {"condition": shown, "value": _FAINT * usual}
                    layer["encoding"]["opacity"] = faded
        return layers


def _layer(mark: str, encoding: Mapping[str, Any], **options: Any) -> Spec:
    return {"mark": {"type": mark, **options}, "encoding": dict(encoding)}


def _numbers(table: Table, name: str) -> list[float]:
    return [value for value in table.values(name) if isinstance(value, int | float)]


def _count(table: Table, name: str) -> int:
    return len(dict.fromkeys(table.values(name)))


def _axis_format(table: Table, name: str) -> Spec:
    return {"format": ".3~%"} if table.column(name).unit == SHARE else {}


def _format(column: Column) -> str:
    return ".1%" if column.unit == SHARE else ",.6~r"


def _rows_height(num_rows: int) -> int:
    return min(max(num_rows, 2) * _ROW, _MOST_HEIGHT)
