"""About how many requests an engine serves in a second: where a search for its capacity begins."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from foretoken.domain.units import US_PER_S
from foretoken.simulator.cluster.engine_pool import PoolRole
from foretoken.simulator.cluster.setup import ClusterSetup
from foretoken.simulator.cost.tables import DECODE, MIXED, CostTables
from foretoken.simulator.grid import Floats, interpolate
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.workload.request_plan import RequestPlan

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
    return float(np.maximum(stages_us, tables.floor_us[:, kind, at]).max())
