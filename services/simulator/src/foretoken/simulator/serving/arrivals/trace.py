"""Arrivals and lengths from a file: `arrived_at,num_prefill_tokens,num_decode_tokens`.

This is the layout of Vidur's processed traces; times in s. Other columns are ignored.
"""

import csv
import math
from dataclasses import replace
from pathlib import Path

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.workload import Request, WorkloadSpec
from foretoken.simulator.serving.workload import check_options

_COLUMNS = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")


def load_trace(path: Path) -> tuple[Request, ...]:
    """Return the requests of a trace file as they stand.

    Raises:
        InvalidRequestError: the file cannot be read, or a line cannot be used; names file and line.

    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.reader(file)
            columns = _find_columns(next(reader, []), path)
            requests = tuple(
                _parse_line(line, columns, f"{path}:{reader.line_num}") for line in reader if line
            )
    except (OSError, UnicodeDecodeError, csv.Error) as err:
        raise InvalidRequestError.of_field("trace_path", f"cannot read {path}: {err}") from err
    if not requests:
        raise InvalidRequestError.of_field("trace_path", f"{path} holds no requests")
    return requests


def _find_columns(header: list[str], path: Path) -> list[int]:
    missing = [name for name in _COLUMNS if name not in header]
    if missing:
        raise InvalidRequestError.of_field(
            "trace_path", f"{path}:1: the header lacks {', '.join(missing)}"
        )
    return [header.index(name) for name in _COLUMNS]


def _parse_line(line: list[str], columns: list[int], place: str) -> Request:
    try:
        arrival_s, num_prefill, num_decode = (float(line[column]) for column in columns)
    except (ValueError, IndexError) as err:
        raise InvalidRequestError.of_field(
            "trace_path", f"{place}: expected {len(_COLUMNS)} numbers, found {','.join(line)!r}"
        ) from err
    if not (math.isfinite(arrival_s) and arrival_s >= 0):
        raise InvalidRequestError.of_field("trace_path", f"{place}: arrived_at must be at least 0")
    for name, count in (("num_prefill_tokens", num_prefill), ("num_decode_tokens", num_decode)):
        if not (math.isfinite(count) and count >= 1 and count.is_integer()):
            raise InvalidRequestError.of_field(
                "trace_path", f"{place}: {name} must be a whole number of at least 1"
            )
    return Request(
        arrival_s=arrival_s,
        num_prefill_tokens=int(num_prefill),
        num_decode_tokens=int(num_decode),
    )


def _replay(spec: WorkloadSpec, _seed: int) -> tuple[Request, ...]:
    check_options(spec, ())
    if not spec.trace_requests and not spec.trace_path:
        raise InvalidRequestError.of_field("workload.trace_path", "a trace needs a file")
    requests = spec.trace_requests or load_trace(Path(spec.trace_path))
    scaled = (replace(r, arrival_s=r.arrival_s * spec.time_scale) for r in requests)
    return tuple(sorted(scaled, key=lambda request: request.arrival_s))


ARRIVAL = _replay
