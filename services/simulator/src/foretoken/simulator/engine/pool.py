"""A pool of engines on one clock: what a cluster gives requests to, and takes them from."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.frameworks.engine import DEFAULT_PROFILE, find_engine
from foretoken.simulator import jit
from foretoken.simulator.cluster.engine_pool import TIME_COLUMNS, Ended, PoolRole
from foretoken.simulator.cluster.routing import EngineLoad
from foretoken.simulator.cluster.setup import PoolSetup
from foretoken.simulator.cost.tables import CostTables
from foretoken.simulator.engine import clock, hand_over, layout
from foretoken.simulator.engine.choice import find_scheduler
from foretoken.simulator.engine.failure import clear_unit
from foretoken.simulator.engine.layout import Ints
from foretoken.simulator.engine.output import (
    Slice,
    join_slices,
    open_runs,
    step_records,
    take_output,
    token_runs,
)
from foretoken.simulator.engine.state import EngineState, build_pool_state, grow_slots
from foretoken.simulator.serving.record import RequestOutcome, StepRecord, TokenRuns
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.workload.request_plan import RequestPlan, plan_requests

# What Python calls.
_ENTRIES = (
    clock.advance,
    clock.complete_at,
    clock.quiet_until,
    clock.tick_at,
    hand_over.release,
    hand_over.reserve,
    hand_over.submit,
)
_NO_ENDED: Sequence[Ended] = ()
_OUTCOMES = {int(outcome): outcome for outcome in RequestOutcome}
_LOAD_FIELDS = [
    "num_arrived",
    "num_waiting",
    "num_transferred_in",
    "num_running",
    "num_waiting_tokens",
    "num_free",
]


class EnginePool:
    """Engines of one kind, from 0 to `num_engines`; all times in ns of one clock.

    At an instant tokens leave first (`complete`), then the cluster routes what is ready, then
    engines schedule (`tick`). `advance` does both for a pool that nobody disturbs.
    """

    def __init__(self, plan: RequestPlan, setup: PoolSetup, tables: CostTables) -> None:
        self._scheduler = setup.engines.profile.scheduler
        self._slices: list[Slice] = []
        self._hold(build_pool_state(plan, setup, tables))
        self._num_blocks = setup.engines.num_kv_blocks
        self._engines = setup.engines
        num_tokens = self._requests["num_prefill"] + self._requests["num_decode"] - 1
        num_beyond = self._rules["num_draft_tokens"] + self._rules["num_lookahead_tokens"]
        num_tokens += np.where(self._requests["num_decode"] > 1, num_beyond, 0)
        num_needed = -(-num_tokens // setup.engines.profile.block_size)
        # Of each request whether an empty engine has KV blocks for it.
        self.can_ever_hold: NDArray[np.bool_] = num_needed <= self._num_blocks

    @staticmethod
    def is_ready(setup: DeploymentSetup) -> bool:
        """Whether what runs such engines need not be compiled: that was done here or is kept."""
        are_kept = all(jit.is_ready(entry) for entry in _ENTRIES)
        return are_kept and find_scheduler(setup.profile.scheduler).is_ready

    @staticmethod
    def compile(tables: CostTables) -> None:
        """Compile what runs pools, or load it where that was done before."""
        one, profile = np.ones(1, dtype=np.int64), find_engine(DEFAULT_PROFILE)
        engines = DeploymentSetup(profile=profile, num_kv_blocks=1)
        setup = PoolSetup(name="", engines=engines, role=PoolRole.DECODE)
        pool = EnginePool(plan_requests(one, one, one + 1), setup, tables)
        pool.reserve(0, 0)
        pool.submit(0, 0, 0)
        pool.quiet_until(1)
        pool.tick(0)
        pool.complete(pool.next_ns)
        pool.advance(layout.NEVER_NS)
        pool.release(0, 0)

    def _hold(self, state: EngineState) -> None:
        self._state = state
        self._states = state.record
        self._rules = state.record[0]
        self._requests = state.arrays["requests"]
        # Single values, looked at often: of a view Python reads one faster than of an array.
        self._next_ns = state.record["next_ns"].data
        self._num_ended = state.record["num_ended"].data
        self._ended = state.arrays["ended"].data
        self._outcome = self._requests["outcome"].data
        self._loads = [state.arrays["engines"][name].data for name in _LOAD_FIELDS]

    @property
    def num_engines(self) -> int:
        """Engines there are, running or not."""
        return len(self._loads[0])

    @property
    def next_ns(self) -> int:
        """When an engine next does something; NEVER_NS where all wait for requests."""
        next_ns: int = self._next_ns[0]
        return next_ns

    def complete(self, now_ns: int) -> Sequence[Ended]:
        """Let the tokens that leave at this instant leave; return the requests that ended."""
        if self._next_ns[0] != now_ns:
            return _NO_ENDED
        while clock.complete_at(self._states, now_ns) == layout.MORE:
            self._make_room()
        return self._take_ended()

    def tick(self, now_ns: int) -> Sequence[Ended]:
        """Let the engines whose tick it is schedule; return requests that will never have room.

        Raises:
            RuntimeError: requests run that the scheduler does not schedule.

        """
        if self._next_ns[0] != now_ns:
            return _NO_ENDED
        while (status := clock.tick_at(self._states, now_ns)) == layout.MORE:
            self._make_room()
        self._check(status)
        return self._take_ended()

    def advance(self, horizon_ns: int) -> tuple[int, Sequence[Ended]]:
        """Go on by itself before the horizon, at most to the first instant at which requests end.

        Returns that instant, whose `tick` is yet to come, and the requests; or the horizon and
        none.

        Raises:
            RuntimeError: requests run that the scheduler does not schedule.

        """
        if self._next_ns[0] >= horizon_ns:
            return horizon_ns, _NO_ENDED
        while (status := clock.advance(self._states, horizon_ns)) == layout.MORE:
            self._make_room()
        self._check(status)
        if status == layout.ENDED:
            return int(self._rules["ended_ns"]), self._take_ended()
        return horizon_ns, _NO_ENDED

    def quiet_until(self, horizon_ns: int) -> int:
        """Return a time, at most the horizon, before which no request ends if undisturbed."""
        if self._next_ns[0] >= horizon_ns:
            return horizon_ns
        return min(clock.quiet_until(self._states), horizon_ns)

    def submit(self, engine: int, request: int, now_ns: int) -> None:
        """Give an engine a request, which it sees when it next ticks; an idle one ticks now.

        Engines in lock step that deal what arrived may give it to another of them (`engine_of`).
        The request begins anew, whatever it did here before. In a pool of role DECODE `reserve` has
        found room for it, and it runs as soon as there is a seat.
        """
        hand_over.submit(self._states, engine, request, now_ns)

    def reserve(self, engine: int, request: int) -> bool:
        """Take the KV blocks of a prompt that will be sent here, and one token more, if free.

        Source: vLLM's NIXL connector, which allocates before it pulls.
        """
        if self._rules["is_caching"] and self._state.arrays["engines"]["num_slots"][engine] == 0:
            self._hold(grow_slots(self._state))
        return bool(hand_over.reserve(self._states, engine, request))

    def engine_of(self, request: int) -> int:
        """Return which engine has or had a request, of those that may share what is submitted."""
        return int(self._requests["engine"][request])

    def scheduled_ns(self, request: int) -> int:
        """Return when a request was first in a step since it was last submitted."""
        return int(self._requests["scheduled_ns"][request])

    def finished_ns(self, request: int) -> int:
        """Return when the last token of a request that is complete was handed out."""
        return int(self._requests["finished_ns"][request])

    def release(self, request: int, now_ns: int) -> None:
        """Free the blocks of a request that does not run; its engine may go on.

        They were kept after its prefill and have been sent, or reserved for one that will not come.
        """
        hand_over.release(self._states, request, now_ns)

    def withdraw(self, engine: int, now_ns: int) -> Sequence[int]:
        """Take everything off an engine that fails, and off those in lock step with it.

        Returns the requests that had not ended, ascending. Finished steps stay written down, a
        batch in flight is lost. The engine is empty and idle after, its cache without content.
        Requests it had reserved room for, or kept the blocks of, are the caller's to know.
        """
        del now_ns
        self._slices.append(take_output(self._state))
        return clear_unit(self._state, self._slices, engine)

    def load_of(self, engine: int, num_more: int = 0) -> EngineLoad:
        """Return what an engine has to do now, `num_more` requests that wait elsewhere included.

        Of what has landed no prompt is to compute.
        """
        arrived, waiting, transferred_in, running, tokens, free = self._loads
        return EngineLoad(
            arrived[engine] + waiting[engine] + transferred_in[engine] + num_more,
            running[engine],
            tokens[engine],
            (self._num_blocks - free[engine]) / self._num_blocks,
        )

    def steps(self) -> Sequence[StepRecord]:
        """Return the steps of each engine so far."""
        return step_records(self._join(), self._engines)

    def tokens(self) -> TokenRuns:
        """Return the output tokens so far, by request and in order; `engine` is this pool's.

        Of a request that began anew only those since.
        """
        runs, requests = self._join().runs, self._requests
        current = requests["attempt"][runs[:, 0]] == runs[:, layout.RUN_COLUMNS.index("attempt")]
        going = np.flatnonzero(requests["run_count"] > 0)
        return token_runs(np.concatenate([runs[current], open_runs(requests, going)]))

    def columns(self) -> Mapping[str, Ints]:
        """Return `TIME_COLUMNS` and `COUNT_COLUMNS` by name, one entry per request of the plan.

        Times are those since the request was last submitted, -1 where not reached; counts are of
        all its time here, 0 where it was never here.
        """
        columns = {name: self._requests[name].astype(np.int64) for name in TIME_COLUMNS}
        columns["num_preemptions"] = self._requests["num_preemptions"].astype(np.int64)
        columns["num_cached_tokens"] = self._requests["num_cached"].astype(np.int64)
        columns["num_loaded_tokens"] = self._requests["num_loaded"].astype(np.int64)
        return columns

    def _take_ended(self) -> Sequence[Ended]:
        count = self._num_ended[0]
        if count == 0:
            return _NO_ENDED
        self._num_ended[0] = 0
        outcome = self._outcome
        return [Ended(each, _OUTCOMES[outcome[each]]) for each in self._ended[:count]]

    def _make_room(self) -> None:
        """Take the output away, and add slots where an engine may run short of them."""
        self._slices.append(take_output(self._state))
        engines, most = self._state.arrays["engines"], int(self._rules["max_num_seqs"])
        if (
            self._rules["is_caching"]
            and (engines["num_slots"] + engines["num_running"] < most).any()
        ):
            self._hold(grow_slots(self._state))

    def _join(self) -> Slice:
        joined = join_slices([*self._slices, take_output(self._state)])
        self._slices = [joined]
        return joined

    def _check(self, status: int) -> None:
        if status == layout.STUCK:
            raise RuntimeError(f"{self._scheduler} does not schedule what runs")
