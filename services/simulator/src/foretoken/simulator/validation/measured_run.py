"""Measured serving runs: formats of their files, events of streamed answers, their scenario.

Events are those of OpenAI's streaming API: `data: {...}` with `choices` (completions: `text`, chat:
`delta.content`) and, where `stream_options.include_usage` requests it, a last one with `usage`;
`data: [DONE]` ends it. vLLM, SGLang and TensorRT-LLM add `reasoning_content`, `token_ids`, and
`usage` in every event with `continuous_usage_stats`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.domain.plugins import scan_modules
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.serving_run import MeasuredRequest, ServingRun
from foretoken.domain.requests.workload import Request, WorkloadSpec

# Beyond any count and any clock, in ns since 1970 too; and exact enough as a float.
_MAX_NUMBER = 1e19

_FORMATS = "foretoken.simulator.serving.measured_runs"


class RunFile:
    """A file of what was measured, that an option names; read once, when first asked for."""

    def __init__(self, path: Path, option: str = "--measured") -> None:
        self.path = path
        self._option = option

    @cached_property
    def text(self) -> str:
        """The whole file.

        Raises:
            InvalidRequestError: it cannot be read, or is no text in UTF-8.

        """
        try:
            return self.path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as err:
            raise InvalidRequestError.of_field(self._option, f"{self.path}: {err}") from err

    @cached_property
    def json(self) -> Any:
        """The value in the file, or None where it is no JSON."""
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError):
            return None

    @cached_property
    def json_lines(self) -> Sequence[tuple[int, Any]]:
        """The values of a file with one in each line, with their lines' numbers.

        Raises:
            InvalidRequestError: a line is no JSON; names it.

        """
        lines = enumerate(self.text.splitlines(), start=1)
        return [(number, self._parse_line(number, line)) for number, line in lines if line.strip()]

    @cached_property
    def first_line(self) -> Any:
        """The JSON value in the first line, or None where there is none."""
        line = next((line for line in self.text.splitlines() if line.strip()), "")
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            return None

    @cached_property
    def broken_json(self) -> str:
        """Where the JSON that the file begins with breaks off; empty if it is JSON, or begins none.

        A file that is only half written is of this kind.
        """
        if self.text.lstrip()[:1] not in {"{", "["} or self.first_line is not None:
            return ""
        try:
            json.loads(self.text)
        except (ValueError, RecursionError) as err:
            return f"is no complete JSON: {err}"
        return ""

    def neighbour(self, name: str) -> "RunFile":
        """Return the file of that name in the same folder, which may not exist."""
        return RunFile(self.path.parent / name, self._option)

    def refuse(self, problem: str, place: str = "") -> NoReturn:
        """Say that the file, or a place in it such as a line, cannot be used.

        Raises:
            InvalidRequestError: always.

        """
        where = f"{self.path}:{place}" if place else str(self.path)
        raise InvalidRequestError.of_field(self._option, f"{where}: {problem}")

    def build_request(self, place: str, **fields: Any) -> MeasuredRequest:
        """Return a request of the file; what contradicts itself is refused with its place."""
        try:
            return MeasuredRequest(**fields)
        except InvalidRequestError as err:
            self.refuse(err.message, place)

    def number(self, value: Any, place: str, what: str = "a number") -> float:
        """Return a finite number out of the file; anything else is refused with its place."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) <= _MAX_NUMBER:
            self.refuse(f"expected {what}, found {value!r:.40}", place)
        return float(value)

    def items(self, value: Any, place: str) -> Sequence[Any]:
        """Return a list out of the file; anything else is refused with its place."""
        if not isinstance(value, list):
            self.refuse(f"expected a list, found {value!r:.40}", place)
        return value

    def mapping(self, value: Any, place: str) -> Mapping[str, Any]:
        """Return an object out of the file; anything else is refused with its place."""
        if not isinstance(value, Mapping):
            self.refuse(f"expected an object, found {value!r:.40}", place)
        return value

    def _parse_line(self, number: int, line: str) -> Any:
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as err:
            self.refuse(f"expected a JSON object, found {line[:60]!r} ({err})", str(number))


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRunFormat:
    """A format of measured runs, which other tools write or people keep.

    `recognises` tells by a file's content, and raises nothing but what reading it raises; `read`
    returns the runs or says what was expected where; those of several have names that differ.
    `file_names` are looked for in a folder.
    """

    title: str
    file_names: Sequence[str]
    recognises: Callable[[RunFile], bool]
    read: Callable[[RunFile], ServingRun | Sequence[ServingRun]]


