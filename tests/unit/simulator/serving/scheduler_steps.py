"""Schedulers run step by step without a clock: what each step computes, by request."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretoken.domain.engine import KvTier, find_engine
from foretoken.domain.plugins import scan_modules
from foretoken.simulator.serving.batch import Batch, StepBudget
from foretoken.simulator.serving.kv_cache import KvCache
from foretoken.simulator.serving.kv_store import KvStore
from foretoken.simulator.serving.request import SimRequest

# More steps than any test needs.
_MOST_STEPS = 10_000
_BLOCK_BYTES = 1000
# Room for a hundred blocks, a microsecond each.
_TIER = KvTier(name="host", capacity_bytes=100_000, read_bytes_per_s=1e9, write_bytes_per_s=1e9)


@dataclass(frozen=True, slots=True)
class SchedulerStep:
    """Tokens computed of each request's prompt, requests that decoded, and who lost its blocks."""

    prompts: Mapping[int, int]
    decodes: frozenset[int]
    preempted: tuple[int, ...]


class SchedulerRun:
    """An engine of one stage that waits for every step; requests are (prompt, answer) tokens."""

    def __init__(
        self, profile: str, requests: Sequence[tuple[int, int]], num_blocks: int, **rules: Any
    ) -> None:
        self.rules = replace(find_engine(profile), **rules)
        store = KvStore([_TIER], _BLOCK_BYTES) if self.rules.preemption == "swap" else None
        self.kv = KvCache(num_blocks, self.rules.block_size, store=store)
        self.running: list[SimRequest] = []
        self.waiting: deque[SimRequest] = deque()
        self.steps: list[SchedulerStep] = []
        self._num_arrived = 0
        self._scheduler = scan_modules("foretoken.simulator.serving.schedulers", "SCHEDULER")[
            self.rules.scheduler
        ](self.rules)
        for prompt, answer in requests:
            self.arrive(prompt, answer)

    def arrive(self, prompt: int, answer: int) -> None:
        """Let another request wait."""
        self.waiting.append(SimRequest(self._num_arrived, prompt, answer))
        self._num_arrived += 1

    def step(self) -> SchedulerStep:
        """Choose a batch, compute it and let its tokens leave; a step takes a second."""
        number = len(self.steps)
        budget = StepBudget(self.rules, number, number * 1_000_000_000)
        batch: Batch = self._scheduler.select(self.running, self.waiting, budget, self.kv)
        prompts = {request.index: num_tokens for request, num_tokens, _ in batch.prefills}
        rows = {request.index for request in batch.rows}
        preempted = tuple(request.index for request in batch.preempted)
        self.steps.append(SchedulerStep(prompts, frozenset(rows - prompts.keys()), preempted))
        for request in batch.rows:
            request.emit_tokens(number, number + 1, 1)
            if request.is_finished:
                self.kv.free(request)
        self.running[:] = [request for request in self.running if not request.is_finished]
        return self.steps[-1]

    def run(self) -> list[SchedulerStep]:
        """Go on until all requests are complete; return the steps."""
        while (self.running or self.waiting) and len(self.steps) < _MOST_STEPS:
            self.step()
        return self.steps
