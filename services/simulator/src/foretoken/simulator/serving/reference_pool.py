"""A pool of engines in plain Python: all rules, and what compiled code must equal."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from foretoken.domain.errors import UnknownPluginError
from foretoken.domain.plugins import scan_modules
from foretoken.simulator.serving.batch import Scheduler, SchedulerFactory
from foretoken.simulator.serving.cluster_setup import PoolSetup
from foretoken.simulator.serving.content import BlockNames
from foretoken.simulator.serving.engine_pool import COUNT_COLUMNS, TIME_COLUMNS, Ended, PoolRole
from foretoken.simulator.serving.kv_cache import KvCache
from foretoken.simulator.serving.kv_store import KvStore
from foretoken.simulator.serving.record import Ints, RequestOutcome, StepRecord, TokenRuns
from foretoken.simulator.serving.replica import Replica
from foretoken.simulator.serving.replica_group import ReplicaGroup, StepCost, Turn
from foretoken.simulator.serving.request import SimRequest
from foretoken.simulator.serving.request_plan import RequestPlan
from foretoken.simulator.serving.routing import EngineLoad
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.speculation import Drafting, make_draftings

# Where the counts are kept in a request.
_COUNTS = dict(zip(COUNT_COLUMNS, ("num_preemptions", "num_cached", "num_loaded"), strict=True))


class ReferencePool:
    """The engines of a pool, in groups of those in lock step."""

    def __init__(self, plan: RequestPlan, setup: PoolSetup, cost: StepCost) -> None:
        self._role = setup.role
        self._replicas = [
            _make_replica(plan, setup, cost.num_stages) for _ in range(setup.engines.num_engines)
        ]
        size = setup.engines_per_replica
        self._groups = [
            ReplicaGroup(setup.engines.profile, self._replicas[first : first + size], cost)
            for first in range(0, len(self._replicas), size)
        ]
        self._group_of = [group for group in self._groups for _ in group.replicas]
        self._speculates = setup.engines.speculation is not None
        self._requests = _make_requests(plan, setup)

    @property
    def num_engines(self) -> int:
        """Engines there are, running or not."""
        return len(self._replicas)

    @property
    def next_ns(self) -> int:
        """When an engine next does something; NEVER_NS where all wait for requests."""
        return min(group.next_ns for group in self._groups)

    def complete(self, now_ns: int) -> Sequence[Ended]:
        """Let the tokens that leave at this instant leave; return the requests that ended."""
        finished = [
            group.complete()
            for group in self._groups
            if group.next_ns == now_ns and group.turn_kind is Turn.COMPLETE
        ]
        return _ended(chain.from_iterable(finished))

    def turn(self, now_ns: int) -> Sequence[Ended]:
        """Let the engines whose turn it is schedule; return requests that will never have room.

        Raises:
            RuntimeError: requests run that the scheduler does not schedule.

        """
        refused = [
            group.turn()
            for group in self._groups
            if group.next_ns == now_ns and group.turn_kind is not Turn.COMPLETE
        ]
        return _ended(chain.from_iterable(refused))

    def advance(self, horizon_ns: int) -> tuple[int, Sequence[Ended]]:
        """Go on before the horizon, at most to the first instant at which requests end."""
        ended: list[Ended] = []
        while (now_ns := self.next_ns) < horizon_ns:
            ended += self.complete(now_ns)
            if ended:
                return now_ns, ended
            ended += self.turn(now_ns)
        return horizon_ns, ended

    def quiet_until(self, horizon_ns: int) -> int:
        """Return a time, at most the horizon, before which no request ends if undisturbed."""
        return min(self.next_ns, horizon_ns)

    def submit(self, engine: int, request: int, now_ns: int) -> None:
        """Give an engine a request, which it sees when it next turns; an idle one turns now."""
        begun = self._requests[request]
        blocks = begun.blocks if self._role is PoolRole.DECODE else []
        begun.begin(engine)
        if self._role is PoolRole.DECODE:
            begun.blocks = blocks
            begun.land()
        self._replicas[engine].arrived.append(begun)
        self._group_of[engine].wake(now_ns)

    def reserve(self, engine: int, request: int) -> bool:
        """Take the KV blocks of a prompt that will be sent here, and one token more, if free."""
        coming = self._requests[request]
        coming.blocks = []
        return self._replicas[engine].kv.allocate(coming, coming.num_prefill_tokens + 1)

    def scheduled_ns(self, request: int) -> int:
        """Return when a request was first in a step since it was last submitted."""
        return self._requests[request].scheduled_ns

    def release(self, engine: int, request: int, now_ns: int) -> None:
        """Free the blocks of a request that does not run; its engine may go on."""
        self._replicas[engine].kv.free(self._requests[request])
        self._group_of[engine].wake(now_ns)

    def withdraw(self, engine: int, now_ns: int) -> Sequence[int]:
        """Take everything off an engine that fails, and off those in lock step with it."""
        del now_ns
        return [request.index for request in self._group_of[engine].clear()]

    def load_of(self, engine: int) -> EngineLoad:
        """Return what an engine has to do now; of what has landed no prompt is to compute."""
        replica = self._replicas[engine]
        queues = (replica.arrived, replica.waiting)
        return EngineLoad(
            num_waiting=sum(map(len, queues)) + len(replica.landed),
            num_running=len(replica.running),
            num_outstanding_tokens=sum(
                request.num_prefill_tokens
                for request in chain(*queues)
                if self._role is not PoolRole.DECODE or request.num_computed == 0
            ),
            kv_utilization_ratio=replica.kv.num_used / replica.kv.num_blocks,
        )

    def can_ever_hold(self, request: int) -> bool:
        """Whether an empty engine has KV blocks for a request."""
        return self._replicas[0].kv.can_ever_hold(self._requests[request])

    def steps(self) -> Sequence[StepRecord]:
        """Return the steps of each engine so far."""
        steps = [_steps_of(replica) for replica in self._replicas]
        if not self._speculates:
            return steps
        outputs = [
            [sum(step.batch.yields) for step, *_ in replica.steps] for replica in self._replicas
        ]
        return [
            replace(each, num_output_tokens=np.array(output, dtype=np.int64))
            for each, output in zip(steps, outputs, strict=True)
        ]

    def tokens(self) -> TokenRuns:
        """Return the output tokens so far, by request and in order; `engine` is this pool's."""
        runs = [
            (request.index, *run, request.engine)
            for request in self._requests
            for run in request.token_runs
        ]
        columns = np.array(runs, dtype=np.int64).reshape(-1, 5).T
        request, first_step, stride, count, engine = columns
        return TokenRuns(
            request=request, first_step=first_step, stride=stride, count=count, engine=engine
        )

    def columns(self) -> Mapping[str, Ints]:
        """Return times since each request was last submitted, and counts of all its time here."""
        places = {name: name for name in TIME_COLUMNS} | _COUNTS
        return {
            name: np.array([getattr(request, place) for request in self._requests], dtype=np.int64)
            for name, place in places.items()
        }


