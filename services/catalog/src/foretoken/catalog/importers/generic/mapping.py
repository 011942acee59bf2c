"""The mapping file: which columns hold what rows need, and how they are taken from a table."""

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretoken.catalog.dims import Floats, Integers, Mask, group_rows
from foretoken.catalog.sources.content import parse_source_yaml
from foretoken.catalog.sources.file import SourceFile
from foretoken.catalog.sources.row import FACT_NAMES
from foretoken.catalog.sources.table import WHOLE_MAX, SourceTable
from foretoken.domain import schema
from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.measurements.estimate import DType
from foretoken.wire.arrow import LATENCY_STATISTICS


class TimeUnit(enum.Enum):
    """A unit of time; the value is what one is in µs."""

    NS = 1e-3
    US = 1.0
    MS = 1e3
    S = 1e6


class Unit(enum.Enum):
    """A unit of a dimension; the value is what one is in bytes, an element's bytes vary."""

    COUNT = "count"
    BYTES = 1
    KB = 10**3
    MB = 10**6
    GB = 10**9
    KIB = 2**10
    MIB = 2**20
    GIB = 2**30
    ELEMENTS = "elements"


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRule:
    """Where a text comes from: a constant, a column, or the file's name without its ending.

    `values` translates what stands there; then nothing else may stand there.
    """

    value: str | None = None
    column: str | None = None
    file_name: bool = False
    values: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that there is one source."""
        if [self.value is not None, self.column is not None, self.file_name].count(True) != 1:
            raise InvalidRequestError.of_field("", "give one of value, column, file_name")
        if self.value is not None and self.values:
            raise InvalidRequestError.of_field("values", "translates a column or file_name")


@dataclass(frozen=True, kw_only=True, slots=True)
class DimRule:
    """Where a dimension comes from: a constant, or a column times `scale` in a unit."""

    value: int | None = None
    column: str | None = None
    scale: float = 1.0
    unit: Unit = Unit.COUNT

    def __post_init__(self) -> None:
        """Check that there is one source."""
        if (self.value is None) == (self.column is None):
            raise InvalidRequestError.of_field("", "give one of value, column")


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeRule:
    """A column of times and its unit."""

    column: str
    unit: TimeUnit


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRule:
    """Take rows where a column is one of these texts, none of those, or a number in a range."""

    column: str
    is_in: tuple[str, ...] | None = None
    is_not: tuple[str, ...] | None = None
    min: float | None = None
    max: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRule:
    """How to read the files that match a pattern. `device` may come from the command instead."""

    files: str
    operator: TextRule
    dims: Mapping[str, DimRule]
    latency: Mapping[str, TimeRule]
    dtype: TextRule
    device: TextRule | None = None
    topology: TextRule | None = None
    phase: TextRule = TextRule(value="forward")
    framework: TextRule | None = None
    framework_version: TextRule | None = None
    kernel: TextRule | None = None
    variant: TextRule | None = None
    model: TextRule | None = None
    num_samples: int | None = None
    where: tuple[RowRule, ...] = ()

    def __post_init__(self) -> None:
        """Check the names of statistics, and that the pattern stays in the folder."""
        violations = [
            FieldViolation(f"latency.{name}", f"is not one of {', '.join(LATENCY_STATISTICS)}")
            for name in self.latency
            if name not in LATENCY_STATISTICS
        ]
        if "median" not in self.latency:
            violations.append(FieldViolation("latency.median", "required key is missing"))
        if not self.files or self.files.startswith("/") or ".." in Path(self.files).parts:
            violations.append(FieldViolation("files", "must be a pattern inside the folder"))
        if violations:
            raise InvalidRequestError.of_violations(violations)


@dataclass(frozen=True, kw_only=True, slots=True)
class TableMapping:
    """All of a mapping file."""

    tables: tuple[TableRule, ...]


def read_mapping(source: SourceFile, path: Path) -> TableMapping:
    """Return the mapping in a YAML file.

    A plain text or number stands for a constant: `dtype: fp16` for `dtype: {value: fp16}`.

    Raises:
        InvalidRequestError: it is no such mapping; one violation for every key.

    """
    content = dict(parse_source_yaml(source, path))
    if isinstance(content.get("tables"), list):
        content["tables"] = [_expand(table) for table in content["tables"]]
    return schema.decode(TableMapping, content, str(path))


def _expand(table: Any) -> Any:
    if not isinstance(table, dict):
        return table
    texts = {
        key: {"value": item}
        for key, item in table.items()
        if schema.field_types(TableRule).get(key) in (TextRule, TextRule | None)
        and not isinstance(item, dict)
    }
    dims = table.get("dims")
    if isinstance(dims, dict):
        dims = {
            name: {"value": item} if isinstance(item, int) else item for name, item in dims.items()
        }
    return {**table, **texts, **({"dims": dims} if "dims" in table else {})}


Texts = npt.NDArray[np.str_]

# Every group costs about a millisecond.
_GROUPS_MAX = 20_000


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of a table, counted from 0, that share their names."""

    names: Mapping[str, str]
    rows: Integers


