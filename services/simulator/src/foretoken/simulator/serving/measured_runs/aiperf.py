"""AIPerf's `profile_export.jsonl`: one record per request, with `metadata`, `metrics`, `error`.

Source: AIPerf, "Working with Profile Export Files". A metric is a `value` with its `unit`;
`request_start_ns` is a reading of the wall clock; `inter_chunk_latency` are the gaps between pieces
of the answer. Records of another `benchmark_phase` than `profiling` are warm-up.
"""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from foretoken.domain.requests.serving_run import MeasuredRequest, ServingRun
from foretoken.domain.units import NS_PER_S
from foretoken.simulator.validation.measured_run import MeasuredRunFormat, RunFile

_S_PER_UNIT = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}
_SUMMARY = "profile_export_aiperf.json"
# Reasoning included, which the engine had to make too; then without.
_OUTPUT_COUNTS = ("output_sequence_length", "output_token_count")


def _recognises(file: RunFile) -> bool:
    first = file.first_line
    return isinstance(first, Mapping) and {"metadata", "metrics"} <= set(first)


def _read(file: RunFile) -> ServingRun:
    records = [(number, _mapping(file, number, record)) for number, record in file.json_lines]
    kept = [
        (number, record)
        for number, record in records
        if record["metadata"].get("benchmark_phase", "profiling") == "profiling"
    ]
    starts = [_start_ns(file, number, record) for number, record in kept]
    origin_ns = min(starts, default=0)
    requests = [
        _read_record(file, number, record, (start_ns - origin_ns) / NS_PER_S)
        for (number, record), start_ns in zip(kept, starts, strict=True)
    ]
    return ServingRun(
        source="AIPerf", requests=tuple(requests), concurrency=_find_concurrency(file)
    )


def _mapping(file: RunFile, number: int, record: Any) -> Mapping[str, Any]:
    if not isinstance(record, Mapping) or not isinstance(record.get("metadata"), Mapping):
        file.refuse("expected an object with `metadata` and `metrics`", str(number))
    return record


def _start_ns(file: RunFile, number: int, record: Mapping[str, Any]) -> int:
    start_ns = record["metadata"].get("request_start_ns")
    if not isinstance(start_ns, int):
        file.refuse(f"expected metadata.request_start_ns in ns, found {start_ns!r}", str(number))
    return start_ns


def _read_record(
    file: RunFile, number: int, record: Mapping[str, Any], arrival_s: float
) -> MeasuredRequest:
    metrics = file.mapping(record.get("metrics") or {}, str(number))
    error = record.get("error")
    lengths = {
        "num_prefill_tokens": _count(file, number, metrics, ("input_sequence_length", "error_isl")),
        "num_decode_tokens": _count(file, number, metrics, _OUTPUT_COUNTS),
    }
    if error or record["metadata"].get("was_cancelled"):
        message = error.get("message", "") if isinstance(error, Mapping) else str(error or "")
        return file.build_request(
            str(number), arrival_s=arrival_s, error=message or "cancelled", **lengths
        )
    ttft_s = _time_s(file, number, metrics, "time_to_first_token")
    latency_s = _time_s(file, number, metrics, "request_latency")
    gaps = _times_s(metrics.get("inter_chunk_latency"))
    first_s = arrival_s + ttft_s
    chunks = tuple(accumulate(gaps, initial=first_s)) if gaps else ()
    return file.build_request(
        str(number),
        arrival_s=arrival_s,
        first_token_s=first_s,
        last_token_s=max(arrival_s + latency_s, first_s),
        chunk_s=chunks,
        **lengths,
    )


def _time_s(file: RunFile, number: int, metrics: Mapping[str, Any], name: str) -> float:
    times = _times_s(metrics.get(name))
    if not times:
        problem = f"expected metrics.{name} with a `value` and a `unit` of time"
        file.refuse(f"{problem}, found {metrics.get(name)!r}; was --streaming set?", str(number))
    return times[0]


def _times_s(metric: Any) -> list[float]:
    """Return the times of a metric; none where it is absent or its unit is not one of time."""
    if not isinstance(metric, Mapping) or str(metric.get("unit")) not in _S_PER_UNIT:
        return []
    scale, value = _S_PER_UNIT[str(metric["unit"])], metric.get("value")
    values = value if isinstance(value, list) else [value]
    return [item * scale for item in values if isinstance(item, int | float)]


def _count(file: RunFile, number: int, metrics: Mapping[str, Any], names: tuple[str, ...]) -> int:
    for name in names:
        metric = metrics.get(name)
        value = metric.get("value") if isinstance(metric, Mapping) else metric
        if value is not None:
            return int(file.number(value, str(number), f"a number of tokens as {name}"))
    return 0


def _find_concurrency(file: RunFile) -> int:
    """Return the concurrency of a closed loop that the summary next to the file states."""
    summary = file.neighbour(_SUMMARY)
    content = summary.json if summary.path.is_file() else None
    config = content.get("input_config") if isinstance(content, Mapping) else None
    load = config.get("loadgen") if isinstance(config, Mapping) else None
    if not isinstance(load, Mapping) or load.get("request_rate"):
        return 0
    concurrency = load.get("concurrency")
    return concurrency if isinstance(concurrency, int) else 0


MEASURED_RUN = MeasuredRunFormat(
    title="AIPerf's profile_export.jsonl",
    file_names=("profile_export.jsonl",),
    recognises=_recognises,
    read=_read,
)
