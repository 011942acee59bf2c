"""A CSV file with one line per request, its columns under any of the usual names.

Times are seconds, or what the ending of a column's name says (`_ms`, `_us`, `_ns`). The first and
last token are times of the clock (`first_token_s`) or count from the arrival (`ttft_ms`, `e2e_ms`).
Next to it may lie `workload.jsonl` with the prompts' content: `prompt_block_ids_16` names each
block of 16 tokens, by `request_id` or by line.
"""

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from foretoken.domain.requests.serving_run import MeasuredRequest, ServingRun
from foretoken.simulator.validation.measured_run import MeasuredRunFormat, RunFile

_SYNONYMS: Mapping[str, Sequence[str]] = {
    "request_id": ("request_id", "id", "request", "index"),
    "arrival": ("arrival", "arrived_at", "arrival_time", "sent", "send_time", "start_time"),
    "planned": ("planned", "scheduled_send"),
    "queued": ("queued", "queued_at"),
    "scheduled": ("scheduled", "scheduled_at"),
    "first_token": ("first_token", "first_token_time", "prefill_completed_at"),
    "last_token": (
        "last_token",
        "finished",
        "finish",
        "completed_at",
        "end_time",
        "last_token_time",
    ),
    "ttft": ("ttft", "time_to_first_token", "prefill_e2e_time"),
    "e2e": ("e2e", "e2e_latency", "latency", "request_latency", "request_e2e_time", "e2el"),
    "tpot": ("tpot", "time_per_output_token"),
    "input_tokens": (
        "input_tokens",
        "num_prefill_tokens",
        "prompt_tokens",
        "input_len",
        "prompt_len",
        "request_num_prefill_tokens",
    ),
    "output_tokens": (
        "output_tokens",
        "num_decode_tokens",
        "completion_tokens",
        "output_len",
        "request_num_decode_tokens",
    ),
    "error": ("error",),
}
_S_PER_UNIT = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_TIMES = ("arrival", "planned", "queued", "scheduled", "first_token", "last_token", "ttft", "e2e")
_EXPECTED = (
    "expected a header with arrival_s, input_tokens, output_tokens, first_token_s or ttft_ms, and"
    " last_token_s or e2e_ms or tpot_ms"
)
_BLOCK_IDS = re.compile(r"^prompt_block_ids_(\d{1,9})$")
_CONTENT = "workload.jsonl"


class _Columns:
    """Where each column stands in a line, and what a time in it is worth in s."""

    def __init__(self, header: Sequence[str]) -> None:
        self.place: dict[str, int] = {}
        self.scale: dict[str, float] = {}
        for index, title in enumerate(header):
            name, unit = _split_unit(title)
            for meaning, synonyms in _SYNONYMS.items():
                if name in synonyms and meaning not in self.place:
                    self.place[meaning] = index
                    self.scale[meaning] = _S_PER_UNIT[unit]

    @property
    def is_enough(self) -> bool:
        """Whether a run can be made of them."""
        has = self.place.__contains__
        has_lengths = has("arrival") and has("input_tokens") and has("output_tokens")
        has_first = has("first_token") or has("ttft")
        return has_lengths and has_first and (has("last_token") or has("e2e") or has("tpot"))


def _split_unit(title: str) -> tuple[str, str]:
    name = title.strip().lower().replace(" ", "_")
    stem, _, unit = name.rpartition("_")
    return (stem, unit) if stem and unit in _S_PER_UNIT else (name, "s")


def _header(file: RunFile) -> list[str]:
    try:
        return next(csv.reader([next(iter(file.text.splitlines()), "")]), [])
    except csv.Error:
        return []  # another format: all of it in one line, say


def _recognises(file: RunFile) -> bool:
    return _Columns(_header(file)).is_enough


def _read(file: RunFile) -> ServingRun:
    columns = _Columns(_header(file))
    if not columns.is_enough:
        file.refuse(f"{_EXPECTED}; found {','.join(_header(file)) or 'nothing'}", "1")
    content, hash_block_tokens = _read_content(file)
    requests = []
    for index, (number, line) in enumerate(_lines(file)):
        row = _Row(file, number, line, columns)
        blocks = content.get(row.identity(index), ())
        requests.append(replace(row.build(), block_hashes=blocks))
    return ServingRun(
        source="CSV table", requests=tuple(requests), hash_block_tokens=hash_block_tokens
    )


