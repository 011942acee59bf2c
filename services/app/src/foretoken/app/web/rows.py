"""Tables on their way out: pieces of an Arrow stream as JSON, CSV, or as they are."""

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
from pyarrow import csv

from foretoken.wire import ipc
from foretoken.wire.message_json import float_to_json

ARROW: Final = "application/vnd.apache.arrow.stream"
# Rows that are turned into text at once.
_NUM_ROWS: Final = 4_096


def _write_json(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield one JSON array of objects, a row each."""
    start = "["
    for batch in _read(pieces):
        text = ",\n".join(map(_to_text, batch.to_pylist()))
        if text:
            yield f"{start}{text}".encode()
            start = ",\n"
    yield b"[]\n" if start == "[" else b"]\n"


def _write_csv(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield CSV, nested columns as JSON text."""
    is_first = True
    reader = ipc.open_chunks(pieces)
    for batch in _split(reader):
        columns = {name: _flat(batch.column(name)) for name in batch.schema.names}
        buffer = io.BytesIO()
        csv.write_csv(pa.table(columns), buffer, csv.WriteOptions(include_header=is_first))
        is_first = False
        yield buffer.getvalue()
    if is_first:
        names = (name.replace('"', '""') for name in reader.schema.names)
        yield ",".join(f'"{name}"' for name in names).encode() + b"\n"


def _pass(pieces: Iterable[bytes]) -> Iterator[bytes]:
    return iter(pieces)


FORMATS: Mapping[str, Callable[[Iterable[bytes]], Iterator[bytes]]] = {
    "application/json": _write_json,
    "text/csv": _write_csv,
    ARROW: _pass,
}


def _read(pieces: Iterable[bytes]) -> Iterator[Any]:
    return _split(ipc.open_chunks(pieces))


def _split(reader: Any) -> Iterator[Any]:
    for batch in reader:
        for start in range(0, batch.num_rows, _NUM_ROWS):
            yield batch.slice(start, _NUM_ROWS)


def _flat(column: Any) -> Any:
    if not pa.types.is_nested(column.type):
        return column
    return pa.array([None if item is None else _to_text(item) for item in column.to_pylist()])


def _to_text(value: Any) -> str:
    """Return JSON, which has no numbers that are not finite: those are words, as in messages."""
    try:
        return json.dumps(value, default=_to_plain, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(_with_words(value), default=_to_plain, ensure_ascii=False)


def _with_words(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_words(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_words(item) for item in value]
    return float_to_json(value) if isinstance(value, float) else value


def _to_plain(value: Any) -> Any:
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return float(value)
    return value.hex() if isinstance(value, bytes) else str(value)
