"""Our kinds of charts, as Vega-Lite specifications over a table's columns.

Colours that people with any colour vision can tell apart: Okabe and Ito, "Color Universal Design",
2008. Whether a chart is drawn on light or on dark is the page's business.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

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
LOG_CAPTION = f"An axis is logarithmic where its values span more than a factor of {_LOG_SPAN:g}."
# The wheel scrolls the page unless shift is held.
_ZOOM = {"type": "interval", "zoom": "wheel![event.shiftKey]"}
_FAINT = 0.12
# Axes that reach it say M and G: such numbers have no room next to one another.
_MILLION = 1e6
# A map of more boxes has no room for their values.
_MOST_WORDS = 150
# Points of a line with more are not drawn, yet tell their rows.
_MOST_POINTS = 60
# A row's place in its table, which the page adds: parts of a bar stand in the table's order.
ROW = "_row"
_DASHES = [5, 4]
# Pointed at, a mark tells its row of the table.
_TOLD: Mapping[str, Any] = {"tooltip": {"content": "data"}}

_NO_TABLE = Table(columns=(), rows=())

Spec = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """A value of an axis that is marked, with its name; up to `end` if there is one."""

    axis: Literal["x", "y"]
    value: float
    name: str = ""
    end: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """What to draw of a table: the names of its columns along `x` and `y`, and apart `by` colour.

    Its methods are the kinds of charts. `colors` are those of the values of `by`, in the order of
    the legend; others are given some. Axes of numbers begin at zero, or with `is_near` near them.
    """

    title: str
    table: Table = _NO_TABLE
    x: str = ""
    y: str = ""
    by: str = ""
    colors: Mapping[str, str] = field(default_factory=dict)
    caption: str = ""
    rules: Sequence[Rule] = ()
    height: int = _HEIGHT
    is_near: bool = False

    def lines(
        self,
        *,
        band: tuple[str, str] | None = None,
        hollow: str = "",
        dashed: Sequence[str] = (),
        dotted: Sequence[str] = (),
        is_step: bool = False,
    ) -> Chart:
        """Return lines of `y` over `x`, one for each value of `by`; with points if they are few.

        `band` names the columns of the bounds around each line, `hollow` a column that is true
        where a point is a ring, `dashed` the lines that are dashed, `dotted` those that are points
        alone, next to lines without points. A value of `is_step` lasts until the next.
        """
        color = self._color()
        encoding: Spec = {"x": self._axis(self.x), "y": self._axis(self.y), **color}
        layers: list[Spec] = []
        if band:
            low, high = band
            edges = {"y": {**encoding["y"], "field": low}, "y2": {"field": high}}
            layers.append(_layer("area", {**encoding, **edges}, opacity=0.18))
        names = self._names() if dashed else []
        dashes = [_DASHES if name in dashed else [1, 0] for name in names]
        scale = {"scale": {"domain": names, "range": dashes}}
        dash = {"strokeDash": {"field": self.by, **scale, **self._legend()}} if dashed else {}
        course = {"interpolate": "step-after"} if is_step else {}
        apart = f"indexof({list(dotted)}, datum[{self.by!r}])"
        line = _layer("line", {**encoding, **dash}, **course)
        layers.append({**line, "transform": [{"filter": f"{apart} < 0"}]} if dotted else line)
        points = dict(encoding)
        if hollow:
            ring = {"test": f"datum[{hollow!r}]", "value": "transparent"}
            points["fill"] = {"condition": ring, **color["color"]}
        num_lines = _count(self.table, self.by) or 1
        is_seen = not is_step and len(self.table.rows) <= _MOST_POINTS * num_lines
        looks = {"size": 36 if is_seen else 9, "opacity": 1 if is_seen else 0}
        mark = _layer("point", points, filled=not hollow, **looks, **_TOLD)
        layers.append({**mark, "transform": [{"filter": f"{apart} >= 0"}]} if dotted else mark)
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
            line = _layer("line", {**axes, **self._front_color(front)}, strokeWidth=1.5)
            layers.append({**line, "transform": [{"filter": f"datum[{front!r}] !== ''"}]})
        if label:
            words = {**axes, "text": {"field": label}}
            layers.append(_layer("text", words, align="left", dx=6, fontSize=10))
        if diagonal:
            numbers = [*_numbers(self.table, self.x), *_numbers(self.table, self.y)]
            least, most = (of(numbers, default=1) for of in (min, max))
            ends = {"x": least, "y": least, "x2": most, "y2": most}
            places = {axis: {"datum": value} for axis, value in ends.items()}
            layers.append(_once("rule", places, strokeDash=_DASHES, opacity=0.6))
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
            encoding["order"] = {"field": ROW, "type": "quantitative"}
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

    def boxes(self, text: str) -> Chart:
        """Return boxes where rows `y` and columns `x` meet, coloured `by` words, with a text."""
        return self._grid(self._color(), {"text": {"field": text}, "color": {"value": "#ffffff"}})

    def heat_map(self, value: str) -> Chart:
        """Return boxes where rows `y` and columns `x` meet, coloured by the value in them."""
        number = self.table.column(value)
        shade: Spec = {"field": value, "type": "quantitative", "title": number.title}
        numbers = _numbers(self.table, value)
        is_log = _is_log(numbers)
        scale = {"scheme": "viridis", "type": "log" if is_log else "linear"}
        shade |= {"scale": scale, "legend": {"format": _format(number)}}
        least, most = min(numbers, default=0), max(numbers, default=0)
        middle = (least * most) ** 0.5 if is_log else (least + most) / 2
        dark = {"test": f"datum[{value!r}] > {middle}", "value": "#16191d"}
        text = {"field": value, "type": "quantitative", "format": _format(number)}
        words = {"text": text, "color": {"condition": dark, "value": "#ffffff"}}
        has_words = len(self.table.rows) <= _MOST_WORDS
        return self._grid({"color": shade}, words if has_words else {})

    def _grid(self, shade: Spec, words: Spec) -> Chart:
        """Return boxes where rows and columns meet, with words on them if there are any."""
        columns = self._boxes(self.x, "ordinal", orient="top", labelAngle=0, labelLimit=120)
        place: Spec = {"x": columns, "y": self._rows()}
        layers = [_layer("rect", {**place, **shade}, **_TOLD)]
        if words:
            layers.append(_layer("text", {**place, **words}, fontSize=10))
        height = _rows_height(_count(self.table, self.y)) + 2 * _ROW
        return self._chart({"layer": layers}, height=height)

    def spans(self, end: str) -> Chart:
        """Return spans from `x` to `end` along the rows `y`: a Gantt chart."""
        start = {**self._axis(self.x), "scale": {"type": "linear", "zero": not self.is_near}}
        ends = {"x": start, "x2": {"field": end}}
        encoding = {"y": self._rows(), **ends, **self._color()}
        layer = _layer("bar", encoding, **_TOLD)
        zoom = {"name": "zoom", "select": {**_ZOOM, "encodings": ["x"]}, "bind": "scales"}
        spec = {"layer": [{**layer, "params": [zoom]}]}
        return self._chart(spec, height=_rows_height(_count(self.table, self.y)))

    def _chart(self, spec: Spec, *, height: int = 0, thinned: tuple[str, ...] = ()) -> Chart:
        if self.rules:
            marked = [layer for rule in self.rules for layer in _draw_rule(rule)]
            spec = {**spec, "layer": [*spec["layer"], *marked]}
        whole = {"$schema": _SCHEMA, "width": "container", "height": height or self.height, **spec}
        return Chart(
            title=self.title, spec=whole, table=self.table, caption=self.caption, thinned=thinned
        )

    def _axis(self, name: str, *, log: bool | None = None) -> Spec:
        """Return the channel of numbers along an axis."""
        column = self.table.column(name)
        numbers = _numbers(self.table, name)
        # Of shares the whole is what one looks for.
        is_wide = column.unit != SHARE and _is_log(numbers)
        is_log = is_wide if log is None else log and min(numbers, default=0) > 0
        linear = {"type": "linear", "zero": not self.is_near}
        scale = {"type": "log", "nice": False} if is_log else linear
        channel = {"field": name, "type": "quantitative", "title": column.title, "scale": scale}
        return {**channel, "axis": _axis_format(self.table, name)}

    def _rows(self) -> Spec:
        return self._boxes(self.y, "nominal", labelLimit=260)

    def _boxes(self, name: str, kind: str, **looks: Any) -> Spec:
        """Return the channel of rows or columns: words in the table's order, numbers in their own.

        Of too many numbers some are not written.
        """
        title, sort = self.table.column(name).title or None, None
        if _numbers(self.table, name):
            sort, looks = "ascending", {**looks, "labelOverlap": True}
        return {"field": name, "type": kind, "title": title, "sort": sort, "axis": looks}

    def _color(self) -> Spec:
        if not self.by:
            return {"color": {"value": BLUE}}
        names = self._names()
        shown = [name for name in self.colors if name in names]
        shown += [name for name in names if name not in shown]
        range_ = [self.colors.get(name, SERIES[n % len(SERIES)]) for n, name in enumerate(shown)]
        color = {"field": self.by, "type": "nominal", **self._legend()}
        return {"color": {**color, "scale": {"domain": shown, "range": range_}}}

    def _legend(self) -> Spec:
        legend = {"orient": "bottom", "columns": 4, "labelLimit": 320, "symbolOpacity": 1}
        return {"title": self.table.column(self.by).title, "legend": legend}

    def _front_color(self, front: str) -> Spec:
        """Return the channels of lines: in the colours of points where each is of one of these."""
        color, names = self._color()["color"], {*self.table.values(front), ""}
        if self.by and names <= {*self._names(), ""}:
            return {"color": {**color, "field": front}}
        return {"detail": {"field": front}, "color": {"value": GREY}}

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


def _draw_rule(rule: Rule) -> list[Spec]:
    place: Spec = {rule.axis: {"datum": rule.value}}
    if rule.end is not None:
        place[f"{rule.axis}2"] = {"datum": rule.end}
        return [_once("rect", place, opacity=0.14, color=BLUE)]
    drawn = [_once("rule", place, strokeDash=_DASHES, opacity=0.6)]
    if rule.name:
        at = {"x": {"value": 4}} if rule.axis == "y" else {"y": {"value": 8}}
        looks = {"align": "left", "fontSize": 10, "dy": -6 if rule.axis == "y" else 0, "dx": 4}
        drawn.append(_once("text", {**place, **at, "text": {"value": rule.name}}, **looks))
    return drawn


def _layer(mark: str, encoding: Mapping[str, Any], **options: Any) -> Spec:
    return {"mark": {"type": mark, **options}, "encoding": dict(encoding)}


def _once(mark: str, encoding: Mapping[str, Any], **options: Any) -> Spec:
    """Return a layer of one mark, not of one for each row."""
    return {**_layer(mark, encoding, **options), "data": {"values": [{}]}}


def _numbers(table: Table, name: str) -> list[float]:
    return [value for value in table.values(name) if isinstance(value, int | float)]


def _is_log(numbers: Sequence[float]) -> bool:
    """Return whether numbers span so much that their logarithms are shown."""
    least = min(numbers, default=0)
    return least > 0 and max(numbers) / least > _LOG_SPAN


def _count(table: Table, name: str) -> int:
    return len(dict.fromkeys(table.values(name))) if name else 0


def _axis_format(table: Table, name: str) -> Spec:
    if table.column(name).unit == SHARE:
        return {"format": ".3~%"}
    return {"format": "~s"} if max(_numbers(table, name), default=0) >= _MILLION else {}


def _format(column: Column) -> str:
    return ".1%" if column.unit == SHARE else ",.6~r"


def _rows_height(num_rows: int) -> int:
    return min(max(num_rows, 2) * _ROW, _MOST_HEIGHT)
