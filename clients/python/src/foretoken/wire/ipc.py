"""Arrow IPC bytes: tables to pieces of a stream and back, columns to Arrow and back."""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.measurement import ArrowStream
from foretoken.domain.results.report import Columns as Record
from foretoken.domain.results.training_report import SPAN_KINDS
from foretoken.domain.schema import field_types
from foretoken.wire.arrow import open_stream

# Messages of 1 to 4 MiB move fastest; gRPC's limit is raised to 16 MiB on both sides.
CHUNK_BYTES = 2 * 2**20

Columns = Mapping[str, npt.NDArray[Any]]
R = TypeVar("R", bound=Record)


def write_chunks(rows: ArrowStream, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Yield an Arrow stream as IPC bytes in pieces of `chunk_bytes`, the last one shorter.

    The stream is read as the pieces are asked for.
    """
    reader = open_stream(rows)
    pending = _Pending()
    with pa.ipc.new_stream(pending, reader.schema) as writer:
        for batch in reader:
            writer.write_batch(batch)
            yield from pending.pop_full(chunk_bytes)
    yield from pending.pop_all(chunk_bytes)


# What bytes that are no stream of Arrow's raise, also where they claim to be immensely long.
_UNREADABLE = (pa.ArrowException, OSError, EOFError, MemoryError, OverflowError, ValueError)


def _check_names(schema: pa.Schema) -> list[str]:
    """Return the names, which must be UTF-8, before anybody else reads them.

    Raises:
        ValueError: one is not.

    """
    names: list[str] = schema.names
    return names


def read_chunks(chunks: Iterable[bytes]) -> pa.Table:
    """Return the table whose IPC stream was cut into pieces.

    Raises:
        InvalidRequestError: the joined pieces are not an Arrow IPC stream, or end early.

    """
    try:
        with pa.ipc.open_stream(pa.py_buffer(b"".join(chunks))) as reader:
            table = reader.read_all()
        _check_names(table.schema)
        # Whether the buffers are as long as the columns.
        table.validate()
    except _UNREADABLE as err:
        raise InvalidRequestError.of_field("arrow_ipc", f"not an Arrow IPC stream: {err}") from err
    return table


def open_chunks(chunks: Iterable[bytes]) -> pa.RecordBatchReader:
    """Return a reader of the IPC stream whose pieces come from `chunks`, read as they are needed.

    Raises:
        InvalidRequestError: the pieces are not an Arrow IPC stream, or end early; later ones while
            reading. Whatever `chunks` raises passes through.

    """
    batches = _read_batches(chunks)
    schema: pa.Schema = next(batches)
    return pa.RecordBatchReader.from_batches(schema, batches)


def _read_batches(chunks: Iterable[bytes]) -> Iterator[Any]:
    """Yield the schema, then the batches."""
    try:
        joined = io.BufferedReader(_Joined(chunks))
        with pa.ipc.open_stream(pa.PythonFile(joined, mode="r")) as reader:
            _check_names(reader.schema)
            yield reader.schema
            yield from reader
    except _UNREADABLE as err:
        raise InvalidRequestError.of_field("arrow_ipc", f"not an Arrow IPC stream: {err}") from err


class _Joined(io.RawIOBase):
    """Pieces of bytes as one file to read from front to back."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        super().__init__()
        self._chunks = iter(chunks)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        num_bytes = min(len(buffer), len(self._rest))
        buffer[:num_bytes] = self._rest[:num_bytes]
        self._rest = self._rest[num_bytes:]
        return num_bytes


def columns_to_ipc(columns: Columns) -> bytes:
    """Return columns of equal length as one Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    batch = pa.RecordBatch.from_arrays(
        [pa.array(np.ascontiguousarray(column)) for column in columns.values()],
        names=list(columns),
    )
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def ipc_to_columns(data: bytes) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of an Arrow IPC stream.

    Raises:
        InvalidRequestError: not an Arrow IPC stream, or a column that is not numbers only.

    """
    table = read_chunks([data])
    columns: dict[str, npt.NDArray[Any]] = {}
    for name, column in zip(table.schema.names, table.columns, strict=True):
        is_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
        if not is_number or column.null_count:
            raise InvalidRequestError.of_field(name, f"expected numbers, found {column.type}")
        columns[name] = column.to_numpy()
    return columns


def record_to_table(record: Record) -> pa.Table:
    """Return columns that belong together, such as the requests of a simulation, as a table."""
    return pa.table(
        {name: _to_arrow(name, getattr(record, name)) for name in _names_of(type(record))}
    )


def table_to_record(table: pa.Table, cls: type[R], *, may_lack: bool = False) -> R:
    """Return columns that belong together from their table; it may have more columns.

    Columns become arrays; numbers without a copy where the table is in one piece. With `may_lack`
    those that the table has not are empty: it may be of an earlier version.

    Raises:
        InvalidRequestError: a column is missing.

    """
    names = _names_of(cls)
    missing = [name for name in names if name not in table.schema.names]
    if missing and not may_lack:
        raise InvalidRequestError(f"{cls.__name__}: missing columns {missing}")
    present = [name for name in names if name not in missing]
    return cls(**{name: _from_arrow(name, table.column(name)) for name in present})


# Columns of text, and of numbers that stand for names; whole numbers begin with `num_` or are
# listed, truths begin with `is_` or are listed, all others are real.
_TEXTS = frozenset(
    ("slo_class", "outcome", "name", "device", "mode", "profile", "quantization", "router")
) | {"verdict", "reason", "speculation", "rules", "kv_tiers"}
_TEXTS |= {"overlap", "recompute", "weight_parallel", "pipeline_schedule"}
_TEXTS |= {"placement", "stage_layers"}
_TEXTS |= {"axis"}
_TRUTHS = frozenset(("sequence_parallel",))
_NAMES: Mapping[str, Sequence[str]] = {"kind": SPAN_KINDS}
_WHOLE = frozenset(
    ("engine", "stage", "chunk", "micro_batch", "prefill_engine", "rank", "replicas", "batch_size")
)
_WHOLE |= {"tp", "pp", "dp", "ep", "prefill_replicas", "prefill_batch_size", "encoders"}
_WHOLE |= {"prefill_tp", "prefill_pp", "prefill_ep"}
_WHOLE |= {"cp", "virtual_stages", "micro_batch_size", "global_batch_size"}
_WHOLE |= {"zero_stage", "shard_degree", "weight_degree"}
_WHOLE |= {"source", "target"}
_ENTRIES = pa.dictionary(pa.int32(), pa.string())


def _names_of(cls: type) -> list[str]:
    return list(field_types(cls))


def _to_arrow(name: str, column: Any) -> pa.Array:
    if name in _NAMES:
        return pa.DictionaryArray.from_arrays(_numbers(column, pa.int8()), _words(_NAMES[name]))
    if name in _TEXTS:
        return _entries(column)
    if name.startswith("is_") or name in _TRUTHS:
        return _numbers(column, pa.bool_())
    is_whole = name.startswith("num_") or name in _WHOLE
    return _numbers(column, pa.int64() if is_whole else pa.float64())


# `pa.array` imports pandas to ask whether a column is one of its own, which takes longer than all
# else a small answer needs of Arrow. What is plain is put together without it.
_PLAIN: Mapping[pa.DataType, tuple[type[np.generic], str]] = {
    pa.int8(): (np.int8, "i"),
    pa.int64(): (np.int64, "i"),
    pa.float64(): (np.float64, "if"),
    pa.bool_(): (np.bool_, "b"),
}


def _numbers(column: Any, kind: pa.DataType) -> pa.Array:
    """Return numbers or truths; without a copy where they are an array of that kind."""
    dtype, kinds = _PLAIN[kind]
    values = np.asarray(column)
    if values.size and values.dtype.kind not in kinds:
        return pa.array(column, kind)
    values = np.ascontiguousarray(values, dtype=dtype)
    bits = np.packbits(values, bitorder="little") if kind == pa.bool_() else values
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(bits)])


