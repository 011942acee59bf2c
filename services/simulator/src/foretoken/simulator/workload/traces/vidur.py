"""Vidur's processed traces, also of Splitwise: arrived_at,num_prefill_tokens,num_decode_tokens.

Times in s. The columns are among those of the generic format, and what else that format knows, such
as sessions, is read too.
"""

from foretoken.simulator.workload.trace import TraceContent, TraceFormat, TraceRows
from foretoken.simulator.workload.traces.generic import read_generic

_COLUMNS = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")


def _read(trace: TraceRows) -> TraceContent:
    trace.require(*_COLUMNS)
    return read_generic(trace)


TRACE = TraceFormat(
    needs=",".join(_COLUMNS),
    matches=lambda columns, is_json: not is_json and columns.issuperset(_COLUMNS),
    read=_read,
)
