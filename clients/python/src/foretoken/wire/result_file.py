"""A report as one file, and the Arrow tables that travel outside its fields."""

import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

import pyarrow as pa
import pyarrow.parquet as pq
from google.protobuf import json_format

from foretoken.api.types.v1 import (
    report_pb2,
    search_pb2,
    training_run_pb2,
    training_search_pb2,
)
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.search import CapacityReport, ServingSearchReport
from foretoken.domain.requests.training_run import TrainingRunReport
from foretoken.domain.requests.training_search import TrainingSearchReport
from foretoken.domain.results.report import ServingReport
from foretoken.domain.results.result import AnyReport, KeptResult
from foretoken.domain.results.training_report import TrainingReport
from foretoken.domain.schema import field_types
from foretoken.domain.text_file import Archive, UnpackBudget
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


_REPORT = "report.json"
# What is known of the result, in files that are away from their catalog.
_LABEL = "result.json"
# A file that is missing, and what the readers of JSON and Parquet say of a damaged one.
_DAMAGED = (
    KeyError, ValueError, RecursionError, OSError, json_format.ParseError, pa.ArrowException
)  # fmt: skip
_MESSAGES: dict[type[AnyReport], Any] = {
    ServingReport: report_pb2.ServingReport,
    TrainingReport: report_pb2.TrainingReport,
    TrainingRunReport: training_run_pb2.TrainingRunReport,
    CapacityReport: search_pb2.CapacityReport,
    ServingSearchReport: search_pb2.ServingSearchReport,
    TrainingSearchReport: training_search_pb2.TrainingSearchReport,
}


def pack_report(report: AnyReport) -> bytes:
    """Return a report with all of its columns as the content of a file."""
    message = codec.encode(report, _MESSAGES[type(report)])
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        plain = json_format.MessageToDict(message, preserving_proto_field_name=True)
        archive.writestr(_REPORT, json.dumps(plain, indent=1))
        fields = table_fields(type(report))
        for name, table in take_tables(report)[1].items():
            parquet = io.BytesIO()
            pq.write_table(table, parquet)
            archive.writestr(_parquet_name(fields[name]), parquet.getvalue())
    return content.getvalue()


def unpack_report(content: bytes, cls: type[AnyReport]) -> AnyReport:
    """Return the report of a file; what an earlier version had not is empty.

    Raises:
        InvalidRequestError: the file is not of a report of that class.

    """
    try:
        archive = Archive.open(content)
        message = json_format.Parse(archive[_REPORT], _MESSAGES[cls](), ignore_unknown_fields=True)
        tables = {
            name: _read_parquet(archive[_parquet_name(field)])
            for name, field in table_fields(cls).items()
            if _parquet_name(field) in archive
        }
    except (InvalidRequestError, *_DAMAGED) as err:
        raise InvalidRequestError(f"not a result of Foretoken: {err}") from err
    return with_tables(codec.decode(message, cls), tables, may_lack=True)


def label_file(content: bytes, result: KeptResult) -> bytes:
    """Return a packed report with what is known of it inside, for a file outside of the catalog.

    Raises:
        InvalidRequestError: it is no archive.

    """
    Archive.open(content)
    file = io.BytesIO(content)
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(_LABEL, json.dumps(schema.encode(result), indent=1))
    return file.getvalue()


def read_label(content: bytes) -> KeptResult:
    """Return what a labelled file says of itself.

    Raises:
        InvalidRequestError: the file is none.

    """
    try:
        label = json.loads(Archive.open(content)[_LABEL])
    except (InvalidRequestError, *_DAMAGED) as err:
        raise InvalidRequestError(f"not an exported result of Foretoken: {err}") from err
    return schema.decode(KeptResult, label, _LABEL)


def _read_parquet(content: bytes) -> pa.Table:
    about = pq.read_metadata(io.BytesIO(content))
    groups = (about.row_group(index) for index in range(about.num_row_groups))
    if sum(group.total_byte_size for group in groups) > UnpackBudget().allowed_bytes(len(content)):
        raise InvalidRequestError("a table of it claims more bytes than one of its size may")
    table = pq.read_table(io.BytesIO(content))
    # Nothing else looks at whether texts are UTF-8.
    table.validate(full=True)
    return table


def _parquet_name(field: str) -> str:
    return f"{field}.parquet"