def _entries(column: Sequence[str]) -> pa.Array:
    """Return texts as places in a dictionary of them, in the order in which they first come."""
    places = {text: place for place, text in enumerate(dict.fromkeys(column))}
    if not all(isinstance(text, str) for text in places):
        return pa.array(column, _ENTRIES)
    codes = np.fromiter((places[text] for text in column), np.int32, len(column))
    indices = pa.Array.from_buffers(pa.int32(), len(codes), [None, pa.py_buffer(codes)])
    return pa.DictionaryArray.from_arrays(indices, _words(list(places)))


def _words(texts: Sequence[str]) -> pa.Array:
    encoded = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pa.StringArray.from_buffers(
        len(encoded), pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))
    )


def _from_arrow(name: str, column: pa.ChunkedArray) -> npt.NDArray[Any]:
    if name in _NAMES:
        # Takes as long to import as all else of Arrow, and few tables have words for numbers.
        import pyarrow.compute as pc

        column = pc.index_in(column.cast(pa.string()), value_set=_words(_NAMES[name]))
    elif name in _TEXTS and (column.type != _ENTRIES or column.null_count):
        column = column.cast(pa.string())
    if column.null_count or not column.num_chunks or column.type not in _READERS:
        return np.asarray(column.to_numpy())
    parts = [_READERS[column.type](chunk) for chunk in column.chunks]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _read_truths(chunk: pa.Array) -> npt.NDArray[Any]:
    bits = np.frombuffer(chunk.buffers()[1], np.uint8)
    end = chunk.offset + len(chunk)
    return np.unpackbits(bits, count=end, bitorder="little")[chunk.offset :].view(np.bool_)


def _read_entries(chunk: pa.Array) -> npt.NDArray[Any]:
    texts = np.array(chunk.dictionary.to_pylist(), dtype=object)
    return np.asarray(texts[np.from_dlpack(chunk.indices)])


# Columns without gaps; `to_numpy` imports pandas, too.
_READERS: Mapping[pa.DataType, Callable[[pa.Array], npt.NDArray[Any]]] = {
    pa.int32(): np.from_dlpack,
    pa.int64(): np.from_dlpack,
    pa.float64(): np.from_dlpack,
    pa.bool_(): _read_truths,
    _ENTRIES: _read_entries,
}


class _Pending:
    """A sink for Arrow's writer that hands out what was written, piece by piece."""

    def __init__(self) -> None:
        self.closed = False
        self._buffer = bytearray()

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._buffer += view
        return view.nbytes

    def flush(self) -> None:
        """Do nothing: all is in memory."""

    def close(self) -> None:
        self.closed = True

    def pop_full(self, size: int) -> Iterator[bytes]:
        start = 0
        while len(self._buffer) - start >= size:
            yield bytes(self._buffer[start : start + size])
            start += size
        if start:
            del self._buffer[:start]

    def pop_all(self, size: int) -> Iterator[bytes]:
        yield from self.pop_full(size)
        if self._buffer:
            yield bytes(self._buffer)
