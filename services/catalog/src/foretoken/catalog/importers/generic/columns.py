"""Take from a table what a mapping says: which rows, their names, dimensions and times."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretoken.catalog.array import Floats, Integers, Mask
from foretoken.catalog.dims import group_rows
from foretoken.catalog.importers.generic.mapping import (
    DimRule,
    RowRule,
    TableRule,
    TextRule,
    Unit,
)
from foretoken.catalog.sources.row import FACT_NAMES
from foretoken.catalog.sources.table import WHOLE_MAX, SourceTable
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType

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
