"""What a metric is, and its values of one or more results as the rows of a table."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal

from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.results.report import Percentiles
from foretoken.domain.units import MS_PER_S, Quantity

Better = Literal["lower", "higher", ""]
# Where a metric is shown: tables of a terminal, of a page, of a comparison; the columns of a
# search's ranking; a pool of a cluster; the page's table of percentiles; a column of the table of
# requests.
Place = Literal[
    "terminal", "page", "comparison", "ranking", "pool", "percentiles", "requests", "limit"
]

SHARE = "share"
EVERYWHERE: tuple[Place, ...] = ("terminal", "page", "comparison")
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")
# What tables with one row per statistic have of them.
_ROW_STATISTICS = ("mean", "p50", "p90", "p99")
# Closer to 1 than this, a ratio is none; within this, it has three digits after the point.
_SAME_RATIO, _NEAR_RATIO = 0.0005, 0.1


@dataclass(frozen=True, slots=True)
class Metric:
    """One thing that results say, under one name and one label.

    `name` is its field in reports, its key in JSON and its column in tables; one with dots is a
    field of a field. `unit` is what it is written in, "share" a ratio from 0 to 1 that is written
    in per cent; a value counts `scale` of its own units to one of `unit`. A page writes it in s
    where it `is_long_on_page`. Tables leave a metric out where all values are `neutral`.

    `formula` is the definition as a function of the record it is made from, columns or numbers:
    `metrics/request.py`, `metrics/serving.py` and `metrics/training.py` say of which; `is_defined`
    says of which entries it is defined. `read` takes the value from a report of the types `of` that
    has no field of that name.
    """

    name: str
    label: str
    unit: str
    better: Better
    definition: str
    _: KW_ONLY
    shown: tuple[Place, ...] = ()
    scale: float = 1.0
    neutral: float | None = None
    is_long_on_page: bool = False
    statistics: tuple[str, ...] = _ROW_STATISTICS
    formula: Callable[[Any], Quantity] | None = None
    is_defined: Callable[[Any], Quantity] | None = None
    of: tuple[type, ...] = ()
    read: Callable[[Any], Any] | None = None

    @property
    def title(self) -> str:
        """The label with its unit, as the heading of a row or a column."""
        return title_of(self.label, self.unit)

    def is_of(self, record: object) -> bool:
        """Whether a report, or a row of a table, has this metric."""
        if isinstance(record, Mapping):
            return self.name in record
        return isinstance(record, self.of) if self.read else hasattr(record, self.name)

    def value(self, record: Any) -> Any:
        """Return the metric of a report or a row: a number, words, a summary or a mapping.

        None where there is no report, or no request had the latency.
        """
        if record is None:
            return None
        if isinstance(record, Mapping):
            return self.in_unit(record[self.name])
        value = self.read(record) if self.read else getattr(record, self.name)
        if isinstance(value, Percentiles) and not getattr(record, "num_completed", 1):
            return None
        return self.in_unit(value)

    def cell(self, record: Any) -> Any:
        """Return the metric of a report or a row as a terminal's table takes it: numbers stay."""
        value = self.value(record)
        return self.text(value) if self.unit == SHARE or value is None else value

    def words(self, record: Any) -> str:
        """Return the metric of a report or a row as a page writes it."""
        return self.text(self.value(record))

    def in_unit(self, value: Any) -> Any:
        """Return a number in the metric's unit, anything else as it is."""
        is_number = isinstance(value, int | float) and self.scale != 1
        return value / self.scale if is_number else value

    def statistic(self, summary: Percentiles, name: str) -> float:
        """Return the mean or a percentile of a summary in the metric's unit."""
        return float(self.in_unit(getattr(summary, name)))

    def on_page(self) -> "Metric":
        """Return the metric in the unit that pages write it in."""
        if not self.is_long_on_page:
            return self
        return replace(self, unit="s", scale=self.scale * MS_PER_S)

    def text(self, value: Any, digits: int = 3, decimals: int = 0) -> str:
        """Return a value as people read it."""
        if value is None:
            return "-"
        if self.unit == SHARE:
            return f"{value:.1%}"
        if isinstance(value, float):
            return format_number(value, digits, 0 if value.is_integer() else decimals)
        return f"{value:,}" if isinstance(value, int) else str(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One number of every result, a row of a table; None where a result has it not."""

    label: str
    metric: Metric
    values: tuple[Any, ...]

    @property
    def title(self) -> str:
        """The label with its unit."""
        return title_of(self.label, self.metric.unit)

    def texts(self, digits: int = 3, decimals: int = 0) -> tuple[str, ...]:
        """Return the values as people read them."""
        return tuple(self.metric.text(value, digits, decimals) for value in self.values)

    @property
    def ratios(self) -> tuple[float | None, ...]:
        """Every value over the first one's; None where one is missing or not positive."""
        first = self.values[0] or 0.0
        return tuple(
            value / first if value is not None and value >= 0 and first > 0 else None
            for value in self.values
        )

    def describe_ratio(self, place: int) -> str:
        """Return a result's ratio to the first one in words: `0.8x, better`."""
        ratio = self.ratios[place]
        if ratio is None:
            return "-"
        if abs(ratio - 1) < _SAME_RATIO:
            return "same"
        # Near 1 the third digit after the point still matters.
        text = f"{ratio:.3f}x" if abs(ratio - 1) < _NEAR_RATIO else f"{format_number(ratio)}x"
        if not self.metric.better:
            return text
        is_better = (ratio < 1) == (self.metric.better == "lower")
        return f"{text}, {'better' if is_better else 'worse'}"


def title_of(label: str, unit: str) -> str:
    """Return a label with its unit, which is not said twice: `TTFT p99 (ms)`, `tokens/s`."""
    return label if is_said(label, unit) else f"{label} ({unit})"


def is_said(label: str, unit: str) -> bool:
    """Return whether a label says the unit already, as a word of its own; a share needs none."""
    return unit in {"", SHARE} or bool(re.search(rf"(?<!\w){re.escape(unit)}(?!\w)", label))


def figures_of(metric: Metric, records: Sequence[Any], prefix: str = "") -> list[Figure]:
    """Return the figures of one metric: one, or one per statistic of a summary, key of a mapping.

    Without any where the metric plays no part in all records.
    """
    values = [metric.value(record) for record in records]
    found = next((value for value in values if value is not None), None)
    if metric.neutral is not None and all(_is_neutral(metric, value) for value in values):
        return []
    if isinstance(found, Percentiles):
        parts = {f"{metric.label} {name}": name for name in metric.statistics}
        columns = {
            label: [None if value is None else metric.statistic(value, name) for value in values]
            for label, name in parts.items()
        }
    elif isinstance(found, Mapping):
        names = largest_first(value or {} for value in values)
        columns = {
            metric.label.format(name.replace("_", " ")): [
                None if value is None else float(value.get(name, 0.0)) for value in values
            ]
            for name in names
        }
    else:
        columns = {metric.label: values}
    return [
        Figure(label=f"{prefix}{label}", metric=metric, values=tuple(column))
        for label, column in columns.items()
    ]


def largest_first(mappings: Iterable[Mapping[str, float]]) -> list[str]:
    """Return the names of all mappings that have a value above 0, the largest of any first."""
    largest: dict[str, float] = {}
    for mapping in mappings:
        for name, value in mapping.items():
            largest[name] = max(largest.get(name, 0.0), value)
    return sorted((name for name in largest if largest[name] > 0), key=lambda name: -largest[name])


def _is_neutral(metric: Metric, value: Any) -> bool:
    if isinstance(value, Percentiles):
        return value.max == metric.neutral
    return value is None or value == metric.neutral
