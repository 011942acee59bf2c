"""Forward-pass metrics as JSON lines: a `ForwardPassMetrics` for each iteration of a scheduler.

vLLM under Dynamo, and SGLang, send them; `python -m dynamo.common.recv_forward_pass_metrics
--output FILE` writes them, each in `metrics` next to `received_at_ns`. Source: Dynamo,
`components/src/dynamo/common/forward_pass_metrics.py`, version 1: `wall_time` is in s from
scheduling to the update with the output, 0 of an idle engine; `sum_prefill_tokens` are computed in
the iteration, `sum_prefill_kv_tokens` were there before it; `var_decode_kv_tokens` is the variance
over the decoding requests. The proposal for vLLM's own core has the fields of `scheduled_requests`
next to `wall_time`, which is read too.
"""

import math
from collections.abc import Mapping
from typing import Any

from foretoken.simulator.validation.measured_run import RunFile
from foretoken.simulator.validation.measured_steps import EngineStep, MeasuredStepsFormat

_VERSION = 1
_TIME = "wall_time"
_COUNTS = {
    "num_prefills": "num_prefill_requests",
    "prefill_tokens": "sum_prefill_tokens",
    "prefill_kv_tokens": "sum_prefill_kv_tokens",
    "num_decodes": "num_decode_requests",
    "decode_kv_tokens": "sum_decode_kv_tokens",
}


def _recognises(file: RunFile) -> bool:
    first = file.first_line
    return isinstance(first, Mapping) and _TIME in _unwrap(first)


def _unwrap(line: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = line.get("metrics")
    return inner if isinstance(inner, Mapping) else line


def _read(file: RunFile) -> tuple[EngineStep, ...]:
    return tuple(_read_line(file, str(number), line) for number, line in file.json_lines)


def _read_line(file: RunFile, place: str, line: Any) -> EngineStep:
    metrics = _unwrap(file.mapping(line, place))
    version = metrics.get("version", _VERSION)
    if version != _VERSION:
        file.refuse(f"forward-pass metrics of version {version!r}; {_VERSION} is known", place)
    counted = file.mapping(metrics.get("scheduled_requests", metrics), place)
    counts = {
        field: int(file.number(counted.get(name, 0), place, f"a number as {name}"))
        for field, name in _COUNTS.items()
    }
    variance = file.number(counted.get("var_decode_kv_tokens", 0), place, "a variance")
    duration_s = file.number(metrics.get(_TIME), place, f"a time in s as {_TIME}")
    longest = _longest(counts["decode_kv_tokens"], counts["num_decodes"], variance)
    return EngineStep(duration_s=duration_s, decode_kv_tokens_max=longest, **counts)


def _longest(total: int, count: int, variance: float) -> int:
    """Return the longest of some contexts, as of lengths evenly spread with that variance."""
    if not count:
        return 0
    return min(round(total / count + math.sqrt(3.0 * max(variance, 0.0))), total)


MEASURED_STEPS = MeasuredStepsFormat(
    title="forward-pass metrics of vLLM, SGLang and Dynamo", recognises=_recognises, read=_read
)
