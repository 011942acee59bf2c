"""The mapping file: which columns of which tables hold what rows of the catalog need."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretoken.catalog.sources.content import parse_source_yaml
from foretoken.catalog.sources.file import SourceFile
from foretoken.domain import schema
from foretoken.domain.errors import FieldViolation, InvalidRequestError
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