def find_scheduler(name: str) -> SchedulerFactory:
    """Return the plug-in of that name.

    Raises:
        UnknownPluginError: there is none; the message names the nearest.

    """
    found = scan_modules("foretoken.simulator.serving.schedulers", "SCHEDULER")
    factory: SchedulerFactory = UnknownPluginError.look_up(name, found)
    return factory


def _ended(requests: chain[SimRequest]) -> list[Ended]:
    return [Ended(request.index, RequestOutcome(request.outcome)) for request in requests]


def _make_requests(plan: RequestPlan, setup: PoolSetup) -> list[SimRequest]:
    """Return the requests as a pool sees them: one of prompts is done with their first token."""
    ends_early, speculation = setup.role is PoolRole.PREFILL, setup.engines.speculation
    answers = np.ones_like(plan.num_decode_tokens) if ends_early else plan.num_decode_tokens
    draftings: Sequence[Drafting | None] = [None] * plan.num_requests
    if speculation is not None and not ends_early:
        draftings = make_draftings(answers, speculation)
    columns = (plan.num_prefill_tokens, answers, plan.priority)
    rows = zip(*(column.tolist() for column in columns), draftings, strict=True)
    return [SimRequest(index, *row) for index, row in enumerate(rows)]


def _make_replica(plan: RequestPlan, setup: PoolSetup, num_stages: int) -> Replica:
    rules = setup.engines.profile

    def make_parts() -> tuple[Scheduler, KvCache]:
        return find_scheduler(rules.scheduler)(rules), _make_cache(plan, setup.engines)

    is_prefill = setup.role is PoolRole.PREFILL
    return Replica(rules, make_parts, num_stages, keeps_blocks=is_prefill)


def _make_cache(plan: RequestPlan, setup: DeploymentSetup) -> KvCache:
    size = setup.profile.block_size
    names = BlockNames(plan, size) if setup.profile.has_prefix_caching else None
    store = None
    if setup.kv_tiers:
        store = KvStore(setup.kv_tiers, setup.kv_bytes_per_token * size)
    return KvCache(setup.num_kv_blocks, size, names, store)


def _steps_of(replica: Replica) -> StepRecord:
    rows = [
        (scheduled_ns, start_ns, end_ns, *step.shape, *step[2:])
        for step, scheduled_ns, start_ns, end_ns in replica.steps
    ]
    columns = np.array(rows, dtype=np.int64).reshape(-1, 13).T
    prefills = [
        (index, request.index, tokens, context)
        for index, (step, *_) in enumerate(replica.steps)
        for request, tokens, context in step.batch.prefills
    ]
    prefill_columns = np.array(prefills, dtype=np.int64).reshape(-1, 4).T
    return StepRecord(
        scheduled_ns=columns[0],
        start_ns=columns[1],
        end_ns=columns[2],
        num_tokens=columns[3],
        num_rows=columns[4],
        num_decodes=columns[5],
        decode_kv_tokens=columns[6],
        decode_kv_tokens_max=columns[7],
        num_prefills=columns[8],
        num_running=columns[9],
        num_waiting=columns[10],
        num_used_blocks=columns[11],
        num_preempted=columns[12],
        prefill_step=prefill_columns[0],
        prefill_request=prefill_columns[1],
        prefill_tokens=prefill_columns[2],
        prefill_context=prefill_columns[3],
    )
