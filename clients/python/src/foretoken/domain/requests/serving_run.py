"""A serving run that was measured on a real server: what was asked when, and when tokens came."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from foretoken.domain import schema
from foretoken.domain.errors import FieldViolation, InvalidRequestError

# What a file of `encode_run` says of itself; a reader refuses a later version.
RUN_FORMAT = "foretoken.serving_run"
RUN_VERSION = 1

# A count that is not known; a time that was never reached or is not known, a ratio that is not.
UNKNOWN = -1
UNKNOWN_S = -1.0

# Finer than any client's clock can tell, and half the digits of a float.
_DECIMALS_OF_S = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRequest:
    """One request as its client saw it; times in s from the run's start, -1 where not known.

    `arrival_s` is when it was sent, `planned_s` when it should have been. `queued_s` and
    `scheduled_s` are the engine's own times, which most clients cannot see. `chunk_s` are the times
    at which pieces of the answer came, `chunk_tokens` how many tokens were in each (empty: one in
    each, or not known where there are fewer pieces than tokens). `block_hashes` are those of a
    workload's request. A request with an `error` counts as failed.
    """

    arrival_s: float
    first_token_s: float = UNKNOWN_S
    last_token_s: float = UNKNOWN_S
    num_prefill_tokens: int
    num_decode_tokens: int
    planned_s: float = UNKNOWN_S
    queued_s: float = UNKNOWN_S
    scheduled_s: float = UNKNOWN_S
    chunk_s: tuple[float, ...] = ()
    chunk_tokens: tuple[int, ...] = ()
    block_hashes: tuple[int, ...] = ()
    error: str = ""

    def __post_init__(self) -> None:
        """Refuse times and counts that contradict each other."""
        violations = [
            FieldViolation(name, problem)
            for name, is_legal, problem in self._checks()
            if not is_legal
        ]
        if violations:
            raise InvalidRequestError.of_violations(violations, "request")

    def _checks(self) -> tuple[tuple[str, bool, str], ...]:
        first, last = self.first_token_s, self.last_token_s
        return (
            ("arrival_s", self.arrival_s >= 0, f"is {self.arrival_s}: must not be negative"),
            ("num_prefill_tokens", self.num_prefill_tokens >= 0, "must not be negative"),
            ("num_decode_tokens", self.num_decode_tokens >= 0, "must not be negative"),
            (
                "first_token_s",
                first < 0 or first >= self.arrival_s,
                f"is {first:g}, before it was sent at {self.arrival_s:g}",
            ),
            (
                "last_token_s",
                last < 0 or last >= first,
                f"is {last:g}, before the first token at {first:g}",
            ),
            (
                "chunk_tokens",
                len(self.chunk_tokens) in (0, len(self.chunk_s)),
                "must be as many as chunk_s",
            ),
        )

    @property
    def is_complete(self) -> bool:
        """Whether it was answered, with at least one token, and has the times to show it."""
        has_times = 0 <= self.first_token_s <= self.last_token_s
        return has_times and not self.error and self.num_decode_tokens > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingRun:
    """A measured run; the requests in the order they were sent.

    `hash_block_tokens` is how many tokens a block hash names. With `concurrency` above 0 a request
    was sent when another was complete; else each at its own time. Of the whole run, where the
    server reported: `num_preemptions`, and `num_kv_blocks` of `kv_block_tokens` tokens; -1 where
    not. `source` says what measured it, `settings` how.
    """

    name: str = ""
    source: str = ""
    model: str = ""
    started_at: str = ""
    requests: tuple[MeasuredRequest, ...]
    hash_block_tokens: int = 0
    concurrency: int = 0
    num_preemptions: int = UNKNOWN
    num_kv_blocks: int = UNKNOWN
    kv_block_tokens: int = UNKNOWN
    cached_token_ratio: float = UNKNOWN_S
    is_interrupted: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def completed(self) -> tuple[MeasuredRequest, ...]:
        """The requests that were answered, by the time they were sent."""
        found = (request for request in self.requests if request.is_complete)
        return tuple(sorted(found, key=lambda request: request.arrival_s))

    @property
    def num_failed(self) -> int:
        """Number of requests that were not answered."""
        return sum(not request.is_complete for request in self.requests)


def encode_run(run: ServingRun) -> str:
    """Return a run as JSON: one line of the file per request, times to the microsecond."""
    content = schema.encode(run)
    requests = [json.dumps(_shorten(request)) for request in content.pop("requests")]
    head = json.dumps({"format": RUN_FORMAT, "version": RUN_VERSION, **content}, indent=1)
    body = ",\n  ".join(requests)
    return f'{head[: head.rindex("}")].rstrip()},\n "requests": [\n  {body}\n ]\n}}\n'


def decode_run(content: Mapping[str, Any]) -> ServingRun:
    """Return the run in the content of a file that `encode_run` wrote.

    Raises:
        InvalidRequestError: another format, a later version, or a key that is missing, unknown or
            of the wrong type; the message names it.

    """
    if content.get("format") != RUN_FORMAT:
        raise InvalidRequestError.of_field("format", f"expected {RUN_FORMAT}")
    version = content.get("version")
    if not isinstance(version, int) or not 1 <= version <= RUN_VERSION:
        problem = f"is {version!r}; this release reads versions 1 to {RUN_VERSION}"
        raise InvalidRequestError.of_field("version", problem)
    rest = {name: item for name, item in content.items() if name not in ("format", "version")}
    return schema.decode(ServingRun, rest)


def _shorten(request: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what is not known, and digits no clock has."""
    return {
        item.name: _round(request[item.name])
        for item in fields(MeasuredRequest)
        if request[item.name] != schema.encode(item.default)
    }


def _round(value: Any) -> Any:
    if isinstance(value, list):
        return [_round(item) for item in value]
    return round(value, _DECIMALS_OF_S) if isinstance(value, float) else value