def _lines(file: RunFile) -> Iterator[tuple[int, Sequence[str]]]:
    """Yield the lines after the header that are not empty, with their numbers."""
    reader = csv.reader(io.StringIO(file.text))
    next(reader)
    try:
        yield from ((reader.line_num, line) for line in reader if line)
    except csv.Error as err:
        file.refuse(str(err), str(reader.line_num))


class _Row:
    """A line of the table."""

    def __init__(self, file: RunFile, number: int, line: Sequence[str], columns: _Columns) -> None:
        self.file, self.number, self.line, self.columns = file, number, line, columns

    def identity(self, index: int) -> str:
        """Return the request's name, which is its place where the table gives none."""
        return self._cell("request_id") or str(index)

    def build(self) -> MeasuredRequest:
        """Return the request."""
        lengths = {
            "num_prefill_tokens": self._count("input_tokens"),
            "num_decode_tokens": self._count("output_tokens"),
        }
        times = {name: self._time(name) for name in _TIMES}
        arrival_s = times["arrival"]
        if not arrival_s >= 0:
            self._refuse("arrival", "a time of at least 0")
        error = self._cell("error")
        if error:
            return self.file.build_request(
                str(self.number), arrival_s=arrival_s, error=error, **lengths
            )
        first_s = times["first_token"]
        if first_s < 0 <= times["ttft"]:
            first_s = arrival_s + times["ttft"]
        engine = {f"{name}_s": times[name] for name in ("planned", "queued", "scheduled")}
        return self.file.build_request(
            str(self.number),
            arrival_s=arrival_s,
            first_token_s=first_s,
            last_token_s=self._last_token(times, first_s, lengths["num_decode_tokens"]),
            **engine,
            **lengths,
        )

    def _last_token(self, times: Mapping[str, float], first_s: float, num_tokens: int) -> float:
        if first_s < 0:
            return -1.0
        if times["last_token"] >= 0:
            return times["last_token"]
        if times["e2e"] >= 0:
            return times["arrival"] + times["e2e"]
        tpot_s = self._time("tpot")
        return first_s + tpot_s * max(num_tokens - 1, 0) if tpot_s >= 0 else -1.0

    def _cell(self, name: str) -> str:
        place = self.columns.place.get(name)
        if place is None:
            return ""
        if place >= len(self.line):
            self.file.refuse(
                f"expected {place + 1} cells, found {len(self.line)}", str(self.number)
            )
        return self.line[place].strip()

    def _time(self, name: str) -> float:
        """Return a time in s, -1 where the cell is empty or negative or the column absent."""
        cell = self._cell(name)
        if not cell:
            return -1.0
        try:
            value = float(cell)
        except ValueError:
            self._refuse(name, "a number")
        if not math.isfinite(value):
            self._refuse(name, "a finite number")
        return value * self.columns.scale[name] if value >= 0 else -1.0

    def _count(self, name: str) -> int:
        cell = self._cell(name)
        try:
            value = float(cell or "0")
        except ValueError:
            self._refuse(name, "a whole number")
        if not (math.isfinite(value) and value >= 0 and value.is_integer()):
            self._refuse(name, "a whole number of at least 0")
        return int(value)

    def _refuse(self, name: str, expected: str) -> NoReturn:
        problem = f"{name}: expected {expected}, found {self._cell(name)!r}"
        self.file.refuse(problem, str(self.number))


def _read_content(file: RunFile) -> tuple[dict[str, tuple[int, ...]], int]:
    """Return each prompt's block names, and how many tokens a block has."""
    content = file.neighbour(_CONTENT)
    if not content.path.is_file():
        return {}, 0
    found: dict[str, tuple[int, ...]] = {}
    hash_block_tokens = 0
    for index, (number, record) in enumerate(content.json_lines):
        blocks, size = _blocks_of(content, number, record)
        if blocks:
            hash_block_tokens = size
            found[str(record.get("request_id", index))] = blocks
    return found, hash_block_tokens


def _blocks_of(content: RunFile, number: int, record: Any) -> tuple[tuple[int, ...], int]:
    if not isinstance(record, Mapping):
        content.refuse("expected a JSON object", str(number))
    for key, value in record.items():
        match = _BLOCK_IDS.match(key)
        if match:
            if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
                content.refuse(f"{key}: expected a list of whole numbers", str(number))
            return tuple(value), int(match[1])
    return (), 0


MEASURED_RUN = MeasuredRunFormat(
    title="a CSV table of requests",
    file_names=("measured_requests.csv", "requests.csv"),
    recognises=_recognises,
    read=_read,
)
