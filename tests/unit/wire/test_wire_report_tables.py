"""Columns of reports travel as tables: taken out, and filled in again."""

import dataclasses

import pyarrow as pa
import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.results.report import ServingReport
from foretoken.domain.results.training_report import MemoryColumns, SpanColumns, TrainingReport
from foretoken.domain.schema import field_types
from foretoken.wire import codec, ipc
from foretoken.wire.report_tables import table_fields, take_tables, with_tables

_REPORT = TrainingReport(
    step_time_ms=12.5,
    spans=SpanColumns(
        stage=(0,), chunk=(0,), micro_batch=(0,), kind=(1,), start_ms=(0.0,), end_ms=(2.0,)
    ),
)


def test_every_field_of_columns_has_its_table() -> None:
    """A field of columns that is not known to travel as Arrow would be lost on the way."""
    for cls in {owner for owner, _ in codec.ARROW_FIELDS}:
        of_columns = {
            name
            for name, hint in field_types(cls).items()
            if isinstance(hint, type) and hint.__name__.endswith("Columns")
        }
        assert of_columns == set(table_fields(cls).values())


def test_what_is_taken_out_can_be_filled_in() -> None:
    plain, tables = take_tables(_REPORT)
    assert plain == dataclasses.replace(_REPORT, spans=SpanColumns())
    assert set(tables) == {"spans", "memory", "traffic"}
    assert with_tables(plain, tables) == _REPORT


def test_a_table_that_is_missing_is_left_empty_only_where_it_may_be() -> None:
    plain, tables = take_tables(_REPORT)
    del tables["memory"]
    assert with_tables(plain, tables, may_lack=True).memory_timeline == MemoryColumns()
    with pytest.raises(KeyError):
        with_tables(plain, tables)


def test_a_missing_column_is_refused() -> None:
    _, tables = take_tables(_REPORT)
    tables["spans"] = pa.table({"stage": [0]})
    with pytest.raises(InvalidRequestError, match="missing columns"):
        with_tables(_REPORT, tables)


def test_a_report_without_columns_stays_as_it_is() -> None:
    """Also one whose tables have no rows."""
    empty = {
        table: ipc.record_to_table(getattr(ServingReport(), field))
        for table, field in table_fields(ServingReport).items()
    }
    assert take_tables(ServingReport())[0] == ServingReport()
    assert len(with_tables(ServingReport(), empty).requests.arrival_s) == 0
