"""Runs whose every time is known: a small engine of one replica that steps as a formula says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from foretoken.domain.requests.serving_run import MeasuredRequest, ServingRun
from foretoken.domain.results.report import Percentiles, RequestColumns, ServingReport

# (requests decoding, their context in tokens, prompt tokens) -> ms
StepCost = Callable[[int, int, int], float]


def usual_cost(batch: int, context: int, prompt: int) -> float:
    return 10.0 + 0.1 * batch + 0.0002 * context + 0.05 * prompt


@dataclass(kw_only=True)
class _Request:
    arrival_ms: float
    prompt: int
    answer: int
    scheduled_ms: float = -1.0
    token_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Served:
    """What an engine did; times in ms from the start."""

    requests: Sequence[_Request]
    frontend_ms: float

    def as_run(self, *, has_tokens: bool = True, has_schedule: bool = False) -> ServingRun:
        """Return it as a measured run."""
        return ServingRun(
            name="served",
            source="a test",
            requests=tuple(
                MeasuredRequest(
                    arrival_s=item.arrival_ms / 1e3,
                    queued_s=(item.arrival_ms + self.frontend_ms) / 1e3 if has_schedule else -1.0,
                    scheduled_s=item.scheduled_ms / 1e3 if has_schedule else -1.0,
                    first_token_s=item.token_ms[0] / 1e3,
                    last_token_s=item.token_ms[-1] / 1e3,
                    num_prefill_tokens=item.prompt,
                    num_decode_tokens=item.answer,
                    chunk_s=tuple(t / 1e3 for t in item.token_ms) if has_tokens else (),
                )
                for item in self.requests
            ),
        )

    def as_report(self) -> ServingReport:
        """Return it as the report of a simulation."""
        gaps = np.concatenate([np.diff(item.token_ms) for item in self.requests])
        return ServingReport(
            num_kv_blocks=1000,
            kv_block_size=16,
            itl_ms=Percentiles(mean=float(gaps.mean()), p50=float(np.median(gaps))),
            requests=RequestColumns(
                arrival_s=np.array([item.arrival_ms for item in self.requests]) / 1e3,
                queued_s=np.array([item.arrival_ms + self.frontend_ms for item in self.requests])
                / 1e3,
                scheduled_s=np.array([item.scheduled_ms for item in self.requests]) / 1e3,
                first_token_s=np.array([item.token_ms[0] for item in self.requests]) / 1e3,
                finished_s=np.array([item.token_ms[-1] for item in self.requests]) / 1e3,
                num_prefill_tokens=np.array([item.prompt for item in self.requests]),
                num_decode_tokens=np.array([item.answer for item in self.requests]),
            ),
        )


def serve(
    cost: StepCost = usual_cost,
    *,
    num_requests: int = 150,
    gap_ms: float = 60.0,
    frontend_ms: float = 0.0,
    max_num_seqs: int = 64,
    seed: int = 0,
) -> Served:
    """Serve random requests: one prompt a step with everything that decodes."""
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(gap_ms, num_requests))
    requests = [
        _Request(
            arrival_ms=float(arrival - arrivals[0]),
            prompt=int(random.integers(10, 600)),
            answer=int(random.integers(2, 120)),
        )
        for arrival in arrivals
    ]
    waiting, running, now_ms = list(requests), list[_Request](), 0.0
    while waiting or running:
        due = bool(waiting) and waiting[0].arrival_ms + frontend_ms <= now_ms
        if not running and not due:
            now_ms = waiting[0].arrival_ms + frontend_ms
            due = True
        admitted = waiting.pop(0) if due and len(running) < max_num_seqs else None
        context = sum(item.prompt + len(item.token_ms) for item in running)
        if admitted is not None:
            admitted.scheduled_ms = now_ms
        now_ms += cost(len(running), context, admitted.prompt if admitted is not None else 0)
        running += [admitted] if admitted is not None else []
        for item in running:
            item.token_ms.append(now_ms)
        running = [item for item in running if len(item.token_ms) < item.answer]
    return Served(requests=requests, frontend_ms=frontend_ms)