def all_formats() -> Mapping[str, MeasuredRunFormat]:
    """Return every format by name."""
    return scan_modules(_FORMATS, "MEASURED_RUN")


def load_run(path: Path, format_name: str = "", name: str = "") -> ServingRun:
    """Return the only measured run in a file, or the one of a name; see `load_runs`.

    Raises:
        InvalidRequestError: as `load_runs`; or it has several and none is named, or none of it.
        UnknownPluginError: no such format.

    """
    runs = load_runs(path, format_name)
    found = [run for run in runs if not name or run.name == name]
    if len(found) == 1:
        return found[0]
    names = ", ".join(repr(run.name) for run in runs)
    problem = f"holds no run {name!r}" if name else f"holds {len(runs)} runs"
    raise InvalidRequestError.of_field("--run", f"{path}: {problem}; name one of {names}")


def load_runs(path: Path, format_name: str = "") -> tuple[ServingRun, ...]:
    """Return the measured runs in a file, or in a folder that a tool wrote; mostly one.

    Times count from the first request of a run that was sent. An empty format name means the one
    whose content it is.

    Raises:
        UnknownPluginError: no such format.
        InvalidRequestError: in no format known here, or something in it cannot be used; names the
            file and the place.

    """
    formats = all_formats()
    chosen = {format_name: UnknownPluginError.look_up(format_name, formats)} if format_name else {}
    file = RunFile(_find_file(path, chosen or formats))
    if not file.text.strip():
        file.refuse("is empty")
    if not chosen:
        chosen = {name: item for name, item in formats.items() if item.recognises(file)}
    if not chosen:
        if file.broken_json:
            file.refuse(file.broken_json)
        known = "; ".join(f"{name} ({item.title})" for name, item in formats.items())
        file.refuse(f"in no format known here: {known}. Name it with --format if it is one of them")
    read = next(iter(chosen.values())).read(file)
    runs = (read,) if isinstance(read, ServingRun) else read
    return tuple(_settle(file, run) for run in runs)


def _settle(file: RunFile, run: ServingRun) -> ServingRun:
    if not run.completed:
        file.refuse(f"holds no completed request, and {run.num_failed} that failed", run.name)
    _check_prompts(file, run)
    return _from_first_arrival(replace(run, name=run.name or file.path.stem))


def _check_prompts(file: RunFile, run: ServingRun) -> None:
    uncounted = [index for index, r in enumerate(run.completed) if r.num_prefill_tokens < 1]
    if uncounted:
        file.refuse(
            f"{len(uncounted)} of {len(run.completed)} completed requests lack the length of their"
            f" prompt; the first of them is number {uncounted[0] + 1} by arrival"
        )


def _find_file(path: Path, formats: Mapping[str, MeasuredRunFormat]) -> Path:
    if not path.is_dir():
        return path
    names = [name for item in formats.values() for name in item.file_names]
    found = [path / name for name in names if (path / name).is_file()]
    if not found:
        problem = f"{path} is a folder without {', '.join(names)}; name the file"
        raise InvalidRequestError.of_field("--measured", problem)
    return found[0]


def _from_first_arrival(run: ServingRun) -> ServingRun:
    start_s = min(request.arrival_s for request in run.requests)
    ordered = sorted(run.requests, key=lambda request: request.arrival_s)
    if start_s == 0.0:
        return replace(run, requests=tuple(ordered))
    return replace(run, requests=tuple(_shift(request, start_s) for request in ordered))


def _shift(request: MeasuredRequest, start_s: float) -> MeasuredRequest:
    names = ("first_token_s", "last_token_s", "planned_s", "queued_s", "scheduled_s")
    times = {name: getattr(request, name) for name in names}
    return replace(
        request,
        arrival_s=request.arrival_s - start_s,
        chunk_s=tuple(time_s - start_s for time_s in request.chunk_s),
        **{name: time_s - start_s if time_s >= 0 else time_s for name, time_s in times.items()},
    )


