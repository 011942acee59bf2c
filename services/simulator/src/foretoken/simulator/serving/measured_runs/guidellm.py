"""GuideLLM's `benchmarks.json`: requests with their times and lengths, of each benchmark.

Source: GuideLLM's schemas `GenerativeRequestStats` and `RequestTimings`: `benchmarks`, each with
`config` and `requests` by outcome; a request's `info.timings` are seconds since 1970. Releases
before 0.4 have `start_time`, `first_token_time` and `last_token_time` in the request itself. A
strategy `concurrent` of so many `streams`, or `synchronous`, is a closed loop; a sweep is several
benchmarks, of a strategy each.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from foretoken.domain.requests.serving_run import MeasuredRequest, ServingRun
from foretoken.simulator.validation.measured_run import MeasuredRunFormat, RunFile

_OUTCOMES = ("successful", "incomplete", "errored")
# The strategy of releases before 0.4 is among the arguments.
_SETTINGS = ("config", "args")


def _recognises(file: RunFile) -> bool:
    found = file.json.get("benchmarks") if isinstance(file.json, Mapping) else None
    return isinstance(found, list) and all(isinstance(one, Mapping) for one in found)


def _read(file: RunFile) -> Sequence[ServingRun]:
    content = file.mapping(file.json, "")
    benchmarks = file.items(content.get("benchmarks"), "benchmarks")
    if not benchmarks:
        file.refuse("holds no benchmark", "benchmarks")
    places = [f"benchmarks[{index}]" for index in range(len(benchmarks))]
    found = [
        (place, file.mapping(one, place)) for place, one in zip(places, benchmarks, strict=True)
    ]
    if len(found) == 1:
        return [_read_benchmark(file, *found[0])]
    named = [_describe_load(file, *one) for one in found]
    counts = Counter(named)
    return [
        replace(
            _read_benchmark(file, *one), name=name if counts[name] == 1 else f"{name}, {one[0]}"
        )
        for one, name in zip(found, named, strict=True)
    ]


def _read_benchmark(file: RunFile, origin: str, benchmark: Mapping[str, Any]) -> ServingRun:
    groups = file.mapping(benchmark.get("requests"), f"{origin}.requests")
    rows = [
        (outcome, f"{origin}.requests.{outcome}[{index}]", row)
        for outcome in _OUTCOMES
        for index, row in enumerate(
            file.items(groups.get(outcome) or [], f"{origin}.requests.{outcome}")
        )
    ]
    read = [(outcome, place, file.mapping(row, place)) for outcome, place, row in rows]
    starts = [_time_s(file, place, row, "request_start", "start_time") for _, place, row in read]
    origin_s = min((start_s for start_s in starts if start_s > 0), default=0.0)
    requests = [
        _read_request(file, row, max(start_s, origin_s), origin_s)
        for row, start_s in zip(read, starts, strict=True)
    ]
    return ServingRun(
        source="GuideLLM",
        concurrency=_find_concurrency(file, origin, benchmark),
        requests=tuple(requests),
    )


def _read_request(
    file: RunFile, row: tuple[str, str, Mapping[str, Any]], start_s: float, origin_s: float
) -> MeasuredRequest:
    outcome, place, content = row
    first_s = _time_s(file, place, content, "first_token_iteration", "first_token_time")
    last_s = _time_s(file, place, content, "last_token_iteration", "last_token_time")
    has_times = outcome == "successful" and 0 < first_s <= last_s
    if outcome == "successful" and not has_times:
        file.refuse("has no times of its first and last token; was the answer streamed?", place)
    return file.build_request(
        place,
        arrival_s=start_s - origin_s,
        first_token_s=first_s - origin_s if has_times else -1.0,
        last_token_s=last_s - origin_s if has_times else -1.0,
        num_prefill_tokens=_count(file, place, content, "prompt_tokens"),
        num_decode_tokens=_count(file, place, content, "output_tokens"),
        error="" if has_times else outcome,
    )


def _time_s(
    file: RunFile, place: str, content: Mapping[str, Any], name: str, old_name: str
) -> float:
    """Return a time in s since 1970, of either form of the file; 0 where there is none."""
    info = file.mapping(content.get("info") or {}, f"{place}.info")
    timings = file.mapping(info.get("timings") or {}, f"{place}.info.timings")
    value = timings.get(name, content.get(old_name))
    return 0.0 if value is None else file.number(value, place, f"seconds as {name}")


def _count(file: RunFile, place: str, content: Mapping[str, Any], name: str) -> int:
    value = content.get(name)
    return 0 if value is None else int(file.number(value, place, f"a number of tokens as {name}"))


def _find_concurrency(file: RunFile, origin: str, benchmark: Mapping[str, Any]) -> int:
    """Return how many requests were sent at once in a closed loop; 0 of another load."""
    place, strategy = _find_strategy(file, origin, benchmark)
    if strategy.get("type_") == "synchronous":
        return 1
    streams = strategy.get("streams") if strategy.get("type_") == "concurrent" else 0
    return int(file.number(streams, place, "streams"))


def _describe_load(file: RunFile, origin: str, benchmark: Mapping[str, Any]) -> str:
    """Return what tells a benchmark of a sweep from the others: its strategy, streams or rate."""
    place, strategy = _find_strategy(file, origin, benchmark)
    kind = str(strategy.get("type_") or "load")
    if kind == "concurrent":
        return f"{kind} {file.number(strategy.get('streams'), place, 'streams'):g}"
    rate = strategy.get("rate")
    return kind if rate is None else f"{kind} {file.number(rate, place, 'a rate'):.4g}/s"


def _find_strategy(
    file: RunFile, origin: str, benchmark: Mapping[str, Any]
) -> tuple[str, Mapping[str, Any]]:
    """Return where the strategy of a benchmark is and what it says; empty where it says none."""
    for name in _SETTINGS:
        settings = file.mapping(benchmark.get(name) or {}, f"{origin}.{name}")
        strategy = settings.get("strategy")
        if isinstance(strategy, Mapping):
            return f"{origin}.{name}.strategy", strategy
    return origin, {}


MEASURED_RUN = MeasuredRunFormat(
    title="GuideLLM's benchmarks.json",
    file_names=("benchmarks.json",),
    recognises=_recognises,
    read=_read,
)
