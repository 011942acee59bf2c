"""Arrow IPC bytes in pieces."""

import contextlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.results.report import RequestColumns
from foretoken.wire import ipc
from foretoken.wire.arrow import rows_to_table


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


@settings(max_examples=400)
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
