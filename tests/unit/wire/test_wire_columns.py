"""Queries, replies and reports as columns, and Arrow IPC bytes in pieces."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

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
from foretoken.domain.results.report import RequestColumns, ServingReport
from foretoken.domain.results.training_report import (
    SPAN_KINDS,
    MemoryColumns,
    SpanColumns,
    TrainingReport,
)
from foretoken.domain.schema import field_types
from foretoken.wire import codec, columns, ipc
from foretoken.wire.arrow import rows_to_table
from foretoken.wire.result_file import table_fields, take_tables, with_tables


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


def test_a_table_comes_back_from_its_pieces() -> None:
    table = pa.table({"a": np.arange(100_000), "b": ["x"] * 100_000})
    chunks = list(ipc.write_chunks(table, 64 * 1024))
    assert {64 * 1024} == {len(chunk) for chunk in chunks[:-1]}
    assert table == ipc.read_chunks(chunks)


def test_an_empty_table_keeps_its_schema() -> None:
    schema = pa.schema([pa.field("dims", pa.map_(pa.string(), pa.int64()), nullable=False)])
    assert schema == ipc.read_chunks(ipc.write_chunks(schema.empty_table())).schema


def test_a_stream_is_read_while_it_is_sent() -> None:
    """A service sends a large selection without having it in memory whole."""
    num_read = 0
    batch = pa.record_batch({"a": np.arange(10_000)})

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal num_read
        for _ in range(10):
            num_read += 1
            yield batch

    reader = pa.RecordBatchReader.from_batches(batch.schema, batches())
    chunks = ipc.write_chunks(reader, 80_000)
    next(chunks)
    assert num_read < 10


@pytest.mark.parametrize("cut", [0, 5, 200, 400])
def test_a_stream_cut_short_is_refused(cut: int) -> None:
    whole = b"".join(ipc.write_chunks(pa.table({"a": np.arange(1_000)})))
    with pytest.raises(InvalidRequestError, match="not an Arrow IPC stream"):
        ipc.read_chunks([whole[:cut]])


@pytest.mark.parametrize(
    "column",
    [pa.array(["1"]), pa.array([1, None]), pa.array([[1]])],
    ids=["text", "null", "list"],
)
def test_columns_must_be_numbers(column: pa.Array) -> None:
    data = b"".join(ipc.write_chunks(pa.table({"m": column})))
    with pytest.raises(InvalidRequestError, match="m: expected numbers"):
        ipc.ipc_to_columns(data)


def test_requests_without_a_column_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="num_preemptions"):
        ipc.table_to_record(pa.table({"arrival_s": [0.0]}), RequestColumns)


_NUMBERS = ipc.columns_to_ipc({"m": np.arange(20), "n": np.arange(20) * 1.5})
_ROWS = b"".join(ipc.write_chunks(rows_to_table([{"operator": "gemm", "device": "a30"}])))


@st.composite
def _damaged(draw: st.DrawFn, original: bytes) -> bytes:
    content = bytearray(original)
    for _ in range(draw(st.integers(1, 4))):
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    return bytes(content[: draw(st.integers(0, 2 * len(content)))])


@settings(max_examples=40)
@given(st.one_of(_damaged(_NUMBERS), _damaged(_ROWS)))
@example(_NUMBERS.replace(b"m\x00", b"\xff\x00"))
def test_damaged_bytes_are_read_or_refused(content: bytes) -> None:
    """Also where a name of a column is not UTF-8, or a type is none that Arrow reads."""
    for read in (
        ipc.ipc_to_columns,
        lambda data: ipc.read_chunks([data]).schema.names,
        lambda data: ipc.open_chunks([data]).read_all().schema.names,
    ):
        with contextlib.suppress(InvalidRequestError):
            read(content)


@dataclasses.dataclass(frozen=True)
class _Mixed:
    """A column of each kind."""

    num_tokens: object
    ratio: object
    is_met: object
    device: object
    kind: object


@pytest.mark.parametrize("as_given", [np.asarray, list, tuple])
@given(
    st.lists(
        st.tuples(
            st.integers(-(2**40), 2**40),
            st.floats(allow_nan=False),
            st.booleans(),
            st.sampled_from(["", "a30", "h200_sxm", "zwölf"]),
            st.integers(0, len(SPAN_KINDS) - 1),
        ),
        max_size=20,
    ),
    st.integers(0, 20),
)
def test_columns_are_those_that_arrow_would_make(
    as_given: Callable[[list[object]], object],
    rows: list[tuple[object, ...]],
    cut: int,
) -> None:
    """As arrays, lists or tuples; read in one piece, in pieces and from the middle."""
    given_columns = [list(column) for column in zip(*rows, strict=True)] or [[]] * 5
    whole, real, truth, text, word = given_columns
    expected = pa.table(
        {
            "num_tokens": pa.array(whole, pa.int64()),
            "ratio": pa.array(real, pa.float64()),
            "is_met": pa.array(truth, pa.bool_()),
            "device": pa.array(text, pa.dictionary(pa.int32(), pa.string())),
            "kind": pa.DictionaryArray.from_arrays(pa.array(word, pa.int8()), list(SPAN_KINDS)),
        }
    )

    made = ipc.record_to_table(_Mixed(*map(as_given, given_columns)))

    made.validate(full=True)
    assert expected.equals(made)
    for table in (made, pa.concat_tables([made.slice(0, cut), made.slice(cut)]), made.slice(cut)):
        read = ipc.table_to_record(table, _Mixed)
        kinds = [SPAN_KINDS.index(name) for name in table["kind"].to_pylist()]
        for name in ("num_tokens", "ratio", "is_met", "device"):
            assert table[name].to_pylist() == getattr(read, name).tolist()
        assert kinds == np.asarray(read.kind).tolist()
