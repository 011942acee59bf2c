"""GenAI-Perf's `profile_export.json`: when each request was sent, and each piece of its answer.

Source: perf_analyzer's profile export: `experiments`, each with `requests`, of which `timestamp`
and `response_timestamps` are readings of one clock in ns, and `response_outputs` the pieces. It
holds no token counts: they come from `usage` in the answers, else output tokens are the pieces with
text, and input tokens the mean in `profile_export_genai_perf.json` next to it where all are alike.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.domain.requests.serving_run import MeasuredRequest, ServingRun
from foretoken.domain.units import NS_PER_S
from foretoken.simulator.validation.measured_run import (
    AnswerChunk,
    MeasuredRunFormat,
    RunFile,
    parse_chunk,
)

_SUMMARY = "profile_export_genai_perf.json"
# Input lengths of a spread below this share of the mean count as alike.
_ALIKE_RATIO = 0.02
_NO_LENGTHS = (
    "the answers have no `usage`, and {summary} next to it does not state one input length for all."
    " Measure with --extra-inputs 'stream_options:{{\"include_usage\":true}}'"
)


def _recognises(file: RunFile) -> bool:
    return isinstance(file.json, Mapping) and isinstance(file.json.get("experiments"), list)


def _read(file: RunFile) -> ServingRun:
    if not isinstance(file.json, Mapping) or not isinstance(file.json.get("experiments"), list):
        file.refuse("expected an object with `experiments`")
    experiments = file.json["experiments"]
    if len(experiments) != 1:
        file.refuse(f"holds {len(experiments)} experiments; a run is one of them", "experiments")
    experiment = experiments[0]
    rows = experiment.get("requests") if isinstance(experiment, Mapping) else None
    if not isinstance(rows, list) or not rows:
        file.refuse("expected a list of requests", "experiments[0].requests")
    mode = file.mapping(experiment.get("experiment") or {}, "experiments[0].experiment")
    is_closed = mode.get("mode") == "concurrency"
    concurrency = file.number(mode.get("value") or 0, "experiments[0].experiment.value")
    mean_prompt = _mean_prompt(file)
    origin_ns = min(_timestamp(file, index, row) for index, row in enumerate(rows))
    return ServingRun(
        source="GenAI-Perf",
        concurrency=max(int(concurrency), 0) if is_closed else 0,
        requests=tuple(
            _read_request(_Row(file, index, row, origin_ns), mean_prompt)
            for index, row in enumerate(rows)
        ),
    )


def _timestamp(file: RunFile, index: int, row: Any) -> int:
    value = row.get("timestamp") if isinstance(row, Mapping) else None
    if not isinstance(value, int):
        file.refuse(f"expected a `timestamp` in ns, found {value!r}", f"requests[{index}]")
    return value


class _Row:
    """A request of the file, its times in s from the first one."""

    def __init__(self, file: RunFile, index: int, row: Mapping[str, Any], origin_ns: int) -> None:
        self.file = file
        self.place = f"requests[{index}]"
        self.arrival_s = (row["timestamp"] - origin_ns) / NS_PER_S
        times = [
            file.number(time, self.place, "response_timestamps in ns")
            for time in file.items(row.get("response_timestamps") or [], self.place)
        ]
        outputs = file.items(row.get("response_outputs") or [{}] * len(times), self.place)
        if len(times) != len(outputs):
            file.refuse(f"{len(times)} response_timestamps, {len(outputs)} outputs", self.place)
        pieces = zip(times, outputs, strict=True)
        self.events = [
            ((time - origin_ns) / NS_PER_S, chunk)
            for time, output in pieces
            for chunk in self._chunks(output)
        ]

    def _chunks(self, output: Any) -> Sequence[AnswerChunk]:
        text = output.get("response") if isinstance(output, Mapping) else None
        if not isinstance(text, str):
            # Other endpoints than OpenAI's: every piece is taken to be a token.
            return [AnswerChunk(has_tokens=output != {})]
        lines = [line.removeprefix("data:") for line in text.splitlines() if line.strip()]
        try:
            return [parse_chunk(line) for line in lines]
        except ValueError as err:
            self.file.refuse(f"response_outputs is no event of an answer: {err}", self.place)


def _read_request(row: _Row, mean_prompt: int) -> MeasuredRequest:
    chunks = [chunk for _, chunk in row.events]
    times = tuple(time_s for time_s, chunk in row.events if chunk.has_tokens)
    prompt = max((chunk.prompt_tokens for chunk in chunks), default=-1)
    total = max((chunk.total_tokens for chunk in chunks), default=-1)
    if prompt < 0 and not mean_prompt:
        row.file.refuse(_NO_LENGTHS.format(summary=_SUMMARY), row.place)
    error = next((chunk.error for chunk in chunks if chunk.error), "")
    return row.file.build_request(
        row.place,
        arrival_s=row.arrival_s,
        first_token_s=times[0] if times else -1.0,
        last_token_s=times[-1] if times else -1.0,
        num_prefill_tokens=prompt if prompt >= 0 else mean_prompt,
        num_decode_tokens=total if total >= 0 else len(times),
        chunk_s=times,
        error=error or ("" if times else "no answer"),
    )


def _mean_prompt(file: RunFile) -> int:
    """Return the input length of all requests as the summary tells it, or 0."""
    summary = file.neighbour(_SUMMARY)
    content = summary.json if summary.path.is_file() else None
    lengths = content.get("input_sequence_length") if isinstance(content, Mapping) else None
    if not isinstance(lengths, Mapping) or not isinstance(lengths.get("avg"), int | float):
        return 0
    mean = float(lengths["avg"])
    return round(mean) if float(lengths.get("std") or 0.0) <= _ALIKE_RATIO * mean else 0


MEASURED_RUN = MeasuredRunFormat(
    title="GenAI-Perf's profile_export.json",
    file_names=("profile_export.json",),
    recognises=_recognises,
    read=_read,
)
