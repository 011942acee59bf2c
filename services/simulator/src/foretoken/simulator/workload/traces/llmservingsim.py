"""LLMServingSim's workloads: a JSON object per line, ShareGPT prompts as token ids.

`input_toks`, `output_toks`, `arrival_time_ns` and, for prefix caching, `input_tok_ids`: blocks of
16 tokens get their names from the tokens and the block before. Only whole blocks have one.
Source: github.com/casys-kaist/LLMServingSim, dataset/.
"""

from foretoken.domain.requests.workload import Request
from foretoken.simulator.workload.trace import (
    NameTable,
    TraceContent,
    TraceFormat,
    TraceRow,
    TraceRows,
)

# The block size vLLM serves with.
_BLOCK_TOKENS = 16
_NS_PER_S = 1e9
_COLUMNS = ("input_toks", "output_toks", "arrival_time_ns")


def _read(trace: TraceRows) -> TraceContent:
    trace.require(*_COLUMNS)
    block_tokens = trace.hash_block_tokens or _BLOCK_TOKENS
    names = NameTable()
    requests = tuple(_read_request(row, names, block_tokens) for row in trace.rows)
    has_hashes = any(request.block_hashes for request in requests)
    return TraceContent(requests, block_tokens if has_hashes else 0)


def _read_request(row: TraceRow, names: NameTable, block_tokens: int) -> Request:
    num_prompt = row.read_count("input_toks")
    return Request(
        arrival_s=row.read_seconds("arrival_time_ns", _NS_PER_S),
        num_prefill_tokens=num_prompt,
        num_decode_tokens=row.read_count("output_toks"),
        block_hashes=_name_blocks(row, num_prompt, names, block_tokens),
    )


def _name_blocks(
    row: TraceRow, num_prompt: int, names: NameTable, block_tokens: int
) -> tuple[int, ...]:
    tokens = row.values.get("input_tok_ids")
    if not tokens:
        return ()
    if not isinstance(tokens, list) or len(tokens) != num_prompt:
        raise row.error(f"input_tok_ids: expected a list of {num_prompt} token ids")
    if not all(isinstance(token, int) for token in tokens):
        raise row.error("input_tok_ids: expected whole numbers")
    hashes: list[int] = []
    for begin in range(0, num_prompt - block_tokens + 1, block_tokens):
        before = hashes[-1] if hashes else None
        hashes.append(names.number((before, *tokens[begin : begin + block_tokens])))
    return tuple(hashes)


TRACE = TraceFormat(
    needs="JSON with input_toks, output_toks, arrival_time_ns",
    matches=lambda columns, is_json: is_json and columns.issuperset(_COLUMNS),
    read=_read,
)
