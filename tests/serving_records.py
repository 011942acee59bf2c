"""Records of serving simulations for tests, with what happened to every token.

A tiny engine runs the requests step by step and writes both: the columns as the engines do, and
plain lists that need no interpretation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from foretoken.simulator.serving.record import (
    RequestOutcome,
    RequestRecord,
    ServingRecord,
    StepRecord,
    TokenRuns,
)

MS = 1_000_000
NUM_BLOCKS = 1000
BLOCK_SIZE = 4


@dataclass(kw_only=True)
class TinyRequest:
    """A request and what became of it."""

    arrival_ns: int
    prompt: int
    answer: int
    slo_class: int = -1
    engine: int = 0
    outcome: int = 0
    scheduled_ns: int = -1
    computed: int = 0
    num_preemptions: int = 0
    token_ns: list[int] = field(default_factory=list)
    token_steps: list[int] = field(default_factory=list)
    executed_ns: int = 0

    @property
    def num_uncomputed(self) -> int:
        """Tokens to compute before the next output token."""
        return self.prompt + len(self.token_ns) - self.computed

    @property
    def is_done(self) -> bool:
        """Whether it has all its tokens."""
        return len(self.token_ns) == self.answer


@dataclass(frozen=True, kw_only=True)
class TinyRules:
    """How the tiny engine works; every `preempt_every`-th step throws the last request back, once.

    A request that could be thrown back again and again might never end.
    """

    budget: int = 8
    max_seqs: int = 3
    max_stride: int = 1
    step_ns: tuple[int, ...] = (10 * MS,)
    preempt_every: int = 0


def run_tiny_engines(
    requests: Sequence[TinyRequest], rules: TinyRules, num_engines: int = 1
) -> ServingRecord:
    """Run the requests, dealt out in turn; those that ask for no token are refused."""
    for index, request in enumerate(requests):
        request.engine = index % num_engines if request.answer else -1
        if not request.answer:
            request.outcome = RequestOutcome.EXCEEDS_KV_CACHE
    steps = [_run_engine(requests, rules, engine) for engine in range(num_engines)]
    return ServingRecord(
        requests=_request_record(requests),
        tokens=_token_runs(requests, rules.max_stride),
        steps=steps,
        num_kv_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
    )


def _run_engine(requests: Sequence[TinyRequest], rules: TinyRules, engine: int) -> StepRecord:
    coming = [index for index, request in enumerate(requests) if request.engine == engine]
    waiting: list[int] = []
    running: list[int] = []
    rows: list[dict[str, int]] = []
    prefills: list[tuple[int, int, int, int]] = []
    now = 0
    while coming or waiting or running:
        if not waiting and not running:
            now = max(now, requests[coming[0]].arrival_ns)
        while coming and requests[coming[0]].arrival_ns <= now:
            waiting.append(coming.pop(0))
        num_preempted = 0
        is_due = rules.preempt_every and len(rows) % rules.preempt_every == 1
        if is_due and running and not requests[running[-1]].num_preemptions:
            victim = running.pop()
            requests[victim].computed = 0
            requests[victim].num_preemptions += 1
            waiting.insert(0, victim)
            num_preempted = 1
        now = _run_step((requests, rules), (running, waiting), rows, prefills, now)
        rows[-1]["num_preempted"] = num_preempted
        running[:] = [index for index in running if not requests[index].is_done]
    columns: dict[str, Any] = {
        name: np.array([row[name] for row in rows], dtype=np.int64) for name in _STEP_COLUMNS
    }
    pieces = np.array(prefills, dtype=np.int64).reshape(-1, 4).T
    names = ("prefill_step", "prefill_request", "prefill_tokens", "prefill_context")
    return StepRecord(**columns, **dict(zip(names, pieces, strict=True)))


def _run_step(
    world: tuple[Sequence[TinyRequest], TinyRules],
    queues: tuple[list[int], list[int]],
    rows: list[dict[str, int]],
    prefills: list[tuple[int, int, int, int]],
    now: int,
) -> int:
    requests, rules = world
    running, waiting = queues
    while waiting and len(running) < rules.max_seqs:
        running.append(waiting.pop(0))
        if requests[running[-1]].scheduled_ns < 0:
            requests[running[-1]].scheduled_ns = now
    number, left = len(rows), rules.budget
    start_ns = now + MS
    end_ns = start_ns + rules.step_ns[number % len(rules.step_ns)]
    row = dict.fromkeys(_STEP_COLUMNS, 0)
    row |= {"scheduled_ns": now, "start_ns": start_ns, "end_ns": end_ns}
    for index in running:
        request = requests[index]
        num_tokens = min(request.num_uncomputed, left)
        if num_tokens == 0:
            continue
        left -= num_tokens
        is_decode = request.num_uncomputed == 1 and request.computed >= request.prompt
        if is_decode:
            row["num_decodes"] += 1
            row["decode_kv_tokens"] += request.computed + 1
            row["decode_kv_tokens_max"] = max(row["decode_kv_tokens_max"], request.computed + 1)
        else:
            row["num_prefills"] += 1
            prefills.append((number, index, num_tokens, request.computed))
        request.computed += num_tokens
        request.executed_ns += end_ns - start_ns
        row["num_tokens"] += num_tokens
        row["num_used_blocks"] += -(-request.computed // BLOCK_SIZE)
        if request.num_uncomputed == 0:
            request.token_ns.append(end_ns)
            request.token_steps.append(number)
            row["num_rows"] += 1
            if request.is_done:
                request.outcome = RequestOutcome.COMPLETED
    row["num_running"], row["num_waiting"] = len(running), len(waiting)
    rows.append(row)
    return end_ns


_STEP_COLUMNS = (
    "scheduled_ns",
    "start_ns",
    "end_ns",
    "num_tokens",
    "num_rows",
    "num_decodes",
    "num_prefills",
    "decode_kv_tokens",
    "decode_kv_tokens_max",
    "num_running",
    "num_waiting",
    "num_used_blocks",
    "num_preempted",
)


def _request_record(requests: Sequence[TinyRequest]) -> RequestRecord:
    def column(values: Sequence[int]) -> Any:
        return np.array(values, dtype=np.int64)

    zero = [0 for _ in requests]
    return RequestRecord(
        arrival_ns=column([r.arrival_ns for r in requests]),
        queued_ns=column([r.arrival_ns if r.answer else -1 for r in requests]),
        scheduled_ns=column([r.scheduled_ns for r in requests]),
        first_token_ns=column([r.token_ns[0] if r.token_ns else -1 for r in requests]),
        finished_ns=column([r.token_ns[-1] if r.token_ns and r.is_done else -1 for r in requests]),
        num_prefill_tokens=column([r.prompt for r in requests]),
        num_decode_tokens=column([r.answer for r in requests]),
        num_preemptions=column([r.num_preemptions for r in requests]),
        num_cached_tokens=column(zero),
        num_loaded_tokens=column(zero),
        engine=column([r.engine for r in requests]),
        slo_class=column([r.slo_class for r in requests]),
        outcome=column([r.outcome for r in requests]),
    )


def _token_runs(requests: Sequence[TinyRequest], max_stride: int) -> TokenRuns:
    runs: list[list[int]] = []
    for index, request in enumerate(requests):
        for place, step in enumerate(request.token_steps):
            gap = step - request.token_steps[place - 1]
            if place and runs[-1][3] == 1 and gap <= max_stride:
                runs[-1][2] = gap
            if place and gap == runs[-1][2]:
                runs[-1][3] += 1
            else:
                runs.append([index, step, 1, 1])
    request_column, first_step, stride, count = np.array(runs, dtype=np.int64).reshape(-1, 4).T
    return TokenRuns(request=request_column, first_step=first_step, stride=stride, count=count)


@st.composite
def tiny_runs(draw: st.DrawFn) -> tuple[list[TinyRequest], ServingRecord]:
    """Requests of any size through tiny engines of any rules."""
    arrivals = sorted(draw(st.lists(st.integers(0, 3000), min_size=1, max_size=12)))
    requests = [
        TinyRequest(
            arrival_ns=arrival * MS,
            prompt=draw(st.integers(1, 20)),
            answer=draw(st.integers(0, 12)),
            slo_class=draw(st.integers(-1, 1)),
        )
        for arrival in arrivals
    ]
    step_ms = draw(st.lists(st.integers(1, 400), min_size=1, max_size=4))
    rules = TinyRules(
        budget=draw(st.integers(4, 24)),
        max_seqs=draw(st.integers(1, 4)),
        step_ns=tuple(value * MS for value in step_ms),
        preempt_every=draw(st.sampled_from([0, 3, 7])),
        max_stride=draw(st.integers(1, 3)),
    )
    return requests, run_tiny_engines(requests, rules, draw(st.integers(1, 2)))
