"""The rate of a workload and the same requests at another; about how many an engine serves."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.workload import WorkloadSpec
from foretoken.domain.units import US_PER_S
from foretoken.simulator.cluster.engine_pool import PoolRole
from foretoken.simulator.cluster.setup import ClusterSetup
from foretoken.simulator.cost.tables import DECODE, MIXED, PREFILL, CostTables
from foretoken.simulator.grid import Floats, Ints, interpolate
from foretoken.simulator.serving.lora import assign_adapters
from foretoken.simulator.serving.outcome import rate_of
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.workload.request_plan import NONE, RequestPlan, find_first
from foretoken.simulator.workload.requests import resolve_workload

# Arrivals later than this, 146 years, do not fit with what the simulation adds to them.
_MAX_NS = 2.0**62
# What a plan has besides columns that are taken row by row.
_NOT_COLUMNS = {
    "follows",
    "think_ns",
    "hash_offsets",
    "hashes",
    "hash_block_tokens",
    "concurrency",
    "joins",
}


def draw_plan(scenario: ServingScenario, seed: int) -> RequestPlan:
    """Return the requests of a scenario, drawn with a seed.

    Raises:
        InvalidRequestError, UnknownPluginError: the workload cannot be used.

    """
    plan = resolve_workload(scenario.workload, scenario.slo_classes, seed)
    return assign_adapters(plan, scenario.lora, seed)


def rate_of_plan(spec: WorkloadSpec, plan: RequestPlan) -> float:
    """Return the rate per second at which a plan was made of its workload.

    Of a synthetic workload that is what its `rate_rps` states (sessions, where it has them), of
    all others the arrivals over the time they take.

    Raises:
        InvalidRequestError: the workload has no rate: a closed loop, or all arrive at once.

    """
    if plan.concurrency:
        raise InvalidRequestError.of_field(
            "workload.arrival",
            "a closed loop has no rate to search: its requests wait for each other; give arrivals"
            " a rate, such as arrival: poisson with rate_rps, or a trace at its times",
        )
    realised_rps = rate_of(plan.arrival_ns)
    if realised_rps == 0:
        raise InvalidRequestError.of_field(
            "workload", "its requests arrive all at once, so there is no rate to search"
        )
    if spec.trace_requests or "rates_rps" in spec.arrival_options:
        return realised_rps
    return spec.rate_rps / spec.time_scale


def stretch_plan(plan: RequestPlan, ratio: float) -> RequestPlan:
    """Return the plan with the times of arrival times `ratio`; think times stay.

    Raises:
        InvalidRequestError: the times are too large.

    """
    arrival_ns = np.rint(plan.arrival_ns * ratio)
    if arrival_ns[-1] > _MAX_NS:
        raise InvalidRequestError.of_field("workload", "the rate is too low: times overflow")
    return replace(plan, arrival_ns=arrival_ns.astype(np.int64))


def stretch_scenario(scenario: ServingScenario, ratio: float) -> ServingScenario:
    """Return the scenario whose workload arrives in time times `ratio`."""
    workload = scenario.workload
    if workload.trace_requests or workload.arrival_options or workload.time_scale != 1:
        stretched = replace(workload, time_scale=workload.time_scale * ratio)
    else:
        stretched = replace(workload, rate_rps=workload.rate_rps / ratio)
    return replace(scenario, workload=stretched)


def take_requests(plan: RequestPlan, rows: Ints) -> RequestPlan:
    """Return some requests of a plan, by ascending index.

    They wait no more for those that are left out.
    """
    place = np.full(plan.num_requests + 1, NONE, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    # Of a request that follows nothing the index is -1, which is the place after the last.
    follows = place[plan.follows[rows]]
    joins = None if plan.joins is None else place[plan.joins]
    if joins is not None:
        joins = joins[(joins != NONE).all(axis=1)]
    begins_now = find_first(follows, joins) & ~find_first(plan.follows, plan.joins)[rows]
    counts = np.diff(plan.hash_offsets)[rows]
    offsets = np.concatenate(([0], np.cumsum(counts)))
    source = np.repeat(plan.hash_offsets[rows] - offsets[:-1], counts) + np.arange(offsets[-1])
    columns = {
        column.name: getattr(plan, column.name)[rows]
        for column in fields(plan)
        if column.name not in _NOT_COLUMNS and getattr(plan, column.name) is not None
    }
    return replace(
        plan,
        **columns,
        follows=follows,
        joins=joins,
        think_ns=np.where(begins_now, 0, plan.think_ns[rows]),
        hash_offsets=offsets,
        hashes=plan.hashes[source],
    )


# The longest context of a decode batch over the mean one, roughly.
_RAGGEDNESS = 2.0


class ServiceTime(NamedTuple):
    """Time in µs that an engine spends on a request: its prompt, and its share of decode steps."""

    prefill_us: float
    decode_us: float


def estimate_service_time(
    tables: CostTables, setup: DeploymentSetup, plan: RequestPlan
) -> ServiceTime:
    """Return the time of the mean request of a plan on a full engine.

    Prompts run alone in chunks of the token budget; answers in the largest batch that the limit of
    requests and the KV cache allow. Only the slowest pipeline stage counts.
    """
    prompt, answer = (
        float(tokens.mean()) for tokens in (plan.num_prefill_tokens, plan.num_decode_tokens)
    )
    budget = setup.profile.max_num_batched_tokens
    num_chunks = max(round(prompt / budget + 0.5), 1)
    chunk = prompt / num_chunks
    prefill_us = sum(_prefill_us(tables, chunk, chunk * index) for index in range(num_chunks))
    num_tokens = setup.num_kv_blocks * setup.profile.block_size
    room = int(num_tokens / (prompt + answer))
    batch = max(min(setup.profile.max_num_seqs, room, plan.num_requests, budget), 1)
    return ServiceTime(prefill_us, answer * _decode_us(tables, batch, prompt + answer / 2) / batch)


def estimate_service_rps(
    setup: DeploymentSetup | ClusterSetup, tables: Sequence[CostTables], plan: RequestPlan
) -> float:
    """Return about how many such requests a deployment serves in a second.

    `tables` are of each pool of a cluster, or of the engines. Where prompts and answers have pools
    of their own, the slower ones say.
    """
    if isinstance(setup, DeploymentSetup):
        return setup.num_engines * US_PER_S / sum(estimate_service_time(tables[0], setup, plan))
    whole_rps, prefill_rps, decode_rps = 0.0, 0.0, 0.0
    for pool, costs in zip(setup.pools, tables, strict=True):
        time = estimate_service_time(costs, pool.engines, plan)
        pool_rps = pool.num_replicas * pool.engines_per_replica * US_PER_S
        if pool.role is PoolRole.PREFILL:
            prefill_rps += pool_rps / time.prefill_us
        elif pool.role is PoolRole.DECODE:
            decode_rps += pool_rps / time.decode_us
        else:
            whole_rps += pool_rps / sum(time)
    return whole_rps + min(prefill_rps, decode_rps)


def _prefill_us(tables: CostTables, num_tokens: float, context: float) -> float:
    attention_us = interpolate(
        (tables.prefill_tokens, tables.prefill_context),
        tables.prefill_us.reshape(len(tables.prefill_us), -1),
        (np.array([num_tokens]), np.array([context])),
    )[:, 0]
    return _slowest(tables, MIXED, round(num_tokens), 1, attention_us)


def _decode_us(tables: CostTables, num_seqs: int, context: float) -> float:
    attention_us = interpolate(
        (tables.decode_seqs, tables.decode_mean, tables.decode_raggedness),
        tables.decode_us.reshape(len(tables.decode_us), -1),
        (np.array([float(num_seqs)]), np.array([context]), np.array([_RAGGEDNESS])),
    )[:, 0]
    return _slowest(tables, DECODE, num_seqs, num_seqs, attention_us)


def _slowest(
    tables: CostTables, kind: int, num_tokens: int, num_rows: int, attention_us: Floats
) -> float:
    """Return the time of a step on its slowest stage."""
    at = min(num_tokens, tables.tokens_us.shape[2] - 1)
    rows_us = tables.rows_us[:, min(num_rows, tables.rows_us.shape[1] - 1)]
    stages_us = tables.tokens_us[:, kind, at] + rows_us + attention_us
    slowest_us = float(np.maximum(stages_us, tables.floor_us[:, kind, at]).max())
    ratio, constant_us = tables.stretch[PREFILL if kind == MIXED else kind].tolist()
    return float(slowest_us * ratio + constant_us)
