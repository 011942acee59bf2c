"""What holds for every cluster, whatever fails, scales or is refused."""

import itertools
from collections import defaultdict
from dataclasses import fields
from typing import TypeAlias

import numpy as np
import pytest
from cluster_strategies import ClusterCase, cluster_cases
from hypothesis import HealthCheck, given, settings
from serving_strategies import SCHEDULERS, Case, rich_cases

from foretoken.domain.requests.cluster import RoutingSpec
from foretoken.simulator.cluster.engine_pool import PoolRole
from foretoken.simulator.cluster.setup import ClusterSetup, PoolSetup
from foretoken.simulator.cluster.simulation import Cluster
from foretoken.simulator.serving.record import RequestOutcome, ServingRecord
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.simulation import run_cluster

# To draw a cluster takes longer than to run it, so every law looks at every run.
_CLUSTERS = settings(suppress_health_check=[HealthCheck.too_slow])
_SETTINGS = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
_NEVER_RAN = (
    RequestOutcome.CONTEXT_TOO_LONG,
    RequestOutcome.REJECTED,
)
_Run: TypeAlias = tuple[ClusterCase, ServingRecord, Cluster]


def _every_request_ends_exactly_once(run: _Run) -> None:
    """Each has one outcome, and one of a kind that the cluster can cause."""
    case, record, cluster = run
    outcome = record.requests.outcome
    assert cluster.num_done == case.plan.num_requests
    assert np.isin(outcome, list(RequestOutcome)).all()
    if not case.setup.routing.max_queued:
        assert not (outcome == RequestOutcome.REJECTED).any()
    if not case.setup.failures:
        assert not (outcome == RequestOutcome.LOST).any()
    assert all(not replica.requests for pool in cluster.pools for replica in pool.replicas)


def _every_token_of_a_complete_answer_leaves_once(run: _Run) -> None:
    """Tokens are conserved: as many as asked for; those of failed tries are not counted."""
    case, record, _ = run
    num_tokens = np.zeros(case.plan.num_requests, dtype=np.int64)
    np.add.at(num_tokens, record.tokens.request, record.tokens.count)
    is_done = record.requests.outcome == RequestOutcome.COMPLETED
    assert (num_tokens == np.where(is_done, case.plan.num_decode_tokens, 0)).all()
    assert (np.diff(record.tokens.request) >= 0).all()
    num_rows = sum(int(steps.num_rows.sum()) for steps in record.steps)
    assert num_rows >= num_tokens.sum()
    if not case.setup.failures:
        is_undone = (record.requests.scheduled_ns >= 0) & ~is_done
        assert is_undone.any() or num_rows == num_tokens.sum()


def _every_prompt_of_a_complete_answer_was_computed_or_cached(run: _Run) -> None:
    case, record, _ = run
    requests = record.requests
    num_computed = np.array(requests.num_cached_tokens)
    for steps in record.steps:
        np.add.at(num_computed, steps.prefill_request, steps.prefill_tokens)
        # A last token after a cached prompt is a decode by its shape.
    is_done = requests.outcome == RequestOutcome.COMPLETED
    assert (num_computed + 1 >= case.plan.num_prefill_tokens)[is_done].all()


def _tokens_leave_in_the_order_of_time(run: _Run) -> None:
    """No token before the arrival, and none before the one before it, across pools."""
    case, record, _ = run
    requests, tokens = record.requests, record.tokens
    assert tokens.engine is not None
    assert requests.prefilled_ns is not None
    last_ns = np.array(requests.arrival_ns)
    num_seen = np.zeros(case.plan.num_requests, dtype=np.int64)
    for request, engine, first_step, stride, count in zip(
        tokens.request, tokens.engine, tokens.first_step, tokens.stride, tokens.count, strict=True
    ):
        for step in first_step + stride * np.arange(count):
            time_ns = record.steps[engine].seen_ns[step]
            assert time_ns >= last_ns[request]
            if num_seen[request] == 0:
                has_moved = engine != requests.engine[request]
                first = requests.prefilled_ns if has_moved else requests.first_token_ns
                assert time_ns == first[request]
                # Its first token is handed out where the answer goes on, before the second.
                time_ns = requests.first_token_ns[request]
            num_seen[request] += 1
            last_ns[request] = time_ns
    is_done = requests.outcome == RequestOutcome.COMPLETED
    assert (last_ns == requests.finished_ns)[is_done].all()


