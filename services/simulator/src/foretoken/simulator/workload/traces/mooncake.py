"""Mooncake: a JSON object per line with timestamp, input_length, output_length and hash_ids.

Times in ms. A hash id names 512 tokens and all before them; the last may name fewer. Where turns
have a `session_id`, a later one's `input_length` counts what is new, its prompt begins with the
turns before, and it comes `delay` ms after the answer; so AIPerf replays them.
Source: github.com/kvcache-ai/Mooncake, FAST25-release/traces; AIPerf, docs/benchmark-modes.
"""

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
)

_BLOCK_TOKENS = 512
_MS_PER_S = 1000.0
_LENGTHS = ("input_length", "output_length")


@dataclass(slots=True)
class _Reader:
    block_tokens: int
    names: NameTable = field(default_factory=NameTable)
    sessions: NameTable = field(default_factory=lambda: NameTable(first=1))
    latest: dict[int, Request] = field(default_factory=dict)
    num_skipped: int = 0

    def read_request(self, row: TraceRow) -> Request | None:
        """Return the request of a row, None where nothing was generated."""
        num_new, num_answered = (row.read_count(name, 0) for name in _LENGTHS)
        if num_new == 0 or num_answered == 0:
            self.num_skipped += 1
            return None
        session = self._read_session(row)
        before = self.latest.get(session)
        request = Request(
            arrival_s=(
                row.read_seconds("timestamp", _MS_PER_S)
                if row.has("timestamp") or before is None
                else before.arrival_s
            ),
            num_prefill_tokens=num_new,
            num_decode_tokens=num_answered,
            block_hashes=read_hashes(row, "hash_ids", self.names),
            session=session,
            think_s=row.read_seconds("delay", _MS_PER_S) if row.has("delay") else 0.0,
        )
        check_num_hashes(row, request, self.block_tokens)
        if session:
            request = self.latest[session] = self._continue(request, before)
        return request

    def _read_session(self, row: TraceRow) -> int:
        if not row.has("session_id"):
            return 0
        name = row.values["session_id"]
        if not isinstance(name, int | str):
            raise row.error(f"session_id: expected a name or number, found {name!r}")
        return self.sessions.number(name)

    def _continue(self, turn: Request, before: Request | None) -> Request:
        """Return a turn whose prompt begins with the turns before it."""
        if before is None:
            return turn
        # Hashes of what is new do not lie at a block's begin: the session's own name goes on.
        num_whole = before.num_prefill_tokens // self.block_tokens
        return replace(
            turn,
            num_prefill_tokens=turn.num_prefill_tokens
            + before.num_prefill_tokens
            + before.num_decode_tokens,
            block_hashes=before.block_hashes[:num_whole],
        )


def _read(trace: TraceRows) -> TraceContent:
    trace.require(*_LENGTHS)
    reader = _Reader(trace.hash_block_tokens or _BLOCK_TOKENS)
    requests = tuple(r for r in map(reader.read_request, trace.rows) if r is not None)
    has_hashes = any(request.block_hashes for request in requests)
    return TraceContent(requests, reader.block_tokens if has_hashes else 0, reader.num_skipped)


def _matches(columns: frozenset[str], is_json: bool) -> bool:
    has_time = not columns.isdisjoint(("timestamp", "session_id"))
    return is_json and has_time and columns.issuperset(_LENGTHS) and "chat_id" not in columns


TRACE = TraceFormat(
    needs="JSON with timestamp, input_length, output_length", matches=_matches, read=_read
)
