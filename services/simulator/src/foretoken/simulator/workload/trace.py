"""Read trace files: CSV or a JSON object per line, compressed or not; each row knows its place."""

import csv
import gzip
import io
import json
import logging
import math
import re
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import IO, Any

from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.domain.plugins import scan_modules
from foretoken.domain.requests.workload import Request
from foretoken.domain.units import MAX_COUNT

_TIMESTAMP = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.(?P<fraction>\d{1,9}))?"
    r"(?P<zone>Z|[+-]\d\d:?\d\d)?"
)
_NS_PER_S = 10**9

# Longer numbers are beyond any length, and slow to read.
_MAX_DIGITS = 18


@lru_cache
def _read_seconds(text: str) -> int:
    """Return a date and time without a fraction in s since 1970; neighbours of a trace share it."""
    time = datetime.fromisoformat(text)
    return int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp())


@dataclass(frozen=True, slots=True)
class TraceContent:
    """The requests of a trace; `num_skipped` rows held none, such as calls that failed."""

    requests: tuple[Request, ...]
    hash_block_tokens: int = 0
    num_skipped: int = 0


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One row by column name; CSV values are text."""

    values: Mapping[str, Any]
    path: Path
    line: int

    def error(self, description: str) -> InvalidRequestError:
        """Return the error about this row."""
        return trace_error(f"{self.path}:{self.line}: {description}")

    def has(self, name: str) -> bool:
        """Return whether there is a value: neither absent nor empty."""
        return self.values.get(name) not in (None, "")

    def read_count(self, name: str, minimum: int = 1) -> int:
        """Return a whole number of at least the minimum that a length may be.

        Raises:
            InvalidRequestError: it is none.

        """
        value = self.values.get(name)
        # Nearly all are plain digits: a large trace spends its time here.
        if isinstance(value, str) and len(value) < _MAX_DIGITS and value.isdecimal():
            number: float = int(value)
        else:
            number = self._parse(name)
        if not (minimum <= number <= MAX_COUNT and number == int(number)):
            raise self._expected(name, f"a whole number from {minimum} to {MAX_COUNT}")
        return int(number)

    def read_seconds(self, name: str, ticks_per_s: float = 1.0) -> float:
        """Return a time of at least 0 in s; the column counts `ticks_per_s`.

        Raises:
            InvalidRequestError: it is none.

        """
        number = self._parse(name)
        if not (math.isfinite(number) and number >= 0):
            raise self._expected(name, "a time of at least 0")
        return number / ticks_per_s

    def read_timestamp(self, name: str) -> int:
        """Return a date and time in ns since 1970; without a time zone it is taken as UTC.

        Raises:
            InvalidRequestError: it is none.

        """
        text = str(self.values.get(name, ""))
        match = _TIMESTAMP.fullmatch(text.strip())
        try:
            if match is None:
                raise ValueError  # noqa: TRY301 - the same answer as for a 31st of February
            time, fraction, zone = match.group("time", "fraction", "zone")
            whole_s = _read_seconds(time + (zone or ""))
        except ValueError as err:
            raise self.error(
                f"{name}: expected a time such as 2023-11-16 18:17:03.9799600, found {text!r}"
            ) from err
        return whole_s * _NS_PER_S + int((fraction or "").ljust(9, "0"))

    def _parse(self, name: str) -> float:
        value = self.values.get(name)
        if isinstance(value, bool):
            raise self._expected(name, "a number")
        try:
            return float(value)  # type: ignore[arg-type] # what is no number raises
        except (TypeError, ValueError, OverflowError) as err:
            raise self._expected(name, "a number") from err

    def _expected(self, name: str, what: str) -> InvalidRequestError:
        if name not in self.values:
            return self.error(f"{name} is missing")
        return self.error(f"{name}: expected {what}, found {self.values[name]!r}")


@dataclass(frozen=True, slots=True)
class TraceRows:
    """The rows of a file, read as they are asked for.

    `columns` are those of the header, or the keys of the first JSON object. `hash_block_tokens` is
    what the caller says a block hash stands for (0: what the format says).
    """

    path: Path
    columns: frozenset[str]
    is_json: bool
    rows: Iterator[TraceRow]
    hash_block_tokens: int = 0

    def require(self, *names: str) -> None:
        """Check that there are columns.

        Raises:
            InvalidRequestError: some are missing.

        """
        missing = [name for name in names if name not in self.columns]
        if missing:
            what = "the first object" if self.is_json else "the header"
            raise trace_error(f"{self.path}:1: {what} lacks {', '.join(missing)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceFormat:
    """A trace plug-in: how to know a format and how to read it.

    `needs` says what a file of it holds, for messages. `matches` gets the columns and whether they
    are keys of JSON objects. Where several match, those that are `generic` give way.
    """

    needs: str
    matches: Callable[[frozenset[str], bool], bool]
    read: Callable[[TraceRows], TraceContent]
    is_generic: bool = False


@dataclass(slots=True)
class NameTable:
    """Small numbers for names of any kind, by first appearance from `first` on."""

    first: int = 0
    _numbers: dict[Hashable, int] = field(default_factory=dict)

    def number(self, name: Hashable) -> int:
        """Return the number of a name, a new one for a new name."""
        return self._numbers.setdefault(name, self.first + len(self._numbers))


def read_hashes(row: TraceRow, name: str, names: NameTable, scope: str = "") -> tuple[int, ...]:
    """Return block hashes as small numbers; a list, or text with blanks between; absent: none.

    Equal hashes are the same within a `scope`.

    Raises:
        InvalidRequestError: neither.

    """
    if row.values.get(name) is None:
        return ()
    hashes = _read_list(row, name, "block hashes")
    return tuple(map(names.number, ((scope, each) for each in hashes) if scope else hashes))


def read_names(row: TraceRow, name: str) -> list[str]:
    """Return names of requests; a list, or text with blanks between.

    Raises:
        InvalidRequestError: neither.

    """
    return [str(item) for item in _read_list(row, name, "names of requests")]


def _read_list(row: TraceRow, name: str, what: str) -> list[int | str]:
    value = row.values[name]
    if isinstance(value, str):
        value = value.replace(";", " ").strip("[] ").replace(",", " ").split()
    if not isinstance(value, list) or not all(isinstance(item, int | str) for item in value):
        raise row.error(f"{name}: expected a list of {what}, found {value!r}")
    return value


def check_num_hashes(row: TraceRow, request: Request, block_tokens: int) -> Request:
    """Return the request if its prompt has as many blocks as hashes, or more.

    Raises:
        InvalidRequestError: it has fewer.

    """
    num_blocks = -(-request.num_prefill_tokens // block_tokens)
    if len(request.block_hashes) > num_blocks:
        raise row.error(
            f"{len(request.block_hashes)} block hashes, but {request.num_prefill_tokens} tokens "
            f"are {num_blocks} blocks of {block_tokens}; hash_block_tokens sets the size"
        )
    return request


def trace_error(description: str) -> InvalidRequestError:
    """Return the error about a trace file."""
    return InvalidRequestError.of_field("trace_path", description)


_log = logging.getLogger(__name__)

# What files of a folder are read.
_JSON_ENDINGS = (".json", ".jsonl", ".json.gz", ".jsonl.gz")

# The first bytes of a gzip file (RFC 1952, section 2.3.1).
_GZIP_MAGIC = b"\x1f\x8b"


def load_trace(path: Path, format_name: str = "", hash_block_tokens: int = 0) -> TraceContent:
    """Return the requests of a trace file, or of a folder of JSON files, as they stand; times in s.

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
        with _open_rows(path, hash_block_tokens) as rows:
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


