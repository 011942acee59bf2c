"""Alibaba Bailian (Qwen): JSON with chat_id, timestamp, input_length, output_length and hash_ids.

Times in s; a hash id names 16 tokens. Prompts hold the turns before them, and turns arrive when
they did: `parent_chat_id` is not needed for either.
Source: github.com/alibaba-edu/qwen-bailian-usagetraces-anon; AIPerf, docs/tutorials.
"""

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

_BLOCK_TOKENS = 16
_COLUMNS = ("chat_id", "timestamp", "input_length", "output_length")


def _read(trace: TraceRows) -> TraceContent:
    trace.require(*_COLUMNS)
    block_tokens = trace.hash_block_tokens or _BLOCK_TOKENS
    names = NameTable()
    requests: list[Request] = []
    num_skipped = 0
    for row in trace.rows:
        if row.read_count("input_length", 0) and row.read_count("output_length", 0):
            requests.append(check_num_hashes(row, _read_request(row, names), block_tokens))
        else:
            num_skipped += 1
    has_hashes = any(request.block_hashes for request in requests)
    return TraceContent(tuple(requests), block_tokens if has_hashes else 0, num_skipped)


def _read_request(row: TraceRow, names: NameTable) -> Request:
    return Request(
        arrival_s=row.read_seconds("timestamp"),
        num_prefill_tokens=row.read_count("input_length"),
        num_decode_tokens=row.read_count("output_length"),
        block_hashes=read_hashes(row, "hash_ids", names),
    )


TRACE = TraceFormat(
    needs="JSON with chat_id, timestamp, input_length, output_length",
    matches=lambda columns, is_json: is_json and columns.issuperset(_COLUMNS),
    read=_read,
)