_DONE = "[DONE]"
_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls")


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerChunk:
    """One event of an answer; without a choice it is a summary.

    `num_tokens` are the tokens it says it holds (-1: it does not say), `total_tokens` those of the
    answer so far or in all, `prompt_tokens` and `cached_tokens` those of the prompt (-1 likewise).
    """

    has_choice: bool = False
    has_tokens: bool = False
    is_last: bool = False
    num_tokens: int = -1
    total_tokens: int = -1
    prompt_tokens: int = -1
    cached_tokens: int = -1
    finish_reason: str = ""
    error: str = ""


def parse_chunk(data: str) -> AnswerChunk:
    """Return what the data of one event says.

    Raises:
        ValueError: it is neither JSON nor the end.

    """
    if data.strip() == _DONE:
        return AnswerChunk(is_last=True)
    content = json.loads(data)
    if not isinstance(content, Mapping):
        raise ValueError(f"expected an object, found {data[:60]!r}")  # noqa: TRY004 - bad content
    error = content.get("error")
    if error:
        message = error.get("message", error) if isinstance(error, Mapping) else error
        return AnswerChunk(error=str(message))
    choices = [choice for choice in content.get("choices") or () if isinstance(choice, Mapping)]
    usage = content.get("usage")
    counts = usage if isinstance(usage, Mapping) else {}
    details = counts.get("prompt_tokens_details")
    return AnswerChunk(
        has_choice=bool(choices),
        has_tokens=any(_has_tokens(choice) for choice in choices),
        num_tokens=_count_ids(choices),
        total_tokens=_count(counts, "completion_tokens"),
        prompt_tokens=_count(counts, "prompt_tokens"),
        cached_tokens=_count(details if isinstance(details, Mapping) else {}, "cached_tokens"),
        finish_reason=next(
            (str(choice["finish_reason"]) for choice in choices if choice.get("finish_reason")), ""
        ),
    )


def _has_tokens(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta")
    texts = [delta.get(name) for name in _TEXTS] if isinstance(delta, Mapping) else []
    return any([choice.get("text"), choice.get("token_ids"), *texts])


def _count_ids(choices: list[Mapping[str, Any]]) -> int:
    ids = [choice["token_ids"] for choice in choices if choice.get("token_ids")]
    return sum(len(item) for item in ids) if ids else -1


def _count(counts: Mapping[str, Any], name: str) -> int:
    value = counts.get(name)
    return value if isinstance(value, int) else -1


def scenario_of_run(scenario: ServingScenario, run: ServingRun) -> ServingScenario:
    """Return the scenario with the run's completed requests as its workload.

    Each arrives when it was measured to; those of a closed loop arrive in the measured order, when
    one before is complete in the simulation, the first ones over the time that it took to send
    them. Answers are as long as the measured ones were.
    """
    start_s = min(request.arrival_s for request in run.completed)
    workload = WorkloadSpec(
        arrival="trace",
        arrival_options=_loop_options(run),
        trace_requests=tuple(_to_request(request, start_s) for request in run.completed),
        hash_block_tokens=run.hash_block_tokens,
    )
    return replace(scenario, workload=workload)


def _loop_options(run: ServingRun) -> Mapping[str, str]:
    if not run.concurrency:
        return {}
    # Those that failed took a place too. The last of the ramp begins one place before its end.
    begun_s = sorted(request.arrival_s for request in run.requests)[: run.concurrency]
    ramp_s = (begun_s[-1] - begun_s[0]) * len(begun_s) / max(len(begun_s) - 1, 1)
    return {"concurrency": str(run.concurrency), "ramp_s": repr(ramp_s)}


def _to_request(request: MeasuredRequest, start_s: float) -> Request:
    return Request(
        arrival_s=request.arrival_s - start_s,
        num_prefill_tokens=request.num_prefill_tokens,
        num_decode_tokens=request.num_decode_tokens,
        block_hashes=request.block_hashes,
    )
