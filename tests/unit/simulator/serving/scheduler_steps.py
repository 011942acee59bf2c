"""Schedulers run step by step: what each step computes, by request."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foretoken.domain.frameworks.engine import find_engine
from foretoken.domain.frameworks.kv_tier import KvTier
from foretoken.simulator.cluster.setup import PoolSetup
from foretoken.simulator.cost.tables import flat_tables
from foretoken.simulator.engine import clock, hand_over, layout
from foretoken.simulator.engine.state import build_pool_state
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.workload.request_plan import plan_requests

# More steps, requests and tokens of one than any test needs.
_MOST_STEPS, _MOST_REQUESTS, _MOST_TOKENS = 10_000, 64, 4_000
_STEP_US = 1e6


@dataclass(frozen=True, slots=True)
class SchedulerStep:
    """Tokens of each request's prompt, requests that decoded, who lost its blocks, last first."""

    prompts: Mapping[int, int]
    decodes: frozenset[int]
    preempted: tuple[int, ...]


class SchedulerRun:
    """An engine of one stage that waits for every step, of a second; requests arrive by hand.

    They are (prompt, answer) tokens and share nothing. A tier to swap to holds a hundred blocks,
    each of which takes a microsecond up and down.
    """

    def __init__(
        self, profile: str, requests: Sequence[tuple[int, int]], num_blocks: int, **rules: Any
    ) -> None:
        bare = {"host_us", "host_us_per_seq", "output_us", "output_us_per_seq"}
        bare |= {"admission_us_per_token", "output_us_per_past_token"}
        bare_rules = {"has_async_scheduling": False, "has_prefix_caching": False}
        rules = {**bare_rules, **dict.fromkeys(bare, 0.0), **rules}
        self.rules = replace(find_engine(profile), **rules)
        size = self.rules.block_size
        tier = KvTier(
            name="host",
            capacity_bytes=100 * size,
            read_bytes_per_s=1e6 * size,
            write_bytes_per_s=1e6 * size,
        )
        engines = DeploymentSetup(
            profile=self.rules,
            num_kv_blocks=num_blocks,
            kv_bytes_per_token=1,
            kv_tiers=(tier,) if self.rules.preemption == "swap" else (),
        )
        # Room for requests that are yet to come.
        most = np.full(_MOST_REQUESTS, _MOST_TOKENS)
        pool = PoolSetup(name="", engines=engines)
        self.state = build_pool_state(plan_requests(0 * most, most, most), pool, _TABLES)
        self.requests: Any = self.state.arrays["requests"]
        self.steps: list[SchedulerStep] = []
        self._num_arrived = self._now_ns = 0
        for prompt, answer in requests:
            self.arrive(prompt, answer)

    def arrive(self, prompt: int, answer: int) -> None:
        """Let another request wait."""
        index, self._num_arrived = self._num_arrived, self._num_arrived + 1
        self.requests["num_prefill"][index] = prompt
        self.requests["num_decode"][index] = answer
        hand_over.submit(self.state.record, 0, index, self._now_ns)

    @property
    def running(self) -> list[int]:
        """Requests that run, in the order of admission."""
        running: list[int] = self.state.arrays["running"][0, : self._engine["num_running"]].tolist()
        return running

    @property
    def waiting(self) -> list[int]:
        """Requests that wait, in order, and then those the engine has not seen yet."""
        arrived = self._engine["num_arrived"] > 0
        return [
            *self._follow(int(self._engine["first_waiting"])),
            *(self._follow(int(self._engine["first_arrived"])) if arrived else ()),
        ]

    @property
    def num_used(self) -> int:
        """Blocks that requests hold."""
        return int(self.state.record["num_blocks"][0] - self._engine["num_free"])

    def step(self) -> SchedulerStep:
        """Choose a batch, compute it and let its tokens leave."""
        arrays, rules = self.state.arrays, self.state.record[0]
        num_preemptions = self.requests["num_preemptions"].copy()
        num_prefills, num_steps = int(rules["num_out_prefills"]), int(self._engine["num_steps"])
        rows: list[int] = []
        if self._turn():
            # It looks for more to do, and waits for the batch.
            rows = arrays["rows"][0, 0, : arrays["flights"]["num_yielding"][0, 0]].tolist()
            self._turn()
            self._now_ns = int(rules["next_ns"])
            clock.complete_at(self.state.record, self._now_ns)
        elif rules["next_ns"] < layout.NEVER_NS and num_steps == self._engine["num_steps"]:
            self._now_ns = int(rules["next_ns"])
        new = arrays["prefills"]["request"][num_prefills : rules["num_out_prefills"]]
        tokens = arrays["prefill_tokens"][num_prefills : rules["num_out_prefills"]]
        prompts = dict(zip(new.tolist(), tokens.tolist(), strict=True))
        preempted = np.flatnonzero(self.requests["num_preemptions"] > num_preemptions)
        decodes = frozenset(set(rows) - prompts.keys())
        self.steps.append(SchedulerStep(prompts, decodes, tuple(preempted[::-1].tolist())))
        return self.steps[-1]

    def run(self) -> list[SchedulerStep]:
        """Go on until all requests are complete; return the steps."""
        while (self.running or self.waiting) and len(self.steps) < _MOST_STEPS:
            self.step()
        return self.steps

    @property
    def _engine(self) -> Any:
        return self.state.arrays["engines"][0]

    def _turn(self) -> bool:
        """Let the engine schedule at its time; False where it launches nothing."""
        num_steps = int(self._engine["num_steps"])
        if self.state.record["next_ns"][0] < layout.NEVER_NS:
            self._now_ns = int(self.state.record["next_ns"][0])
            clock.tick_at(self.state.record, self._now_ns)
        return bool(self._engine["num_steps"] > num_steps)

    def _follow(self, request: int) -> Iterator[int]:
        while request != layout.NONE:
            yield request
            request = int(self.requests["next"][request])


_TABLES = flat_tables(_STEP_US, 0.0)
