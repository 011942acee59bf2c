"""SGLang's log: `Prefill batch` of every prefill, `Decode batch` of every some tens of steps.

Source: SGLang, `managers/scheduler_metrics_mixin.py`, later `metrics_reporter.py`. A throughput is
of what was computed since the line of that kind before, in all the time since then. So a line tells
the time of a step only where nothing else ran in between: a decode line after a decode line with as
many requests, a prefill line after a prefill line with as many new tokens (releases divide by the
tokens of this batch or of the one before, which then are the same). Decode lines with an acceptance
length count several tokens a step and are left out. `#cached-token` is what the prefix cache had;
earlier chunks of the same prompt are in no line.
"""

import re
from collections.abc import Iterator

from foretoken.simulator.validation.measured_run import RunFile
from foretoken.simulator.validation.measured_steps import EngineStep, MeasuredStepsFormat

_LINE = re.compile(
    r"(?P<head>.*?)(?P<kind>Prefill|Decode) batch\b(?: \[\d+\])?[.,]\s+(?P<rest>#.*)"
)
_RANK = re.compile(r"\b(?:DP|TP|PP|EP)\d+\b")
_FIELD = re.compile(r"(#?[A-Za-z][^:,]*): ([0-9.]+)")
_RATE = {"Prefill": "input throughput (token/s)", "Decode": "gen throughput (token/s)"}
# What the next line of the same rank is compared with.
_Batch = tuple[str, dict[str, float]]


def _recognises(file: RunFile) -> bool:
    return any(_LINE.match(line) for line in file.text.splitlines())


def _read(file: RunFile) -> tuple[EngineStep, ...]:
    return tuple(_read_lines(file.text))


def _read_lines(text: str) -> Iterator[EngineStep]:
    before: dict[tuple[str, ...], _Batch] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        fields = {name.strip(): _number(value) for name, value in _FIELD.findall(match["rest"])}
        rank = tuple(_RANK.findall(match["head"]))
        kind, earlier = match["kind"], before.get(rank)
        before[rank] = kind, fields
        if earlier is not None and earlier[0] == kind and fields.get(_RATE[kind]):
            step = (_prefill if kind == "Prefill" else _decode)(earlier[1], fields)
            if step is not None:
                yield step


def _number(text: str) -> float:
    try:
        return float(text.rstrip("."))
    except ValueError:
        return 0.0


def _prefill(earlier: dict[str, float], fields: dict[str, float]) -> EngineStep | None:
    tokens = fields.get("#new-token", 0.0)
    if tokens != earlier.get("#new-token"):
        return None
    return EngineStep(
        duration_s=tokens / fields[_RATE["Prefill"]],
        num_prefills=round(fields.get("#new-seq", 0.0)),
        prefill_tokens=round(tokens),
        prefill_kv_tokens=round(fields.get("#cached-token", 0.0)),
    )


def _decode(earlier: dict[str, float], fields: dict[str, float]) -> EngineStep | None:
    count, name = fields.get("#running-req", 0.0), "#running-req"
    if count != earlier.get(name) or not count or "accept len" in fields:
        return None
    tokens = [each.get("#token", each.get("#full token", 0.0)) for each in (earlier, fields)]
    context = sum(tokens) / 2
    return EngineStep(
        duration_s=count / fields[_RATE["Decode"]],
        num_decodes=round(count),
        decode_kv_tokens=round(context),
        decode_kv_tokens_max=-(-round(context) // round(count)),
    )


MEASURED_STEPS = MeasuredStepsFormat(title="SGLang's log", recognises=_recognises, read=_read)
