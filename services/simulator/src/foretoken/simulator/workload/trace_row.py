"""What trace formats read: the rows of a file, each of which knows its place."""

import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.workload import Request
from foretoken.simulator.workload.request_draft import MAX_LENGTH

_TIMESTAMP = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.(?P<fraction>\d{1,9}))?"
    r"(?P<zone>Z|[+-]\d\d:?\d\d)?"
)
_NS_PER_S = 10**9

# Longer numbers are beyond any length, and slow to read.
_MAX_DIGITS = 18


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
        if not (minimum <= number <= MAX_LENGTH and number == int(number)):
            raise self._expected(name, f"a whole number from {minimum} to {MAX_LENGTH}")
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
            time = datetime.fromisoformat(match["time"] + (match["zone"] or ""))
        except ValueError as err:
            raise self.error(
                f"{name}: expected a time such as 2023-11-16 18:17:03.9799600, found {text!r}"
            ) from err
        if time.tzinfo is None:
            time = time.replace(tzinfo=UTC)
        return int(time.timestamp()) * _NS_PER_S + int((match["fraction"] or "").ljust(9, "0"))

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


def read_hashes(row: TraceRow, name: str, names: NameTable) -> tuple[int, ...]:
    """Return block hashes as small numbers; a list, or text with blanks between; absent: none.

    Raises:
        InvalidRequestError: neither.

    """
    value = row.values.get(name)
    if value is None:
        return ()
    if isinstance(value, str):
        value = value.replace(";", " ").strip("[] ").replace(",", " ").split()
    if not isinstance(value, list) or not all(isinstance(item, int | str) for item in value):
        raise row.error(f"{name}: expected a list of block hashes, found {value!r}")
    return tuple(map(names.number, value))


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
