"""What a cluster did, as the record of its simulation."""

from collections.abc import Mapping, Sequence

import numpy as np

from foretoken.simulator.cluster.engine_pool import COUNT_COLUMNS
from foretoken.simulator.cluster.handover import Journey
from foretoken.simulator.cluster.pool_state import PoolState
from foretoken.simulator.cluster.simulation import Cluster
from foretoken.simulator.serving.record import (
    NOT_REACHED,
    Ints,
    PoolRecord,
    RequestOutcome,
    RequestRecord,
    ServingRecord,
    TokenRuns,
)
from foretoken.simulator.workload.request_plan import RequestPlan, name_sessions


def record_cluster(plan: RequestPlan, cluster: Cluster) -> ServingRecord:
    """Return the record of a cluster until now."""
    requests = _requests_of(plan, cluster.journeys, cluster.pools)
    rules = cluster.pools[0].setup.engines
    return ServingRecord(
        requests=requests,
        tokens=_tokens_of(requests, cluster.pools),
        steps=[steps for pool in cluster.pools for steps in pool.engines.steps()],
        num_kv_blocks=rules.num_kv_blocks,
        block_size=rules.profile.block_size,
        pools=[_pool_record(pool, cluster) for pool in cluster.pools],
        encoders=cluster.encoders.record() if cluster.encoders else None,
    )


def _requests_of(
    plan: RequestPlan, journeys: Sequence[Journey], pools: Sequence[PoolState]
) -> RequestRecord:
    def column(name: str) -> Ints:
        return np.array([getattr(journey, name) for journey in journeys], dtype=np.int64)

    first, outcome = column("first_engine"), column("outcome")
    transferred = column("transferred_ns")
    # An answer of one token never leaves the engine that computed its prompt.
    last = np.where(column("engine") == NOT_REACHED, first, column("engine"))
    columns = [pool.engines.columns() for pool in pools]
    is_lost = outcome == RequestOutcome.LOST
    prefilled = np.where(is_lost, NOT_REACHED, _pick(columns, "first_token_ns", first, pools))
    # Where an answer goes on elsewhere, its first token leaves there, too.
    has_moved = ~is_lost & (transferred != NOT_REACHED)
    begun = _pick(columns, "scheduled_ns", last, pools)
    handed = np.where(has_moved & (begun >= 0), np.maximum(begun, prefilled), NOT_REACHED)
    return RequestRecord(
        arrival_ns=column("arrival_ns"),
        queued_ns=_pick(columns, "queued_ns", first, pools),
        scheduled_ns=_pick(columns, "scheduled_ns", first, pools),
        first_token_ns=np.where(column("prefilled_ns") == NOT_REACHED, prefilled, handed),
        finished_ns=np.where(
            outcome == RequestOutcome.COMPLETED,
            _pick(columns, "finished_ns", last, pools),
            NOT_REACHED,
        ),
        num_prefill_tokens=plan.num_prefill_tokens,
        num_decode_tokens=plan.num_decode_tokens,
        **{name: np.sum([each[name] for each in columns], axis=0) for name in COUNT_COLUMNS},
        engine=last,
        slo_class=plan.slo_class,
        outcome=outcome,
        prefill_engine=np.where(last == first, NOT_REACHED, first),
        prefilled_ns=prefilled,
        transferred_ns=transferred,
        num_retries=column("try_number"),
        session=name_sessions(plan),
    )


def _pick(
    columns: Sequence[Mapping[str, Ints]], name: str, engine: Ints, pools: Sequence[PoolState]
) -> Ints:
    """Return what the pool of each request's engine says, -1 where it is on none."""
    picked: Ints = np.full(len(engine), NOT_REACHED, dtype=np.int64)
    for each, pool in zip(columns, pools, strict=True):
        end = pool.first_engine + pool.engines.num_engines
        picked = np.where((engine >= pool.first_engine) & (engine < end), each[name], picked)
    return picked


def _tokens_of(requests: RequestRecord, pools: Sequence[PoolState]) -> TokenRuns:
    """Return the tokens of complete answers, of their last try, by request and in order."""
    parts = [pool.engines.tokens() for pool in pools]
    request, first_step, stride, count = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("request", "first_step", "stride", "count")
    )
    engine: Ints = np.concatenate(
        [
            np.asarray(part.engine) + pool.first_engine
            for part, pool in zip(parts, pools, strict=True)
        ]
    )
    is_last = engine == np.asarray(requests.engine)[request]
    is_kept = is_last | (engine == np.asarray(requests.prefill_engine)[request])
    is_kept &= np.asarray(requests.outcome)[request] == RequestOutcome.COMPLETED
    rows = np.flatnonzero(is_kept)
    rows = rows[np.lexsort((is_last[rows], request[rows]))]
    return TokenRuns(
        request=request[rows],
        first_step=first_step[rows],
        stride=stride[rows],
        count=count[rows],
        engine=engine[rows],
    )


def _pool_record(pool: PoolState, cluster: Cluster) -> PoolRecord:
    names = [pool.name_of(number) for number in range(len(pool.replicas))]
    return PoolRecord(
        name=pool.setup.name,
        first_engine=pool.first_engine,
        num_engines=pool.engines.num_engines,
        num_kv_blocks=pool.setup.engines.num_kv_blocks,
        block_size=pool.setup.engines.profile.block_size,
        spans=pool.spans(cluster.now_ns),
        num_failures=pool.num_failures,
        num_scale_ups=pool.num_scale_ups,
        num_scale_downs=pool.num_scale_downs,
        num_adapter_loads=sum(cache.num_loads for cache in pool.adapters),
        sent_bytes=pool.sent_bytes,
        port_busy_ns=sum(cluster.handover.network.busy_ns[name] for name in names),
    )
