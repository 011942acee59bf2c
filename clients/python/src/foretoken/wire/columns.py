"""Latency queries, replies and surfaces as columns: many operator calls in one message.

Plain columns are quicker below `ARROW_ROWS` rows, Arrow above (`tests/benchmarks/bench_wire.py`).
A reply takes the form its table was asked in.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from foretoken.api.predictor.v1 import predictor_service_pb2 as predictor_pb2
from foretoken.api.types.v1 import correction_pb2, estimate_pb2, operator_pb2
from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    LatencyReply,
    OperatorTable,
    Phase,
)
from foretoken.domain.measurements.step_model import StepModel
from foretoken.domain.measurements.surface import LatencySurface, SurfaceQuery
from foretoken.wire import codec, ipc

ARROW_ROWS = 300
# Values in one message: 4 MiB of 8 bytes each leave room below the limit of 16 MiB both ways.
MAX_VALUES = 512 * 1024

# Columns of estimates and their types; those of the nearest point's dimensions come after.
_ESTIMATES: Mapping[str, type[np.generic]] = {
    "latency_us": np.float64,
    "low_us": np.float64,
    "high_us": np.float64,
    "provenance": np.int64,
    "nearest_us": np.float64,
    "nearest_octaves": np.float64,
}
_NEAREST_PREFIX = "nearest."
# What goes for a predictor that says nothing of measured points: there are none.
_NOTHING_NEAR = {"nearest_us": 0.0, "nearest_octaves": np.inf}


# Fields of a query that its message has as they are: all but the tables.
_QUERY_FIELDS = tuple(
    field.name for field in dataclasses.fields(LatencyQuery) if field.name != "tables"
)


def encode_query(query: LatencyQuery) -> predictor_pb2.PredictRequest:
    """Return the message of a query.

    Raises:
        InvalidRequestError: a column does not hold whole numbers, or columns differ in length.

    """
    tables = [_encode_table(table) for table in query.tables]
    said = {name: getattr(query, name) for name in _QUERY_FIELDS}
    return predictor_pb2.PredictRequest(tables=tables, **said)


def decode_query(message: predictor_pb2.PredictRequest) -> LatencyQuery:
    """Return the query of a message, its columns as int64 arrays.

    Raises:
        InvalidRequestError: with one violation per table that cannot be used.

    """
    tables = (
        _decode_table(table, f"tables[{index}]") for index, table in enumerate(message.tables)
    )
    said = {name: getattr(message, name) for name in _QUERY_FIELDS}
    return LatencyQuery(tables=tuple(tables), **said)


def encode_reply(
    reply: LatencyReply, asked: predictor_pb2.PredictRequest
) -> predictor_pb2.PredictResponse:
    """Return the message of a reply, each table in the form it was asked in."""
    tables = [
        encode_estimates(table, as_arrow=question.WhichOneof("data") == "arrow_ipc")
        for table, question in zip(reply.tables, asked.tables, strict=True)
    ]
    steps = None if reply.steps is None else codec.encode(reply.steps, correction_pb2.StepModel)
    return predictor_pb2.PredictResponse(
        model_version=reply.model_version, tables=tables, steps=steps
    )


def decode_reply(message: predictor_pb2.PredictResponse) -> LatencyReply:
    """Return the reply of a message, its columns as arrays.

    Raises:
        InvalidRequestError: a table lacks a column.

    """
    return LatencyReply(
        model_version=message.model_version,
        tables=tuple(decode_estimates(table) for table in message.tables),
        steps=codec.decode(message.steps, StepModel) if message.HasField("steps") else None,
    )


def split_query(query: LatencyQuery, max_values: int = MAX_VALUES) -> Iterator[LatencyQuery]:
    """Yield queries that fit a message each and make up this one, in order of rows.

    A query without rows yields itself.
    """
    tables: list[OperatorTable] = []
    room = max_values
    for whole in query.tables:
        rest = whole
        while True:
            width = len(rest.columns) + len(_ESTIMATES)
            num_rows = room // width
            if rest.num_rows <= num_rows:
                break
            if num_rows:
                tables.append(_slice_table(rest, 0, num_rows))
                rest = _slice_table(rest, num_rows, rest.num_rows)
            yield dataclasses.replace(query, tables=tuple(tables))
            tables, room = [], max_values
        tables.append(rest)
        room -= rest.num_rows * width
    yield dataclasses.replace(query, tables=tuple(tables))


def join_replies(query: LatencyQuery, replies: Sequence[LatencyReply]) -> LatencyReply:
    """Return the reply to a query from the replies to its parts, all of one model version."""
    if len(replies) == 1:
        return replies[0]
    parts = iter([table for reply in replies for table in reply.tables])
    tables = []
    for asked in query.tables:
        taken = [next(parts)]
        num_rows = len(taken[0].latency_us)
        while num_rows < asked.num_rows:
            taken.append(next(parts))
            num_rows += len(taken[-1].latency_us)
        tables.append(_concatenate(taken))
    return dataclasses.replace(replies[0], tables=tuple(tables))


def _concatenate(parts: Sequence[LatencyColumns]) -> LatencyColumns:
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in _ESTIMATES
    }
    joined["nearest"] = {
        name: np.concatenate([part.nearest[name] for part in parts]) for name in first.nearest
    }
    return dataclasses.replace(first, **joined)


def _slice_table(table: OperatorTable, start: int, stop: int) -> OperatorTable:
    columns = {name: column[start:stop] for name, column in table.columns.items()}
    return dataclasses.replace(table, columns=columns)


def _encode_table(table: OperatorTable) -> operator_pb2.OperatorTable:
    columns = {name: _whole_numbers(name, column) for name, column in table.columns.items()}
    _check_lengths(columns, "columns")
    message = operator_pb2.OperatorTable(
        operator=table.operator,
        dtype=operator_pb2.Dtype.Value(f"DTYPE_{table.dtype.name}"),
        phase=operator_pb2.Phase.Value(f"PHASE_{table.phase.name}"),
        variant=table.variant,
        kernel=table.kernel,
        tentative=table.tentative,
    )
    if table.num_rows >= ARROW_ROWS:
        message.arrow_ipc = ipc.columns_to_ipc(columns)
    else:
        message.columns.CopyFrom(_pack_dims(columns))
    return message


def _pack_dims(columns: Mapping[str, npt.NDArray[np.int64]]) -> operator_pb2.DimColumns:
    packed = operator_pb2.DimColumns()
    for name, column in columns.items():
        packed.columns.add(name=name).values.extend(column.tolist())
    return packed


def _unpack_dims(packed: operator_pb2.DimColumns) -> dict[str, npt.NDArray[np.int64]]:
    return {column.name: np.array(column.values, dtype=np.int64) for column in packed.columns}


def _decode_table(message: operator_pb2.OperatorTable, path: str) -> OperatorTable:
    columns: Mapping[str, npt.NDArray[Any]]
    if message.WhichOneof("data") == "arrow_ipc":
        columns = ipc.ipc_to_columns(message.arrow_ipc)
    else:
        columns = _unpack_dims(message.columns)
    violations = []
    if message.dtype == operator_pb2.DTYPE_UNSPECIFIED:
        violations.append(FieldViolation(f"{path}.dtype", "must be set"))
    elif message.dtype not in operator_pb2.Dtype.values():
        violations.append(FieldViolation(f"{path}.dtype", f"unknown number {message.dtype}"))
    if message.phase not in operator_pb2.Phase.values():
        violations.append(FieldViolation(f"{path}.phase", f"unknown number {message.phase}"))
    if violations:
        raise InvalidRequestError.of_violations(violations, "predict")
    _check_lengths(columns, path)
    dtype = operator_pb2.Dtype.Name(message.dtype).removeprefix("DTYPE_")
    phase = operator_pb2.Phase.Name(message.phase or operator_pb2.PHASE_FORWARD)
    return OperatorTable(
        operator=message.operator,
        dtype=DType[dtype],
        phase=Phase[phase.removeprefix("PHASE_")],
        columns={name: _whole_numbers(name, column) for name, column in columns.items()},
        variant=message.variant,
        kernel=message.kernel,
        tentative=message.tentative,
    )


def encode_estimates(table: LatencyColumns, *, as_arrow: bool) -> estimate_pb2.LatencyColumns:
    """Return the message of one table's estimates."""
    columns = {name: np.asarray(getattr(table, name), kind) for name, kind in _ESTIMATES.items()}
    for name, value in _NOTHING_NEAR.items():
        if not len(columns[name]):
            columns[name] = np.full(len(columns["latency_us"]), value)
    nearest = {name: np.asarray(column, np.int64) for name, column in table.nearest.items()}
    message = estimate_pb2.LatencyColumns(
        basis=table.basis,
        correction_factor=table.correction_factor,
        other_framework=table.other_framework,
    )
    if as_arrow:
        named = {f"{_NEAREST_PREFIX}{name}": column for name, column in nearest.items()}
        message.arrow_ipc = ipc.columns_to_ipc({**columns, **named})
    else:
        for name, column in columns.items():
            getattr(message.columns, name).extend(column.tolist())
        # Also without rows it must be said that these are plain columns.
        message.columns.nearest.CopyFrom(_pack_dims(nearest))
    return message