@contextmanager
def _open_rows(path: Path, hash_block_tokens: int) -> Iterator[TraceRows]:
    if not path.is_dir():
        with _open_text(path) as text:
            yield _read_rows(text, path, hash_block_tokens)
        return
    objects = _read_folder(path)
    head = next(objects, None)
    if head is None:
        raise trace_error(
            f"cannot read {path}: none of its files ends in {' or '.join(_JSON_ENDINGS)}"
        )
    yield TraceRows(path, frozenset(head.values), True, chain([head], objects), hash_block_tokens)


def _read_folder(folder: Path) -> Iterator[TraceRow]:
    """Return the JSON objects of a folder's files, by the names of the files."""
    for path in sorted(folder.iterdir()):
        if path.name.endswith(_JSON_ENDINGS):
            with _open_text(path) as text:
                yield from _read_objects(text, path)


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
            # An object may also be the whole file, over many lines.
            values = json.loads(line if number > 1 or _is_whole(line) else line + "".join(lines))
        except (ValueError, RecursionError) as err:
            raise trace_error(f"{path}:{number}: expected a JSON object: {err}") from err
        if not isinstance(values, dict):
            raise trace_error(f"{path}:{number}: expected a JSON object, found {line.strip()!r}")
        yield TraceRow(values, path, number)


def _is_whole(line: str) -> bool:
    """Whether a line that begins an object may end it, too."""
    return line.rstrip().endswith("}")


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