def _no_engine_is_above_its_capacity(run: _Run) -> None:
    case, record, _ = run
    for pool, kept in zip(case.setup.pools, record.pools, strict=True):
        rules = pool.engines.profile
        for engine in range(kept.first_engine, kept.first_engine + kept.num_engines):
            steps = record.steps[engine]
            assert (steps.num_used_blocks <= pool.engines.num_kv_blocks).all()
            assert (steps.num_running <= rules.max_num_seqs).all()
            assert (steps.num_tokens <= rules.max_num_batched_tokens).all()


def _no_block_is_used_in_the_end(run: _Run) -> None:
    """KV blocks are conserved in every pool, whatever was lost or given up on the way."""
    _, _, cluster = run
    for pool in cluster.pools:
        for engine in range(pool.engines.num_engines):
            load = pool.engines.load_of(engine)
            assert (load.num_outstanding, load.kv_utilization_ratio) == (0, 0.0)


def _steps_run_only_while_a_replica_serves(run: _Run) -> None:
    """Replicas that are off, start or are down compute nothing; held times do not overlap."""
    _, record, _ = run
    for kept in record.pools:
        by_engine = defaultdict(list)
        for span in kept.spans:
            assert span.start_ns < span.end_ns
            by_engine[span.engine].append(span)
        for engine in range(kept.first_engine, kept.first_engine + kept.num_engines):
            spans = by_engine[engine]
            for before, after in itertools.pairwise(spans):
                assert before.end_ns <= after.start_ns
            steps = record.steps[engine]
            for start_ns, end_ns in zip(steps.scheduled_ns, steps.end_ns, strict=True):
                # Draining is a span of its own, so a step may lie in two of them.
                ready = [span for span in spans if span.is_ready]
                held_ns = sum(
                    max(0, min(span.end_ns, end_ns) - max(span.start_ns, start_ns))
                    for span in ready
                )
                assert held_ns == end_ns - start_ns


def _a_request_begins_anew_only_after_a_failure(run: _Run) -> None:
    """Without failures nothing is tried again; a lost request was tried as often as allowed."""
    case, record, _ = run
    num_retries = record.requests.num_retries
    assert num_retries is not None
    num_failures = sum(pool.num_failures for pool in record.pools)
    failures = case.setup.failures
    most = min(failures.max_retries, num_failures) if failures else 0
    assert (num_retries <= most).all()
    is_lost = record.requests.outcome == RequestOutcome.LOST
    assert num_failures > 0 or not is_lost.any()
    if failures:
        assert (num_retries[is_lost] == failures.max_retries).all()


def _a_rejected_request_never_ran(run: _Run) -> None:
    _, record, _ = run
    requests = record.requests
    never_ran = np.isin(requests.outcome, _NEVER_RAN)
    for column in (requests.engine, requests.queued_ns, requests.scheduled_ns):
        assert (column[never_ran] == -1).all()
    for steps in record.steps:
        assert not never_ran[steps.prefill_request].any()