def decode_estimates(message: estimate_pb2.LatencyColumns) -> LatencyColumns:
    """Return the estimates of one table's message, its columns as arrays.

    Raises:
        InvalidRequestError: a column is missing.

    """
    if message.WhichOneof("data") == "arrow_ipc":
        columns = ipc.ipc_to_columns(message.arrow_ipc)
        missing = [name for name in _ESTIMATES if name not in columns]
        if missing:
            raise InvalidRequestError(f"estimates: missing columns {missing}")
        nearest = {
            name.removeprefix(_NEAREST_PREFIX): column
            for name, column in columns.items()
            if name.startswith(_NEAREST_PREFIX)
        }
        columns = {name: columns[name] for name in _ESTIMATES}
    else:
        nearest = _unpack_dims(message.columns.nearest)
        columns = {
            name: np.array(getattr(message.columns, name), kind)
            for name, kind in _ESTIMATES.items()
        }
    return LatencyColumns(
        **columns,
        nearest=nearest,
        basis=message.basis,
        other_framework=message.other_framework,
        correction_factor=message.correction_factor
        if message.HasField("correction_factor")
        else 1.0,
    )


def _whole_numbers(name: str, column: Any) -> npt.NDArray[np.int64]:
    values = np.asarray(column)
    if values.size and values.dtype.kind not in "iuf":
        raise InvalidRequestError.of_field(name, f"expected whole numbers, found {values.dtype}")
    with np.errstate(invalid="ignore"):
        # What does not fit is found by the comparison below.
        whole = values.astype(np.int64)
    if not np.array_equal(whole, values):
        raise InvalidRequestError.of_field(name, "expected whole numbers of at most 63 bits")
    return whole


def _check_lengths(columns: Mapping[str, npt.NDArray[Any]], path: str) -> None:
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise InvalidRequestError.of_field(path, f"columns differ in length: {lengths}")


def encode_surface(surface: LatencySurface) -> predictor_pb2.TabulateResponse:
    """Return the message of a surface."""
    return predictor_pb2.TabulateResponse(
        model_version=surface.model_version,
        estimates=encode_estimates(surface.estimates, as_arrow=True),
    )


def decode_surface(message: predictor_pb2.TabulateResponse, query: SurfaceQuery) -> LatencySurface:
    """Return the surface of a message that answers a query."""
    return LatencySurface(
        axes=query.axes,
        estimates=decode_estimates(message.estimates),
        model_version=message.model_version,
    )
