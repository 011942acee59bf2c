"""The result of `vllm bench serve --save-result --save-detailed`, and of tools derived from it.

Source: vLLM, `vllm/benchmarks/serve.py`: lists with one entry per request, times in s; `errors` is
empty text for a request that was answered, and `start_times` are readings of one clock, saved by
later releases only. SGLang's `bench_serving --output-details` writes the same lists.
"""

import heapq
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from foretoken.domain.requests.serving_run import MeasuredRequest, ServingRun
from foretoken.simulator.validation.measured_run import MeasuredRunFormat, RunFile

_LISTS = ("input_lens", "output_lens", "ttfts", "itls")
_SUMMARY = ("mean_ttft_ms", "median_ttft_ms", "request_throughput")
_NOT_DETAILED = (
    "has no {missing}: only the summary was saved. Run the benchmark again with"
    " --save-result --save-detailed"
)
_NO_START_TIMES = (
    "has no start_times, so when a request was sent is not known. A later release of vLLM saves"
    " them; or measure with `foretoken collect`, or at --request-rate inf"
)


def _content(file: RunFile) -> Any:
    return file.json if file.json is not None else file.first_line


def _recognises(file: RunFile) -> bool:
    content = _content(file)
    if not isinstance(content, Mapping):
        return False
    return all(name in content for name in _LISTS) or all(name in content for name in _SUMMARY)


def _read(file: RunFile) -> ServingRun:
    content = _content(file)
    if not isinstance(content, Mapping):
        file.refuse("expected a JSON object")
    if file.json is None and len(file.json_lines) > 1:
        file.refuse(f"holds {len(file.json_lines)} results; a run is one of them")
    missing = [name for name in _LISTS if name not in content]
    if missing:
        file.refuse(_NOT_DETAILED.format(missing=", ".join(missing)))
    num_requests = len(_list_of(file, content, "input_lens"))
    columns = {name: _list_of(file, content, name, num_requests) for name in _LISTS}
    if content.get("errors"):
        columns["errors"] = _list_of(file, content, "errors", num_requests)
    rows = [
        _read_row(file, index, {name: column[index] for name, column in columns.items()})
        for index in range(num_requests)
    ]
    concurrency = int(file.number(content.get("max_concurrency") or 0, "max_concurrency"))
    is_at_once = str(content.get("request_rate", "")) == "inf"
    if "start_times" in content:
        starts = [
            file.number(start_s, f"start_times[{index}]", "a time in s")
            for index, start_s in enumerate(_list_of(file, content, "start_times", num_requests))
        ]
        first_s = min(starts, default=0.0)
        arrivals = [start_s - first_s for start_s in starts]
    elif is_at_once:
        arrivals = _closed_loop(rows, concurrency or num_requests)
    else:
        file.refuse(_NO_START_TIMES)
    return ServingRun(
        source=f"{content.get('backend') or content.get('endpoint_type') or 'vllm'} bench serve",
        model=str(content.get("model_id") or ""),
        started_at=str(content.get("date") or ""),
        concurrency=max(concurrency, 0) if is_at_once else 0,
        requests=tuple(
            _build(file, index, row, arrival_s)
            for index, (row, arrival_s) in enumerate(zip(rows, arrivals, strict=True))
        ),
    )


def _list_of(
    file: RunFile, content: Mapping[str, Any], name: str, length: int | None = None
) -> Sequence[Any]:
    column = file.items(content[name], name)
    if length is not None and len(column) != length:
        file.refuse(f"has {len(column)} entries, and input_lens {length}", name)
    return column


def _read_row(file: RunFile, index: int, row: Mapping[str, Any]) -> dict[str, Any]:
    place = f"request {index}"
    gaps = [
        file.number(gap_s, place, "times in s") for gap_s in file.items(row["itls"] or [], place)
    ]
    ttft_s = file.number(row["ttfts"] or 0.0, place, "a time in s")
    if min([ttft_s, *gaps]) < 0:
        file.refuse("a time below 0", place)
    return {
        "num_prefill_tokens": int(file.number(row["input_lens"], place, "a number of tokens")),
        "num_decode_tokens": int(file.number(row["output_lens"] or 0, place, "a number of tokens")),
        "ttft_s": ttft_s,
        "gaps_s": gaps,
        "error": str(row.get("errors") or ""),
    }


def _build(file: RunFile, index: int, row: Mapping[str, Any], arrival_s: float) -> MeasuredRequest:
    place = f"request {index}"
    lengths = {name: row[name] for name in ("num_prefill_tokens", "num_decode_tokens")}
    if row["error"] or not row["ttft_s"]:
        error = row["error"] or "no answer"
        return file.build_request(place, arrival_s=arrival_s, error=error, **lengths)
    chunks = list(accumulate(row["gaps_s"], initial=arrival_s + row["ttft_s"]))
    return file.build_request(
        place,
        arrival_s=arrival_s,
        first_token_s=chunks[0],
        last_token_s=chunks[-1],
        chunk_s=tuple(chunks),
        **lengths,
    )


def _closed_loop(rows: Sequence[Mapping[str, Any]], concurrency: int) -> list[float]:
    """Return when each was sent if that was as soon as fewer than `concurrency` were under way."""
    ends: list[float] = []
    arrivals = []
    for row in rows:
        arrival_s = heapq.heappop(ends) if len(ends) >= max(concurrency, 1) else 0.0
        arrivals.append(arrival_s)
        heapq.heappush(ends, arrival_s + row["ttft_s"] + sum(row["gaps_s"]))
    return arrivals


MEASURED_RUN = MeasuredRunFormat(
    title="the JSON of `vllm bench serve --save-result --save-detailed`",
    file_names=(),
    recognises=_recognises,
    read=_read,
)
