"""Any CSV, or JSON object per line: arrival_s,input_tokens,output_tokens.

Also `session` and `think_s`, `request_id` and `after`, `slo_class`, and block hashes. Many columns
go by several names; the
ending of a time says its unit, that of block hashes how many tokens a hash stands for. Turns of a
session hold those before them in `input_tokens`. A time may be a date; times of this century count
from the earliest one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from foretoken.domain.requests.workload import Request
from foretoken.simulator.workload.trace import (
    NameTable,
    TraceContent,
    TraceFormat,
    TraceRow,
    TraceRows,
    check_num_hashes,
    read_hashes,
    read_names,
    trace_error,
)

# Names of a column, each with how many of its unit a second has.
_ARRIVALS: Mapping[str, float] = {
    "arrival_s": 1, "arrival_time_s": 1, "arrival_time": 1, "arrival_timestamp": 1, "arrived_at": 1,
    "timestamp_s": 1, "timestamp": 1, "arrival_ms": 1e3, "arrival_time_ms": 1e3,
    "timestamp_ms": 1e3, "arrival_us": 1e6, "arrival_ns": 1e9, "arrival_time_ns": 1e9,
}  # fmt: skip
_THINKS: Mapping[str, float] = {"think_s": 1, "delay_s": 1, "think_ms": 1e3, "delay_ms": 1e3}
_INPUTS = (
    "input_tokens", "num_prefill_tokens", "prompt_tokens", "num_prompt_tokens", "context_tokens",
    "input_length", "prompt_length", "input_len", "prompt_len", "prompt_size", "input_toks", "isl",
)  # fmt: skip
_OUTPUTS = (
    "output_tokens", "num_decode_tokens", "completion_tokens", "generated_tokens",
    "num_output_tokens", "response_tokens", "output_length", "decode_length", "output_len",
    "token_size", "output_toks", "osl",
)  # fmt: skip
_SESSIONS = ("session", "session_id", "conversation_id")
_CLASSES = ("slo_class", "class")
_IDS = ("request_id", "id")
_AFTERS = ("after", "depends_on", "parent_ids")

_NS_PER_S = 1e9

# September 2001: later times since 1970 are larger, and no trace runs for thirty years.
_EPOCH_S = 1e9
# A number, too, may have a dash: a sign before it or before its exponent.
_DATE = re.compile(r"\s*\d+-")
_HASHES = re.compile(r"(?:prompt_block_ids|block_hashes|block_ids|hash_ids)(?:_(\d{1,9}))?")


@dataclass(slots=True)
class _Reader:
    """The columns a file has, and the names met so far."""

    arrival: tuple[str, float]
    input: str
    output: str
    hashes: str
    block_tokens: int
    names: NameTable = field(default_factory=NameTable)
    sessions: NameTable = field(default_factory=lambda: NameTable(first=1))
    seen: set[int] = field(default_factory=set)
    places: dict[str, int] = field(default_factory=dict)
    num_read: int = 0

    def read_request(self, row: TraceRow) -> Request:
        """Return the request of a row."""
        session = self._read_session(row)
        after = self._read_after(row)
        think = next(((name, unit) for name, unit in _THINKS.items() if row.has(name)), None)
        request = Request(
            arrival_s=self._read_arrival(row, session, has_earlier=bool(after)),
            num_prefill_tokens=row.read_count(self.input),
            num_decode_tokens=row.read_count(self.output),
            block_hashes=read_hashes(row, self.hashes, self.names) if self.hashes else (),
            session=session,
            think_s=row.read_seconds(*think) if think else 0.0,
            slo_class=next((str(row.values[name]) for name in _CLASSES if row.has(name)), ""),
            after=after,
        )
        return check_num_hashes(row, request, self.block_tokens) if self.hashes else request

    def _read_session(self, row: TraceRow) -> int:
        name = next((name for name in _SESSIONS if row.has(name)), None)
        # In `session`, as in a scenario, 0 is no session; an id may be 0.
        if name is None or (name == "session" and str(row.values[name]) == "0"):
            return 0
        value = row.values[name]
        if not isinstance(value, int | str):
            raise row.error(f"{name}: expected a name or number, found {value!r}")
        return self.sessions.number(str(value))

    def _read_after(self, row: TraceRow) -> tuple[int, ...]:
        """Return the places of the requests that a row names in `after`; learn its own name."""
        name = next((name for name in _AFTERS if row.has(name)), "")
        ids = read_names(row, name) if name else []
        unknown = [each for each in ids if each not in self.places]
        if unknown:
            raise row.error(f"{name}: no earlier row has the {_IDS[0]} {', '.join(unknown)}")
        after = tuple(self.places[each] for each in ids)
        own = next((name for name in _IDS if row.has(name)), "")
        if own:
            self.places[str(row.values[own])] = self.num_read
        self.num_read += 1
        return after

    def _read_arrival(self, row: TraceRow, session: int, *, has_earlier: bool) -> float:
        if (has_earlier or session in self.seen) and not row.has(self.arrival[0]):
            return 0.0  # the answers before it say when
        if session:
            self.seen.add(session)
        name, ticks_per_s = self.arrival
        if _DATE.match(str(row.values.get(name))):
            return row.read_timestamp(name) / _NS_PER_S
        return row.read_seconds(name, ticks_per_s)


def read_generic(trace: TraceRows) -> TraceContent:
    """Return the requests of a table with any of the known columns.

    Raises:
        InvalidRequestError: a column that is needed is missing, or a row cannot be used.

    """
    hashes = next(filter(_HASHES.fullmatch, sorted(trace.columns)), "")
    reader = _Reader(
        arrival=next(((n, unit) for n, unit in _ARRIVALS.items() if n in trace.columns), ("", 1)),
        input=_find(_INPUTS, trace.columns),
        output=_find(_OUTPUTS, trace.columns),
        hashes=hashes,
        block_tokens=_find_block_tokens(trace, hashes),
    )
    for wanted, found in (
        ("arrival_s", reader.arrival[0]),
        ("input_tokens", reader.input),
        ("output_tokens", reader.output),
    ):
        if not found:
            trace.require(wanted)
    requests = _count_from_first(list(map(reader.read_request, trace.rows)))
    return TraceContent(tuple(requests), reader.block_tokens)


def _count_from_first(requests: list[Request]) -> list[Request]:
    """Return requests whose times begin at 0 where they were times since 1970."""
    first_s = min((r.arrival_s for r in requests if r.arrival_s), default=0.0)
    if first_s < _EPOCH_S:
        return requests
    return [replace(r, arrival_s=max(0.0, r.arrival_s - first_s)) for r in requests]


def _find(names: tuple[str, ...], columns: frozenset[str]) -> str:
    return next((name for name in names if name in columns), "")


def _find_block_tokens(trace: TraceRows, hashes: str) -> int:
    match = _HASHES.fullmatch(hashes)
    if match is None:
        return 0
    block_tokens = trace.hash_block_tokens or int(match[1] or 0)
    if block_tokens == 0:
        raise trace_error(
            f"{trace.path}:1: {hashes}: hash_block_tokens must say how many tokens a hash stands "
            f"for, or the column's name: {hashes}_16"
        )
    return block_tokens


def _matches(columns: frozenset[str], _is_json: bool) -> bool:
    return all(not columns.isdisjoint(names) for names in (_ARRIVALS, _INPUTS, _OUTPUTS))


TRACE = TraceFormat(
    needs="arrival_s, input_tokens, output_tokens",
    matches=_matches,
    read=read_generic,
    is_generic=True,
)