def _caches_move_from_prefill_to_decode_pools_after_the_first_token(run: _Run) -> None:
    """Every complete answer of more than one token moved, in time for its second token.

    A cache does not wait until an output server has handed the first token out.
    """
    case, record, _ = run
    requests = record.requests
    assert requests.transferred_ns is not None
    assert requests.prefilled_ns is not None
    assert requests.prefill_engine is not None
    is_decode = np.array(
        [
            pool.role is PoolRole.DECODE
            for pool in case.setup.pools
            for _ in range(pool.engines.num_engines)
        ]
    )
    is_done = requests.outcome == RequestOutcome.COMPLETED
    has_moved = is_done & (case.plan.num_decode_tokens > 1) & is_decode.any()
    assert is_decode[requests.engine[has_moved]].all()
    assert not is_decode[requests.prefill_engine[has_moved]].any()
    assert (requests.prefill_engine[is_done & ~has_moved] == -1).all()
    assert (requests.transferred_ns > requests.scheduled_ns)[has_moved].all()
    profiles = [pool.engines.profile for pool in case.setup.pools]
    if not any(each.output_us_per_seq or each.output_us_per_past_token for each in profiles):
        assert (requests.transferred_ns >= requests.prefilled_ns)[has_moved].all()
    assert (requests.transferred_ns <= requests.first_token_ns)[has_moved].all()
    assert (requests.transferred_ns <= requests.finished_ns)[has_moved].all()
    sent = sum(pool.sent_bytes for pool in record.pools)
    least = 2 * 100 * int(case.plan.num_prefill_tokens[has_moved].sum())
    assert sent == least or (case.setup.failures is not None and sent > least)


def _the_same_seed_gives_the_same_bytes(run: _Run) -> None:
    case, record, _ = run
    again, _ = case.run()
    assert _columns(record) == _columns(again)
    assert record.pools == again.pools


_LAWS = (
    _every_request_ends_exactly_once,
    _every_token_of_a_complete_answer_leaves_once,
    _every_prompt_of_a_complete_answer_was_computed_or_cached,
    _tokens_leave_in_the_order_of_time,
    _no_engine_is_above_its_capacity,
    _no_block_is_used_in_the_end,
    _steps_run_only_while_a_replica_serves,
    _a_request_begins_anew_only_after_a_failure,
    _a_rejected_request_never_ran,
    _caches_move_from_prefill_to_decode_pools_after_the_first_token,
    _the_same_seed_gives_the_same_bytes,
)


@_CLUSTERS
@given(case=cluster_cases())
def test_every_law_holds_for_every_cluster(case: ClusterCase) -> None:
    record, cluster = case.run()
    for check in _LAWS:
        check((case, record, cluster))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_cluster_of_one_pool_is_the_plain_deployment(scheduler: str) -> None:
    """Two clocks, one of which is compiled: equal to the ns but for columns that clusters add."""
    _SETTINGS(given(case=rich_cases(scheduler))(_check_cluster_of_one))()


def _check_cluster_of_one(case: Case) -> None:
    cluster = run_cluster(case.plan, _cluster_of(case.setup), [case.tables], lambda _: None)
    expected, actual = _columns(case.run()), _columns(cluster)
    assert {name: actual[name] for name in expected if expected[name] is not None} == {
        name: column for name, column in expected.items() if column is not None
    }


def _cluster_of(setup: DeploymentSetup) -> ClusterSetup:
    """Return a deployment as a cluster: engines in lock step are one replica, others one each."""
    size = setup.num_engines if setup.is_lock_step else 1
    num_replicas = setup.num_engines // size
    pool = PoolSetup(name="", engines=setup, num_replicas=num_replicas, engines_per_replica=size)
    router = "round_robin" if setup.is_lock_step else setup.router
    return ClusterSetup(pools=(pool,), routing=RoutingSpec(router=router))


def _columns(record: ServingRecord) -> dict[str, list[int]]:
    parts: dict[str, object] = {"requests": record.requests, "tokens": record.tokens}
    parts |= {f"steps of engine {index}": steps for index, steps in enumerate(record.steps)}
    return {
        f"{part}: {item.name}": np.asarray(getattr(columns, item.name)).tolist()
        for part, columns in parts.items()
        for item in fields(columns)  # type: ignore[arg-type]
    }
