"""BurstGPT: Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type.

Times in s from midnight of the first day. Rows without tokens are failures: left out. Releases with
a `Session ID` say which conversation a request belongs to: a turn then waits for the answer before.
Source: github.com/HPMLL/BurstGPT, README.
"""

from foretoken.domain.requests.workload import Request
from foretoken.simulator.workload.trace import (
    NameTable,
    TraceContent,
    TraceFormat,
    TraceRow,
    TraceRows,
)

_COLUMNS = ("timestamp", "request tokens", "response tokens")


def _read(trace: TraceRows) -> TraceContent:
    trace.require(*_COLUMNS)
    sessions = NameTable(first=1)
    requests: list[Request] = []
    num_skipped = 0
    for row in trace.rows:
        request = _read_request(row, sessions)
        if request is None:
            num_skipped += 1
        else:
            requests.append(request)
    return TraceContent(tuple(requests), num_skipped=num_skipped)


def _read_request(row: TraceRow, sessions: NameTable) -> Request | None:
    num_asked, num_answered = (row.read_count(name, 0) for name in _COLUMNS[1:])
    arrival_s = row.read_seconds("timestamp")
    if num_asked == 0 or num_answered == 0:
        return None
    session = row.values.get("session id")
    return Request(
        arrival_s=arrival_s,
        num_prefill_tokens=num_asked,
        num_decode_tokens=num_answered,
        session=sessions.number(session) if session else 0,
    )


TRACE = TraceFormat(
    needs="Timestamp,Request tokens,Response tokens",
    matches=lambda columns, is_json: not is_json and columns.issuperset(_COLUMNS),
    read=_read,
)
