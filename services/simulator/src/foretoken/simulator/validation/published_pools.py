"""Serving runs with prompts and answers on pools of their own that others measured and published.

A CSV table as AIConfigurator has it (`measured_serving.csv`): a run a row, with mean TTFT and TPOT.
How its servers were started is in `launches/published.yaml`, in `disaggregated`.
"""

import csv
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from foretoken.domain.alias import canonical_device, canonical_model
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.cluster import ClusterSpec, ReplicaPool, RoutingSpec
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.workload import Request, WorkloadSpec
from foretoken.simulator.validation.published_launch import (
    NUM_ROUNDS,
    DisaggregatedLaunch,
    PoolLaunch,
    disaggregated_launches,
)
from foretoken.simulator.validation.published_run import INFERENCE_MAX_SHORTEST_RATIO

_DISAGGREGATED = "disagg"
_CONCURRENCY = re.compile(r"_c(\d+)_")
# The most requests of a rank for answers where a launch leaves them to the client's number: the
# most in these recipes.
_MOST_ANSWERS = 512
# The client of these runs, sa-bench of ishandhanani/srt-slurm (bench.sh, benchmark_serving.py),
# sends ten requests for each running one, all first ones at once, after two that warm up the fresh
# servers, the first of which come by 250 a second.
NUM_WARMUP_ROUNDS = 2
_WARMUP_RPS = 250
# Each of both draws prompts, then answers, of as many tokens as this seed says: the prompts that
# warm up are the first of those that count. Source: its benchmark_serving.py, `--seed`.
CLIENT_SEED = 0
# After the requests that warm up, which take seconds for each.
RESUME_S = 3600.0
# All recipes have block reuse off on both sides and prefill without overlap.
_UNCACHED = {"has_prefix_caching": "false", "is_fresh": "true"}
_OF_PROMPTS = {**_UNCACHED, "has_async_scheduling": "false", "graph_mode": "none"}
# Dynamo's front end, where no other router is asked for.
_ROUTING = RoutingSpec(router="round_robin")


@dataclass(frozen=True, kw_only=True, slots=True)
class PooledRun:
    """A measured run: its pools, load, lengths of the longest requests, and mean latencies in ms.

    `decode` is the layout of a replica for answers; `concurrency` requests ran at a time.
    """

    name: str
    model: str
    precision: str
    device: str
    engine: str
    decode: ParallelLayout
    num_prefill: int
    num_decode: int
    concurrency: int
    input_tokens: int
    output_tokens: int
    ttft_ms: float
    tpot_ms: float

    def find_launch(self) -> DisaggregatedLaunch | None:
        """Return how the run was started; None: no recipe of it was read."""
        return next((one for one in disaggregated_launches() if _holds(one, self)), None)


def _holds(launch: DisaggregatedLaunch, run: PooledRun) -> bool:
    named = ("engine", "model", "precision", "device", "input_tokens")
    return (
        all(getattr(launch, name) == getattr(run, name) for name in named)
        and (not launch.concurrencies or run.concurrency in launch.concurrencies)
        and launch.num_decode in (0, run.num_decode)
        and launch.decode.layout in (None, run.decode)
    )


def read_pooled(content: bytes) -> list[PooledRun]:
    """Return the disaggregated runs of a table, in its order."""
    rows = csv.DictReader(io.StringIO(content.decode("utf-8")))
    return [_read_run(row) for row in rows if row["mode"] == _DISAGGREGATED]


def _read_run(row: Mapping[str, str]) -> PooledRun:
    concurrency = _CONCURRENCY.search(row["id"])
    return PooledRun(
        name=row["id"],
        model=canonical_model(row["model_path"].rpartition("/")[2]),
        precision=row["precision"],
        device=canonical_device(row["system"]),
        engine=row["backend"],
        decode=_read_decode(row),
        num_prefill=_number(row["prefill_num_workers"]),
        num_decode=_number(row["decode_num_workers"]),
        concurrency=int(concurrency[1]) if concurrency else _number(row["decode_batch_size"]),
        input_tokens=_number(row["isl"]),
        output_tokens=_number(row["osl"]),
        ttft_ms=float(row["silicon_ttft_ms"]),
        tpot_ms=float(row["silicon_tpot_ms"]),
    )


