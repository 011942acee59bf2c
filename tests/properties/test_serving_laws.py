"""What holds for every serving simulation, whatever arrives and however tight the cache is."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.simulator.serving.batch import StepBudget, StepShape
from foretoken.simulator.serving.cluster import Cluster
from foretoken.simulator.serving.kv_cache import KvCache
from foretoken.simulator.serving.metrics import collect_times
from foretoken.simulator.serving.replica import Replica, ReplicaRules
from foretoken.simulator.serving.request import SimRequest
from foretoken.simulator.serving.routers.round_robin import ROUTER
from foretoken.simulator.serving.schedulers.chunked_prefill import SCHEDULER

_STEP_US, _TOKEN_US, _KV_US = 5.0, 0.7, 0.013


class LinearCost:
    """Steps cost a constant, and more with every token and every token of context."""

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages

    def stage_us(self, shape: StepShape) -> Sequence[float]:
        step_us = self.decode_us(
            shape.num_tokens, shape.decode_kv_tokens, shape.decode_kv_tokens_max
        )
        return [
            (step_us + sum(_KV_US * tokens * context for tokens, context in shape.prefills))
            * (1 + 0.3 * stage)
            for stage in range(self.num_stages)
        ]

    def decode_us(self, num_decodes: int, kv_tokens: int, kv_tokens_max: int) -> float:
        return _STEP_US + _TOKEN_US * num_decodes + _KV_US * (kv_tokens + kv_tokens_max)


@dataclass(frozen=True)
class Case:
    """A workload, (gap in ns, prompt, answer) per request, and the machine it runs on."""

    arrivals: tuple[tuple[int, int, int], ...]
    budget: StepBudget
    num_blocks: int
    block_size: int
    num_stages: int = 1
    num_replicas: int = 1
    can_coast: bool = True


_ARRIVALS = st.lists(
    st.tuples(st.integers(0, 60_000), st.integers(1, 60), st.integers(1, 25)),
    min_size=1,
    max_size=12,
).map(tuple)
_CASES = st.builds(
    Case,
    arrivals=_ARRIVALS,
    budget=st.builds(StepBudget, st.integers(1, 48), st.integers(1, 6)),
    num_blocks=st.integers(4, 40),
    block_size=st.integers(1, 8),
    num_stages=st.integers(1, 3),
    num_replicas=st.integers(1, 3),
)
_ONE_STAGE_CASES = _CASES.map(lambda case: replace(case, num_stages=1))


def _build(case: Case) -> tuple[Cluster, list[Replica], list[SimRequest]]:
    rules = ReplicaRules(SCHEDULER, case.budget, 1000, host_gap_ns=100, can_coast=case.can_coast)
    replicas = [
        Replica(rules, LinearCost(case.num_stages), KvCache(case.num_blocks, case.block_size))
        for _ in range(case.num_replicas)
    ]
    arrivals_ns = np.cumsum([gap for gap, _, _ in case.arrivals]).tolist()
    requests = [
        SimRequest(index, arrival_ns, prompt, answer)
        for index, (arrival_ns, (_, prompt, answer)) in enumerate(
            zip(arrivals_ns, case.arrivals, strict=True)
        )
    ]
    return Cluster(replicas, ROUTER(), requests), replicas, requests


def _run(case: Case) -> tuple[list[Replica], list[SimRequest]]:
    cluster, replicas, requests = _build(case)
    cluster.run(lambda: None)
    return replicas, requests


def _everything(case: Case) -> str:
    """Return all a simulation decides as text."""
    replicas, requests = _run(case)
    ends_ns = [replica.log.columns().end_ns for replica in replicas]
    times = collect_times(requests, ends_ns)
    steps = [replica.log.columns() for replica in replicas]
    names = type(steps[0]).__dataclass_fields__
    return json.dumps(
        {
            "times": {n: getattr(times, n).tolist() for n in type(times).__dataclass_fields__},
            "runs": [request.token_runs for request in requests],
            "steps": [{name: getattr(s, name).tolist() for name in names} for s in steps],
        }
    )


@given(_CASES)
def test_every_request_and_every_block_is_accounted_for_at_every_instant(case: Case) -> None:
    cluster, replicas, _ = _build(case)
    clock = [0]

    def watch() -> None:
        held = [[*r.running, *r.requests_in_flight] for r in replicas]
        num_queued = sum(len(replica.waiting) for replica in replicas)
        num_running = sum(len(requests) for requests in held)
        assert cluster.num_arrived == (
            cluster.num_done + cluster.num_refused + num_queued + num_running
        )
        for replica, requests in zip(replicas, held, strict=True):
            num_held = sum(request.num_blocks for request in requests)
            assert replica.kv.num_free + num_held == case.num_blocks
            assert replica.kv.num_free >= 0
            assert len(requests) <= case.budget.num_seqs
            assert all(r.num_blocks == r.num_computed == 0 for r in replica.waiting)
            assert all(request.num_computed <= request.num_slots for request in requests)
        assert cluster.loop.now_ns >= clock[0]
        clock[0] = cluster.loop.now_ns

    cluster.run(watch)
    assert cluster.num_done + cluster.num_refused == len(case.arrivals)
    assert all(replica.kv.num_used == 0 for replica in replicas)


@given(_CASES)
def test_no_token_is_lost_or_computed_twice_without_preemption(case: Case) -> None:
    replicas, requests = _run(case)
    served = [request for request in requests if request.is_finished]
    for request in served:
        assert sum(count for _, count in request.token_runs) == request.num_decode_tokens
        assert request.num_computed == request.num_kv_tokens_max
    columns = [replica.log.columns() for replica in replicas]
    num_needed = sum(request.num_kv_tokens_max for request in served)
    num_computed = sum(int(steps.num_tokens.sum()) for steps in columns)
    assert num_computed >= num_needed
    if not any(request.num_preemptions for request in requests):
        assert num_computed == num_needed
    for index, steps in enumerate(columns):
        emitted = np.zeros(len(steps.end_ns), dtype=np.int64)
        for first, count in (run for r in served if r.replica == index for run in r.token_runs):
            emitted[first : first + count] += 1
        assert emitted.tolist() == steps.num_rows.tolist()


@given(_CASES)
def test_steps_stay_inside_their_limits_and_end_in_order(case: Case) -> None:
    replicas, _ = _run(case)
    for replica in replicas:
        steps = replica.log.columns()
        assert (np.diff(steps.end_ns) > 0).all()
        assert (steps.num_tokens >= 1).all()
        assert (steps.num_tokens <= case.budget.num_tokens).all()
        assert (steps.num_seqs <= case.budget.num_seqs).all()
        assert (steps.num_used_blocks <= case.num_blocks).all()
        tokens_of_prefills = np.bincount(
            steps.prefill_step, steps.prefill_tokens, minlength=len(steps.end_ns)
        )
        assert (steps.num_tokens == steps.num_decodes + tokens_of_prefills).all()


@given(_CASES)
def test_a_first_token_takes_at_least_its_prompt(case: Case) -> None:
    replicas, requests = _run(case)
    times = collect_times(requests, [replica.log.columns().end_ns for replica in replicas])
    cost = LinearCost(case.num_stages)
    for request, first_ns in zip(requests, times.first_token_ns.tolist(), strict=True):
        if first_ns >= 0:
            shape = StepShape(request.num_prefill_tokens, 1, 0, 0, 0)
            # A step's time is rounded to the ns on every stage.
            num_roundings = case.num_stages * request.num_prefill_tokens
            assert first_ns - request.arrival_ns >= sum(cost.stage_us(shape)) * 1e3 - num_roundings


@given(_ONE_STAGE_CASES)
def test_coasting_changes_nothing(case: Case) -> None:
    assert _everything(case) == _everything(replace(case, can_coast=False))


@given(_CASES)
@settings(max_examples=25)
def test_the_same_case_gives_the_same_bytes(case: Case) -> None:
    assert _everything(case) == _everything(case)


@given(_ONE_STAGE_CASES, st.integers(0, 60_000), st.integers(1, 60), st.integers(1, 25))
def test_one_more_request_at_the_end_helps_nobody(
    case: Case, gap_ns: int, num_prefill: int, num_decode: int
) -> None:
    """It is served last and preempted first, so the others keep their steps, only longer ones."""
    alone = replace(case, num_replicas=1)
    crowded = replace(alone, arrivals=(*alone.arrivals, (gap_ns, num_prefill, num_decode)))
    finished = []
    for each in (alone, crowded):
        replicas, requests = _run(each)
        times = collect_times(requests, [replica.log.columns().end_ns for replica in replicas])
        finished.append(times.finished_ns[: len(alone.arrivals)])
    assert (finished[1] >= finished[0]).all()
