"""A pool that skips ahead does what it does instant by instant, whatever is done to it when."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_strategies import SCHEDULERS, Case, make_tables, rich_cases

from foretoken.domain.frameworks.engine import DEFAULT_PROFILE, find_engine
from foretoken.simulator.cluster.engine_pool import Ended, PoolRole
from foretoken.simulator.cluster.setup import PoolSetup
from foretoken.simulator.engine.layout import NEVER_NS
from foretoken.simulator.engine.pool import EnginePool
from foretoken.simulator.serving.record import StepRecord
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.workload.request_plan import RequestPlan, plan_requests

# Long enough for all that can end while others keep their blocks: without them two may preempt each
# other for ever.
_PAUSE_NS = 10_000_000


class _Action(NamedTuple):
    """Something done to a pool, so long after the action before; `which` of what can be chosen."""

    gap_ns: int
    kind: str
    engine: int
    which: int


@dataclass
class _Player:
    """Does things to a pool and writes down what it sees; with `steps` instant by instant."""

    pool: EnginePool
    steps: bool
    role: PoolRole
    num_engines: int
    group_size: int
    # Requests that may be submitted, and engines of those whose blocks are kept or reserved.
    free: list[int]
    held: dict[int, int] = field(default_factory=dict)
    engine_of: dict[int, int] = field(default_factory=dict)
    seen: list[object] = field(default_factory=list)

    def play(self, actions: Sequence[_Action]) -> None:
        """Do all actions, then let the pool finish what it has."""
        now_ns = 0
        for action in actions:
            self._run_until(now_ns, now_ns + action.gap_ns)
            now_ns += action.gap_ns
            self._end(now_ns, self.pool.complete(now_ns))
            self._act(action, now_ns)
            self._end(now_ns, self.pool.tick(now_ns))
            self._look()
        while self.held or self.pool.next_ns < NEVER_NS:
            self._run_until(now_ns, now_ns + _PAUSE_NS)
            now_ns += _PAUSE_NS
            if self.held:
                request = min(self.held)
                del self.held[request]
                self.pool.release(request, now_ns)
        self._look()

    def _run_until(self, now_ns: int, horizon_ns: int) -> None:
        if self.steps:
            while (now_ns := self.pool.next_ns) < horizon_ns:
                self._end(now_ns, self.pool.complete(now_ns))
                self._end(now_ns, self.pool.tick(now_ns))
            return
        while now_ns < horizon_ns:
            quiet_ns = self.pool.quiet_until(horizon_ns)
            assert quiet_ns <= horizon_ns
            now_ns, ended = self.pool.advance(horizon_ns)
            if ended:
                assert now_ns >= quiet_ns
                self._end(now_ns, ended)
                self._end(now_ns, self.pool.tick(now_ns))

    def _end(self, now_ns: int, ended: Sequence[Ended]) -> None:
        for request, _ in ended:
            if self.role is PoolRole.PREFILL:
                self.held[request] = self.engine_of[request]
        self.seen += [(now_ns, *each) for each in ended]

    def _look(self) -> None:
        loads = [tuple(self.pool.load_of(engine)) for engine in range(self.num_engines)]
        self.seen.append((self.pool.next_ns, loads))

    def _act(self, action: _Action, now_ns: int) -> None:
        engine = action.engine % self.num_engines
        if action.kind == "withdraw":
            first = engine // self.group_size * self.group_size
            failed = range(first, first + self.group_size)
            lost = self.pool.withdraw(engine, now_ns)
            self.held = {r: place for r, place in self.held.items() if place not in failed}
            self.free += lost
            self.seen.append(list(lost))
        elif action.kind == "release" and self.held:
            request = sorted(self.held)[action.which % len(self.held)]
            del self.held[request]
            self.pool.release(request, now_ns)
            self.free.append(request)
        elif action.kind == "reserve" and self.free:
            self._reserve(engine, self.free[action.which % len(self.free)])
        elif action.kind == "submit":
            self._submit(engine, action.which, now_ns)

    def _reserve(self, engine: int, request: int) -> None:
        is_there = self.pool.reserve(engine, request)
        self.seen.append(is_there)
        if is_there:
            self.free.remove(request)
            self.held[request] = engine

    def _submit(self, engine: int, which: int, now_ns: int) -> None:
        if self.role is not PoolRole.DECODE:
            if not self.free:
                return
            request = self.free.pop(which % len(self.free))
            self.engine_of[request] = engine
            self.pool.submit(engine, request, now_ns)
        elif self.held:
            request = sorted(self.held)[which % len(self.held)]
            self.pool.submit(self.held.pop(request), request, now_ns)


@st.composite
def _pool_cases(draw: st.DrawFn, scheduler: str) -> tuple[Case, PoolSetup]:
    """Draw requests and a pool; rules that only some schedulers know are drawn too."""
    case = draw(rich_cases(scheduler))
    size = draw(st.integers(1, 2)) if case.setup.is_lock_step else 1
    engines = replace(
        case.setup,
        is_lock_step=size > 1,
        num_engines=size * draw(st.integers(1, 3)),
    )
    setup = PoolSetup(
        name="drawn",
        engines=engines,
        role=draw(st.sampled_from(PoolRole)),
        num_replicas=1,
        engines_per_replica=size,
    )
    return case, setup


def _actions(role: PoolRole) -> st.SearchStrategy[list[_Action]]:
    kinds = {
        PoolRole.AGGREGATED: ("submit",) * 8 + ("withdraw",),
        PoolRole.PREFILL: ("submit",) * 5 + ("release",) * 4 + ("withdraw",),
        PoolRole.DECODE: ("reserve",) * 6 + ("submit",) * 6 + ("release", "withdraw"),
    }[role]
    gap_ns = st.sampled_from((0, 0, 700, 9_000, 31_000, 200_000))
    action = st.builds(
        _Action, gap_ns, st.sampled_from(kinds), st.integers(0, 5), st.integers(0, 30)
    )
    return st.lists(action, min_size=1, max_size=50)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_skipping_ahead_changes_nothing(scheduler: str) -> None:
    """What ends when, loads, steps, tokens and columns are equal after any actions."""

    @given(drawn=_pool_cases(scheduler), data=st.data())
    def compare(drawn: tuple[Case, PoolSetup], data: st.DataObject) -> None:
        case, setup = drawn
        actions = data.draw(_actions(setup.role))
        assert _play(case, setup, actions, steps=True) == _play(case, setup, actions, steps=False)

    compare()


def _tight_pool(role: PoolRole, num_kv_blocks: int, max_num_seqs: int) -> PoolSetup:
    """Return an engine that caches prefixes, of blocks that hold one token."""
    profile = replace(
        find_engine(DEFAULT_PROFILE),
        block_size=1,
        max_num_seqs=max_num_seqs,
        has_prefix_caching=True,
        has_async_scheduling=False,
    )
    engines = DeploymentSetup(profile=profile, num_kv_blocks=num_kv_blocks)
    return PoolSetup(name="tight", engines=engines, role=role, num_replicas=1)


def _equal_requests(count: int, num_prefill: int, num_decode: int) -> RequestPlan:
    ones = np.ones(count, dtype=np.int64)
    return plan_requests(0 * ones, num_prefill * ones, num_decode * ones)


@pytest.mark.parametrize(
    ("role", "kind"), [(PoolRole.PREFILL, "submit"), (PoolRole.DECODE, "reserve")]
)
def test_more_requests_hold_blocks_than_may_run(role: PoolRole, kind: str) -> None:
    """Any number of requests may keep blocks of an engine, computed or reserved."""
    setup = _tight_pool(role, num_kv_blocks=100, max_num_seqs=1)
    case = Case(_equal_requests(9, 3, 4), setup.engines, make_tables(5.0, 1))
    actions = [_Action(gap_ns=20_000, kind=kind, engine=0, which=0)] * 9
    seen = _play(case, setup, actions, steps=True)
    assert seen == _play(case, setup, actions, steps=False)


@pytest.mark.parametrize("gap_ns", [0, 5_000])
def test_blocks_that_came_are_found_once_their_request_has_run(gap_ns: int) -> None:
    """One that is preempted before its first step here does not find what was sent for it."""
    setup = _tight_pool(PoolRole.DECODE, num_kv_blocks=8, max_num_seqs=4)
    case = Case(_equal_requests(2, 3, 5), setup.engines, make_tables(5.0, 1))
    reserve = _Action(gap_ns=0, kind="reserve", engine=0, which=0)
    submit = _Action(gap_ns=0, kind="submit", engine=0, which=0)
    actions = [reserve, reserve, submit, submit._replace(gap_ns=gap_ns)]
    seen = _play(case, setup, actions, steps=True)
    assert seen == _play(case, setup, actions, steps=False)


def _play(
    case: Case, setup: PoolSetup, actions: Sequence[_Action], *, steps: bool
) -> dict[str, object]:
    pool = EnginePool(case.plan, setup, case.tables)
    free = [index for index in range(case.plan.num_requests) if pool.can_ever_hold[index]]
    if setup.role is PoolRole.DECODE:
        # The first token, which is the last too, leaves where the prompt was computed.
        free = [index for index in free if case.plan.num_decode_tokens[index] > 1]
    player = _Player(pool, steps, setup.role, pool.num_engines, setup.engines_per_replica, free)
    player.play(actions)
    tokens = pool.tokens()
    runs = (tokens.request, tokens.first_step, tokens.stride, tokens.count, tokens.engine)
    return {
        "seen": player.seen,
        "steps": [_columns(steps) for steps in pool.steps()],
        "runs": np.stack([column for column in runs if column is not None]).tolist(),
        "columns": {name: column.tolist() for name, column in pool.columns().items()},
        "scheduled": [pool.scheduled_ns(index) for index in range(case.plan.num_requests)],
    }


def _columns(steps: StepRecord) -> dict[str, object]:
    """Return the columns of steps as lists; None where there is none."""
    return {name: np.asarray(getattr(steps, name)).tolist() for name in StepRecord.__slots__}
