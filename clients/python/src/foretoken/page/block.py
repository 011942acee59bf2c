"""What pages are made of: blocks over tables and metrics, as data.

`foretoken.page.html` writes them as HTML, `to_json` gives the same to a live page or a notebook.
Numbers stay numbers in the unit of their column; how they are written follows from it.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from operator import attrgetter, itemgetter
from typing import Any, Literal, Self

from foretoken.domain.metrics.metric import SHARE, Better, Metric, is_said, title_of
from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.metrics.registry import METRICS

Tone = Literal["", "alert", "calm"]
Scalar = str | float | int | bool | None


def number_text(value: Scalar, unit: str = "") -> str:
    """Return a value as pages write it; `SHARE` in per cent, None as a dash."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if not isfinite(value):
        return "-"
    if unit == SHARE:
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else format_number(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """One number to be seen first: of a metric, or of a label and a unit.

    `low` and `high` are the bounds of its interval, none where `high` is 0; `note` is what else
    there is to say of it.
    """

    label: str
    value: Scalar
    unit: str = ""
    name: str = ""
    low: float | None = None
    high: float | None = None
    note: str = ""

    @classmethod
    def of(cls, name: str, record: Any, note: str = "", label: str = "", **more: Any) -> Self:
        """Return the value of a metric in a report or a row of a table."""
        metric = METRICS[name]
        value = metric.value(record)
        label = label or metric.label
        return cls(label=label, value=value, unit=metric.unit, name=name, note=note, **more)

    @property
    def text(self) -> str:
        """The value with its unit, where that says more than the label."""
        text = number_text(self.value, self.unit)
        return text if is_said(self.label, self.unit) else f"{text} {self.unit}"

    @property
    def interval(self) -> str:
        """The interval in words; empty without one."""
        if not self.high or self.low is None:
            return ""
        return f"{number_text(self.low, self.unit)} to {number_text(self.high, self.unit)}"


@dataclass(frozen=True, slots=True)
class Figures:
    """The numbers to be seen first."""

    values: Sequence[Value]


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column of a table: of numbers in a unit, or of words.

    `name` is its key in JSON and in charts: letters, digits and underscores, of the title where
    none is given. A record has its cell by that name, or by what `read` returns of it; a plain
    value is its own cell.
    """

    title: str
    name: str = ""
    unit: str = ""
    better: Better = ""
    is_text: bool = False
    definition: str = ""
    read: "Callable[[Any], Scalar | Cell] | None" = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Give it a name."""
        name = re.sub(r"\W+", "_", self.name or self.title, flags=re.ASCII).strip("_")
        object.__setattr__(self, "name", name or "name")

    @classmethod
    def of(cls, metric: Metric | str, label: str = "") -> Self:
        """Return the column of a metric, by its name or as pages write it."""
        metric = METRICS[metric] if isinstance(metric, str) else metric
        return cls(
            title=title_of(label or metric.label, metric.unit),
            name=metric.name,
            unit=metric.unit,
            better=metric.better,
            definition=metric.definition,
            read=metric.value,
        )

    @classmethod
    def words(
        cls, title: str, name: str = "", read: "Callable[[Any], Scalar | Cell] | None" = None
    ) -> Self:
        """Return a column of words."""
        return cls(title=title, name=name, is_text=True, read=read)

    def cell(self, record: Any) -> "Scalar | Cell":
        """Return what a record has in this column."""
        if self.read:
            return self.read(record)
        if isinstance(record, str | int | float):
            return record
        cell: Scalar | Cell
        cell = record[self.name] if isinstance(record, Mapping) else getattr(record, self.name)
        return cell

    def part(self, part: int | str) -> Self:
        """Return the column of records that have those of this one at a place, or by a name."""
        of = attrgetter(part) if isinstance(part, str) else itemgetter(part)
        return replace(self, read=lambda record: self.cell(of(record)))

    def text(self, cell: "Scalar | Cell") -> str:
        """Return a cell as pages write it."""
        return number_text(cell.value if isinstance(cell, Cell) else cell, self.unit)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A cell that stands out; its text must say why without its colour."""

    value: Scalar
    tone: Tone

    def __str__(self) -> str:
        """Return the value as a page without a unit writes it."""
        return number_text(self.value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table whose first column names the rows; pages sort it, and filter it where it is long."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Scalar | Cell]]

    @classmethod
    def of(cls, records: Iterable[Any], *columns: Column) -> Self:
        """Return a row for every record, of what it has in each column."""
        rows = [tuple(column.cell(record) for column in columns) for record in records]
        return cls(columns=columns, rows=rows)

    @classmethod
    def listed(
        cls,
        headers: Sequence[str],
        rows: Iterable[Sequence[Scalar | Cell]],
        text_columns: Collection[int] = (),
    ) -> Self:
        """Return rows under headings; the first column, and those of these places, are of words."""
        seen: Counter[str] = Counter()
        columns = []
        for place, title in enumerate(headers):
            column = Column(title=title, is_text=place == 0 or place in text_columns)
            seen[column.name] += 1
            again = f"_{seen[column.name]}" if seen[column.name] > 1 else ""
            columns.append(replace(column, name=f"{column.name}{again}"))
        return cls(columns=columns, rows=list(rows))

    def column(self, name: str) -> Column:
        """Return a column by its name."""
        return next(column for column in self.columns if column.name == name)

    def values(self, name: str) -> list[Scalar]:
        """Return the values of a column by its name."""
        place = [column.name for column in self.columns].index(name)
        return [_plain(row[place]) for row in self.rows]

    def texts(self) -> list[list[str]]:
        """Return what a page writes in its rows."""
        return [
            [column.text(cell) for column, cell in zip(self.columns, row, strict=True)]
            for row in self.rows
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A picture of a table: a Vega-Lite specification without its data, which are the table's rows.

    Fields of the specification are the names of columns. `foretoken.page.chart` has our kinds.
    `caption` says what it shows; with the table it stands for the picture where none is seen.
    `thinned` names the columns of a scatter's axes: of points on one pixel one is drawn.
    """

    title: str
    spec: Mapping[str, Any]
    table: Table
    caption: str = ""
    thinned: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; what is between backticks is code. `alert` stands out, `code` stays as it is."""

    text: str
    tone: Literal["", "alert", "code"] = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page under a title; one that is not `open` starts folded."""

    title: str
    blocks: "Sequence[Block]"
    open: bool = True


Block = Figures | Table | Chart | Text | Section


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """A page: what it is about, and its blocks, the answer first.

    `about` are lines with their names: the question, what the answer rests on, what would narrow
    it. `subtitle` says what made the page.
    """

    title: str
    subtitle: str = ""
    about: Sequence[tuple[str, str]] = ()
    blocks: Sequence[Block] = field(default_factory=tuple)


def to_json(block: Block | Page) -> dict[str, Any]:
    """Return a page or a block as plain data for `json.dumps`; `kind` says what it is.

    A table's rows are lists of plain values, and `tones` those of cells that stand out by row and
    column; what is no number (NaN, infinite) is None.
    """
    data: dict[str, Any]
    match block:
        case Table():
            data = _table_to_json(block)
        case Figures():
            values = ((asdict(value), value) for value in block.values)
            data = {
                "values": [v | {"value": _plain(of.value), "text": of.text} for v, of in values]
            }
        case Chart():
            spec = {"spec": block.spec, "thinned": list(block.thinned)}
            data = {"caption": block.caption, **spec, "table": to_json(block.table)}
        case Text():
            data = {"text": block.text, "tone": block.tone}
        case Section():
            data = {"open": block.open, "blocks": [to_json(item) for item in block.blocks]}
        case Page():
            about = {"subtitle": block.subtitle, "about": [list(line) for line in block.about]}
            data = about | {"blocks": [to_json(item) for item in block.blocks]}
    title = {} if isinstance(block, Table | Figures | Text) else {"title": block.title}
    return {"kind": type(block).__name__.lower()} | title | data


def _plain(cell: Scalar | Cell) -> Scalar:
    value = cell.value if isinstance(cell, Cell) else cell
    # numpy's numbers are none of JSON's.
    if value is not None and hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not isfinite(value) else value


def _table_to_json(table: Table) -> dict[str, Any]:
    shown = ("name", "title", "unit", "better", "is_text")
    return {
        "columns": [{name: getattr(column, name) for name in shown} for column in table.columns],
        "rows": [[_plain(cell) for cell in row] for row in table.rows],
        "tones": {
            f"{row},{place}": cell.tone
            for row, cells in enumerate(table.rows)
            for place, cell in enumerate(cells)
            if isinstance(cell, Cell)
        },
    }