def find_groups(origin: SourceTable, rule: TableRule, given: Mapping[str, str]) -> list[Group]:
    """Return the rows that the mapping takes, by their names; `given` ones come first.

    Raises:
        InvalidRequestError: a column is missing, a text has no translation, or there are too many
            groups.

    """
    rows = np.flatnonzero(_select(origin, rule))
    columns = [_read_texts(origin, name, rule, given)[rows] for name in FACT_NAMES]
    codes = [np.unique(column, return_inverse=True)[1] for column in columns]
    order, starts = group_rows(codes)
    if len(starts) > _GROUPS_MAX:
        raise InvalidRequestError.of_field(
            "path", f"{origin.path}: more than {_GROUPS_MAX} kinds of rows; is a column mistaken?"
        )
    return [
        Group(
            {name: str(found[places[0]]) for name, found in zip(FACT_NAMES, columns, strict=True)},
            np.sort(rows[places]),
        )
        for places in np.split(order, starts[1:])
        if len(places)
    ]


def read_dims(
    origin: SourceTable, rules: Mapping[str, DimRule], group: Group
) -> dict[str, Integers]:
    """Return the dimensions of a group's rows as whole numbers.

    Raises:
        InvalidRequestError: a column is missing, or a cell is empty or not whole; names the line.

    """
    return {name: _read_dim(origin, name, rule, group) for name, rule in rules.items()}


def read_times(origin: SourceTable, rule: TableRule, group: Group) -> dict[str, Floats]:
    """Return the times of a group's rows in µs, by statistic.

    Raises:
        InvalidRequestError: a column is missing or a cell is not a number.

    """
    return {
        statistic: origin.numbers(time.column)[group.rows] * time.unit.value
        for statistic, time in rule.latency.items()
    }


def _select(origin: SourceTable, rule: TableRule) -> Mask:
    mask = np.ones(origin.num_rows, dtype=bool)
    for where in rule.where:
        for is_taken in _conditions(origin, where):
            mask &= is_taken
    return mask


def _conditions(origin: SourceTable, where: RowRule) -> Iterator[Mask]:
    if where.is_in is not None:
        yield np.isin(origin.texts(where.column), where.is_in)
    if where.is_not is not None:
        yield ~np.isin(origin.texts(where.column), where.is_not)
    if where.min is not None:
        yield origin.numbers(where.column) >= where.min
    if where.max is not None:
        yield origin.numbers(where.column) <= where.max


def _read_texts(
    origin: SourceTable, name: str, table: TableRule, given: Mapping[str, str]
) -> Texts:
    rule: TextRule | None = getattr(table, name)
    if rule is None or rule.value is not None:
        constant = given.get(name) or (rule.value if rule else "") or ""
        return np.full(origin.num_rows, constant)
    if rule.column is None:
        own = np.full(origin.num_rows, origin.path.stem)
    else:
        own = origin.texts(rule.column)
    if not rule.values:
        return own
    distinct, codes = np.unique(own, return_inverse=True)
    known = np.array([rule.values.get(text, "") for text in distinct.tolist()])
    is_known = np.isin(distinct, list(rule.values))
    taken = _select(origin, table) & ~is_known[codes]
    if taken.any():
        row = int(np.argmax(taken))
        raise origin.fault(row, f"{name}: {str(own[row])!r} is not among the mapping's values")
    return known[codes]


def _read_dim(origin: SourceTable, name: str, rule: DimRule, group: Group) -> Integers:
    if rule.column is None:
        return np.full(len(group.rows), rule.value, dtype=np.int64)
    cells = origin.numbers(rule.column)[group.rows]
    # Elements of half a byte are why this is a float until the end.
    values = cells * rule.scale * _unit_size(rule.unit, group)
    with np.errstate(invalid="ignore"):
        is_whole = np.abs(values) <= WHOLE_MAX
        is_whole &= np.floor(values) == values
    if not is_whole.all():
        place = int(np.argmin(is_whole))
        text = f"{name}: {cells[place]} of column {rule.column} is no whole number"
        raise origin.fault(int(group.rows[place]), text)
    return values.astype(np.int64)


def _unit_size(unit: Unit, group: Group) -> float:
    if unit is Unit.COUNT:
        return 1.0
    if unit is Unit.ELEMENTS:
        return DType[group.names["dtype"].upper()].num_bytes
    size: Any = unit.value
    return float(size)
