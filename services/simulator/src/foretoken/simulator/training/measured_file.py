"""Times of training runs as a user measured them: a table of steps and of their components."""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import Any, NoReturn

from foretoken.domain import schema
from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.plugins import read_yaml

# The component that is a whole step.
STEP = "step"
# JSON is YAML as well.
_MAPPINGS = (".json", ".yaml", ".yml")
_ROW = re.compile(r"times\[(?P<row>\d+)\]\.?(?P<column>.*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredTime:
    """A measured time of one scenario: a step, or a component as `ComponentTime` names it.

    `stage` -1: of all stages. Without a `scenario` it is of the only one there is. What is
    uncertain of it is in `flags`; flagged times are not used.
    """

    time_ms: float
    scenario: str = ""
    component: str = STEP
    stage: int = -1
    flags: str = ""

    def __post_init__(self) -> None:
        """Refuse a time nothing can take."""
        violations = []
        if not 0 < self.time_ms < inf:
            violations.append(FieldViolation("time_ms", "must be positive and finite"))
        if self.stage < -1:
            violations.append(FieldViolation("stage", "counts from 0; -1 is all stages"))
        if violations:
            raise InvalidRequestError.of_violations(violations)


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    times: tuple[MeasuredTime, ...]


def read_measured(path: Path) -> tuple[MeasuredTime, ...]:
    """Read measured times: a CSV table, or JSON or YAML with a list `times`, of `MeasuredTime`.

    Raises:
        InvalidRequestError: no such file or form, an unknown column, or an unusable value.

    """
    content: Mapping[str, Any] = {}
    if path.suffix == ".csv":
        content = {"times": [_entry(row) for row in _read_rows(path)]}
    elif path.suffix in _MAPPINGS:
        content = read_yaml(path, "measured times")
    else:
        _refuse(path, "measured times are a .csv, .json or .yaml file")
    found = _decode(content, path)
    if not found:
        _refuse(path, "holds no times")
    return found


def _decode(content: Mapping[str, Any], path: Path) -> tuple[MeasuredTime, ...]:
    """Return the times; an error names the line of a CSV, the place in a list of other forms."""
    try:
        return schema.decode(_File, content).times
    except InvalidRequestError as err:
        problems = (f"{_place(item.field, path)}: {item.description}" for item in err.violations)
        _refuse(path, "; ".join(dict.fromkeys(problems)))


def _place(field: str, path: Path) -> str:
    """Return where a violation is, e.g. `times[0].stage`, in words of the file."""
    found = _ROW.fullmatch(field)
    if path.suffix != ".csv" or found is None:
        return field
    # The first line has the names of the columns.
    return f"line {int(found['row']) + 2}: {found['column']}"


def _read_rows(path: Path) -> list[dict[str | None, Any]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as err:
        _refuse(path, err.strerror or str(err) if isinstance(err, OSError) else str(err))


def _entry(row: Mapping[str | None, Any]) -> dict[str, Any]:
    """Return a row without its blank cells, numbers as numbers."""
    numbers = {field.name: field.type for field in fields(MeasuredTime)}
    entry: dict[str, Any] = {}
    for name, cell in row.items():
        if not cell:
            continue
        key = str(name).strip()
        entry[key] = _number(cell) if numbers.get(key) in (float, int) else cell
    return entry


def _number(cell: Any) -> Any:
    """Return a cell as a number, as it is where it is none: decoding then says where."""
    try:
        return float(cell)
    except (TypeError, ValueError):
        return cell


def _refuse(path: Path, reason: str) -> NoReturn:
    raise InvalidRequestError.of_field("--measured", f"{path}: {reason}")
