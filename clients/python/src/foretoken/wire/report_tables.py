"""The Arrow tables of reports: what travels outside its fields, filled in and taken out."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

import pyarrow as pa

from foretoken.domain.schema import field_types
from foretoken.wire import codec, ipc

R = TypeVar("R")


def table_fields(cls: type) -> Mapping[str, str]:
    """Return the fields of a report that hold columns, by the name of their table."""
    return {table: field for (owner, field), table in codec.ARROW_FIELDS.items() if owner is cls}


def with_tables(report: R, tables: Mapping[str, pa.Table], *, may_lack: bool = False) -> R:
    """Return a report with every field of columns filled from its table.

    With `may_lack` a table or column that is not there is left empty: an earlier version wrote it.

    Raises:
        InvalidRequestError: a column is missing.
        KeyError: a table is missing.

    """
    cls: type = type(report)
    hints = field_types(cls)
    columns = {
        field: ipc.table_to_record(tables[table], hints[field], may_lack=may_lack)
        for table, field in table_fields(cls).items()
        if table in tables or not may_lack
    }
    return _replace(report, columns)


def take_tables(report: R) -> tuple[R, dict[str, pa.Table]]:
    """Return a report without its columns, as its message has it, and those columns as tables."""
    cls: type = type(report)
    fields, hints = table_fields(cls), field_types(cls)
    tables = {table: ipc.record_to_table(getattr(report, field)) for table, field in fields.items()}
    return _replace(report, {field: hints[field]() for field in fields.values()}), tables


def _replace(report: R, columns: Mapping[str, Any]) -> R:
    return cast("R", replace(cast("Any", report), **columns))
