"""Azure's LLM inference traces of 2023 and 2024: TIMESTAMP,ContextTokens,GeneratedTokens.

A timestamp is a date and time, in 2023 with seven digits of a second, in 2024 with a time zone;
times count from the earliest one. Calls that generated nothing are left out.
Source: github.com/Azure/AzurePublicDataset, AzureLLMInferenceDataset2023.md and ...2024.md.
"""

from foretoken.domain.requests.workload import Request
from foretoken.simulator.workload.trace import TraceContent, TraceFormat, TraceRows

_COLUMNS = ("timestamp", "contexttokens", "generatedtokens")

_NS_PER_S = 10**9


def _read(trace: TraceRows) -> TraceContent:
    trace.require(*_COLUMNS)
    calls = [
        (
            row.read_timestamp("timestamp"),
            row.read_count("contexttokens", 0),
            row.read_count("generatedtokens", 0),
        )
        for row in trace.rows
    ]
    first_ns = min((time_ns for time_ns, _, _ in calls), default=0)
    requests = tuple(
        Request(
            arrival_s=(time_ns - first_ns) / _NS_PER_S,
            num_prefill_tokens=num_context,
            num_decode_tokens=num_generated,
        )
        for time_ns, num_context, num_generated in calls
        if num_context and num_generated
    )
    return TraceContent(requests, num_skipped=len(calls) - len(requests))


TRACE = TraceFormat(
    needs="TIMESTAMP,ContextTokens,GeneratedTokens",
    matches=lambda columns, is_json: not is_json and columns.issuperset(_COLUMNS),
    read=_read,
)
