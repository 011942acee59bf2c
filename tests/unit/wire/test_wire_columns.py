"""Queries and replies as columns: forms, limits, refusals."""

from dataclasses import replace

import numpy as np
import pytest

from foretoken.api.predictor.v1 import predictor_service_pb2 as predictor_pb2
from foretoken.api.types.v1 import estimate_pb2, operator_pb2
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    LatencyReply,
    OperatorTable,
    Phase,
)
from foretoken.wire import columns, ipc


def _query(**dims: object) -> LatencyQuery:
    table = OperatorTable(operator="gemm", dtype=DType.BF16, columns=dims)
    return LatencyQuery(device="a30", tables=(table,))


@pytest.mark.parametrize(
    ("num_rows", "expected"),
    [(1, "columns"), (columns.ARROW_ROWS - 1, "columns"), (columns.ARROW_ROWS, "arrow_ipc")],
)
def test_many_rows_travel_as_arrow(num_rows: int, expected: str) -> None:
    message = columns.encode_query(_query(m=np.arange(num_rows)))
    assert expected == message.tables[0].WhichOneof("data")


def test_whose_measurements_are_preferred_and_whose_answer_travel() -> None:
    query = _query(m=np.arange(3))
    asked = replace(
        query,
        tables=(replace(query.tables[0], kernel="k", tentative=True),),
        preferred_framework="vllm 0.19",
    )
    message = columns.encode_query(asked)
    found = columns.decode_query(message)
    assert "vllm 0.19" == found.preferred_framework
    assert found.tables[0].tentative
    times_us = np.ones(3)
    estimates = LatencyColumns(
        latency_us=times_us,
        low_us=times_us,
        high_us=times_us,
        provenance=np.ones(3, np.int64),
        other_framework="nccl 2.29.2",
    )
    reply = LatencyReply(model_version="", tables=(estimates,))
    [table] = columns.decode_reply(columns.encode_reply(reply, message)).tables
    assert "nccl 2.29.2" == table.other_framework


@pytest.mark.parametrize("as_arrow", [False, True])
def test_a_full_message_stays_below_the_limit_both_ways(as_arrow: bool) -> None:
    """The widest numbers a query may hold, in either form."""
    num_rows = columns.MAX_VALUES // 4
    huge = np.full(num_rows, -(2**63))
    table = operator_pb2.OperatorTable(operator="gemm", dtype=operator_pb2.DTYPE_BF16)
    if as_arrow:
        table.arrow_ipc = ipc.columns_to_ipc(dict.fromkeys("mnkb", huge))
    else:
        for name in "mnkb":
            table.columns.columns.add(name=name).values.extend(huge.tolist())
    assert table.ByteSize() < 16 * 2**20


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        ([1.5], "whole numbers"),
        (["8"], "whole numbers"),
        ([float("nan")], "whole numbers"),
        ([2.0**70], "whole numbers"),
        ([2**70], "whole numbers"),
        ([True], "whole numbers"),
    ],
    ids=["fraction", "text", "nan", "large float", "large int", "bool"],
)
def test_what_is_no_whole_number_is_refused(column: list[object], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        columns.encode_query(_query(m=column))
    assert ["m"] == [violation.field for violation in caught.value.violations]


def test_a_whole_float_is_a_whole_number() -> None:
    message = columns.encode_query(_query(m=[8.0, 16.0]))
    assert [8, 16] == list(message.tables[0].columns.columns[0].values)


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="differ in length"):
        columns.encode_query(_query(m=[1, 2], n=[1]))


@pytest.mark.parametrize(
    ("table", "field"),
    [
        (operator_pb2.OperatorTable(operator="gemm"), "tables[0].dtype"),
        (operator_pb2.OperatorTable(dtype=77), "tables[0].dtype"),  # type: ignore[arg-type]
        (operator_pb2.OperatorTable(dtype=1, phase=77), "tables[0].phase"),  # type: ignore[arg-type]
        (operator_pb2.OperatorTable(dtype=1, arrow_ipc=b"no"), "arrow_ipc"),  # type: ignore[arg-type]
    ],
    ids=["no dtype", "unknown dtype", "unknown phase", "not Arrow"],
)
def test_a_message_of_another_client_is_refused_by_field(
    table: operator_pb2.OperatorTable, field: str
) -> None:
    message = predictor_pb2.PredictRequest(device="a30", tables=[table])
    with pytest.raises(InvalidRequestError) as caught:
        columns.decode_query(message)
    assert [field] == [violation.field for violation in caught.value.violations]


def test_phase_left_out_is_forward() -> None:
    table = operator_pb2.OperatorTable(operator="gemm", dtype=operator_pb2.DTYPE_FP8)
    query = columns.decode_query(predictor_pb2.PredictRequest(tables=[table]))
    assert (DType.FP8, Phase.FORWARD) == (query.tables[0].dtype, query.tables[0].phase)


def test_estimates_without_a_column_are_refused() -> None:
    data = ipc.columns_to_ipc({"latency_us": np.array([1.0])})
    reply = predictor_pb2.PredictResponse(tables=[estimate_pb2.LatencyColumns(arrow_ipc=data)])
    with pytest.raises(InvalidRequestError, match="high_us"):
        columns.decode_reply(reply)