def _read_decode(row: Mapping[str, str]) -> ParallelLayout:
    """Return the layout of a replica for answers."""
    tp, dp, ep = (_number(row[f"decode_{name}_size"]) for name in ("tp", "attention_dp", "moe_ep"))
    return ParallelLayout(tp=tp, dp=dp, ep=ep, attention_dp=dp > 1 and ep == 1)


def _number(text: str) -> int:
    return max(1, int(float(text))) if text else 1


def scenario_of_pooled(run: PooledRun, seed: int = CLIENT_SEED) -> ServingScenario:
    """Return what simulates a run: first the requests that warm up, from `RESUME_S` on the others.

    Another seed than the client's is another draw of lengths.

    Raises:
        InvalidRequestError: no recipe of the run was read.

    """
    launch = run.find_launch()
    if launch is None:
        problem = f"no recipe of such a run of {run.engine} on {run.device} was read"
        raise InvalidRequestError.of_field("run", problem)
    return ServingScenario(
        name=run.name,
        model=find_model(run.model),
        device=run.device,
        framework=launch.framework,
        quantization=launch.quantization,
        kv_dtype=launch.kv_dtype,
        kernels={"moe_experts": launch.experts_kernel} if launch.experts_kernel else {},
        moe_routing=launch.moe_routing,
        engine=EngineSpec(profile=launch.profile),
        workload=WorkloadSpec(
            arrival="trace",
            arrival_options={
                "concurrency": str(run.concurrency),
                "ramp_s": str(run.concurrency / _WARMUP_RPS),
                "num_warmup": str(NUM_WARMUP_ROUNDS * run.concurrency),
                "resume_s": str(RESUME_S),
            },
            trace_requests=(*_sent(run, NUM_WARMUP_ROUNDS, seed), *_sent(run, NUM_ROUNDS, seed)),
        ),
        cluster=ClusterSpec(pools=_pools(run, launch), routing=_ROUTING, decode_routing=_ROUTING),
    )


def _sent(run: PooledRun, num_rounds: int, seed: int) -> Iterator[Request]:
    """Yield what the client sends in a run of so many requests for each running one."""
    draw = np.random.RandomState(seed)
    prompts, answers = (
        draw.randint(
            int(longest * INFERENCE_MAX_SHORTEST_RATIO), longest + 1, num_rounds * run.concurrency
        )
        for longest in (run.input_tokens, run.output_tokens)
    )
    for prompt, answer in zip(prompts.tolist(), answers.tolist(), strict=True):
        yield Request(arrival_s=0.0, num_prefill_tokens=prompt, num_decode_tokens=answer)


def _pools(run: PooledRun, launch: DisaggregatedLaunch) -> tuple[ReplicaPool, ReplicaPool]:
    prefill, decode = launch.prefill, launch.decode
    return (
        ReplicaPool(
            name="prompts",
            role="prefill",
            num_replicas=run.num_prefill,
            layout=prefill.layout,
            engine=_engine(launch, prefill, _OF_PROMPTS),
        ),
        ReplicaPool(
            name="answers",
            role="decode",
            num_replicas=run.num_decode,
            layout=run.decode,
            engine=_engine(launch, decode, _UNCACHED, run.concurrency),
        ),
    )


def _engine(
    launch: DisaggregatedLaunch, pool: PoolLaunch, rules: Mapping[str, str], concurrency: int = 0
) -> EngineSpec:
    """Return the engine of a pool, which never has more requests than the client sends."""
    return EngineSpec(
        profile=launch.profile,
        max_num_seqs=pool.max_num_seqs or min(concurrency, _MOST_ANSWERS),
        max_num_batched_tokens=pool.step_tokens,
        memory_utilization_ratio=pool.memory_ratio,
        rules={**rules, **pool.rules},
    )
