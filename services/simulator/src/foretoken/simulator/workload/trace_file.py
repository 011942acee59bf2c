"""Read trace files: CSV or a JSON object per line, compressed by gzip or not."""

import csv
import gzip
import io
import json
import logging
import zlib
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import IO

from foretoken.domain.errors import UnknownPluginError
from foretoken.domain.plugins import scan_modules
from foretoken.simulator.workload.trace_row import (
    TraceContent,
    TraceFormat,
    TraceRow,
    TraceRows,
    trace_error,
)

_log = logging.getLogger(__name__)

# The first bytes of a gzip file (RFC 1952, section 2.3.1).
_GZIP_MAGIC = b"\x1f\x8b"


def load_trace(path: Path, format_name: str = "", hash_block_tokens: int = 0) -> TraceContent:
    """Return the requests of a trace file as they stand, times in s.

    `format_name` names a plug-in of `workload/traces`; empty: the one that knows the columns.
    `hash_block_tokens` says what a block hash stands for where it is not what is usual for the
    format.

    Raises:
        UnknownPluginError: no trace format of that name.
        InvalidRequestError: the file cannot be read, or a line cannot be used; names file and line.

    """
    formats = scan_modules("foretoken.simulator.workload.traces", "TRACE")
    if format_name:
        UnknownPluginError.look_up(format_name, formats)
    try:
        with _open_text(path) as text:
            rows = _read_rows(text, path, hash_block_tokens)
            trace_format = formats[format_name or _recognise(rows, formats)]
            content: TraceContent = trace_format.read(rows)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as err:
        raise trace_error(f"cannot read {path}: {err}") from err
    if not content.requests:
        raise trace_error(f"{path} holds no requests")
    if content.num_skipped:
        _log.warning(
            "trace rows without a request were left out path=%s rows=%d of=%d",
            path,
            content.num_skipped,
            content.num_skipped + len(content.requests),
        )
    return content


def _open_text(path: Path) -> IO[str]:
    with path.open("rb") as file:
        is_compressed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    opened = gzip.open(path) if is_compressed else path.open("rb")  # noqa: SIM115 - see below
    # With a byte-order mark or without, as spreadsheets write it; closing the text closes the file.
    return io.TextIOWrapper(opened, encoding="utf-8-sig", newline="")


def _read_rows(text: IO[str], path: Path, hash_block_tokens: int) -> TraceRows:
    first = text.readline()
    if not first.strip():
        raise trace_error(f"{path}:1: expected a header or a JSON object, found an empty line")
    lines = chain([first], text)
    if first.lstrip()[:1] == "[":
        raise trace_error(
            f"{path}:1: a JSON list; a trace is one JSON object per line, or CSV. Conversations "
            "such as ShareGPT's hold text: write input_tokens, output_tokens and arrival_s of each"
        )
    if first.lstrip()[:1] == "{":
        rows = _read_objects(lines, path)
        head = next(rows)
        return TraceRows(path, frozenset(head.values), True, chain([head], rows), hash_block_tokens)
    # Names without capitals: columns are written as one likes.
    delimiter = max(",;\t", key=first.count)
    header = [name.strip().lower() for name in next(csv.reader([first], delimiter=delimiter), [])]
    if len(set(header)) < len(header):
        raise trace_error(f"{path}:1: a column name is there twice")
    table = _read_table(text, delimiter, header, path)
    return TraceRows(path, frozenset(header), False, table, hash_block_tokens)


def _read_objects(lines: Iterator[str], path: Path) -> Iterator[TraceRow]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as err:
            raise trace_error(f"{path}:{number}: expected a JSON object: {err}") from err
        if not isinstance(values, dict):
            raise trace_error(f"{path}:{number}: expected a JSON object, found {line.strip()!r}")
        yield TraceRow(values, path, number)


def _read_table(text: IO[str], delimiter: str, header: list[str], path: Path) -> Iterator[TraceRow]:
    reader = csv.reader(text, delimiter=delimiter)
    try:
        for cells in reader:
            line = reader.line_num + 1  # the header was read before
            if len(cells) > len(header):
                raise trace_error(
                    f"{path}:{line}: expected {len(header)} columns, found {len(cells)}"
                )
            if cells:
                yield TraceRow(dict(zip(header, cells, strict=False)), path, line)
    except csv.Error as err:
        raise trace_error(f"{path}:{reader.line_num + 1}: {err}") from err


def _recognise(rows: TraceRows, formats: Mapping[str, TraceFormat]) -> str:
    matching = {
        name: item for name, item in formats.items() if item.matches(rows.columns, rows.is_json)
    }
    special = [name for name, item in matching.items() if not item.is_generic]
    names = special or list(matching)
    if len(names) == 1:
        return names[0]
    if names:
        raise trace_error(f"{rows.path}:1: may be {' or '.join(names)}: set trace_format")
    known = "; ".join(f"{name}: {item.needs}" for name, item in formats.items())
    raise trace_error(
        f"{rows.path}:1: no known trace has the columns {', '.join(sorted(rows.columns))} ({known})"
    )
