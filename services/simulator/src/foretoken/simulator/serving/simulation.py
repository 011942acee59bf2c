"""Simulate a serving deployment from its scenario to its report."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from foretoken.domain import schema
from foretoken.domain.errors import FieldViolation, InvalidRequestError, UnknownPluginError
from foretoken.domain.graph import BatchShape, DecodeShape, PrefillShape
from foretoken.domain.hardware.device import find_device
from foretoken.domain.job_runner import JobProgress
from foretoken.domain.lowering import check_layout, lower_rank
from foretoken.domain.memory import ServingMemory, plan_serving_memory
from foretoken.domain.plugins import scan_modules
from foretoken.domain.report import Feasibility, ServingReport
from foretoken.domain.scenario import EngineSpec, ServingScenario
from foretoken.domain.units import NS_PER_S, NS_PER_US
from foretoken.domain.workload import Request
from foretoken.simulator.latency_surfaces import (
    LatencySurfaces,
    SurfaceSpec,
    replica_ranks,
    serving_options,
    surface_spec,
)
from foretoken.simulator.serving.batch import Scheduler, StepBudget, StepCost
from foretoken.simulator.serving.cluster import Cluster
from foretoken.simulator.serving.kv_cache import KvCache
from foretoken.simulator.serving.outcome import ServingOutcome, build_report
from foretoken.simulator.serving.replica import Replica, ReplicaRules
from foretoken.simulator.serving.request import SimRequest
from foretoken.simulator.serving.workload import resolve_requests
from foretoken.simulator.step_cost import SurfaceCost

FetchSurfaces = Callable[[SurfaceSpec], LatencySurfaces]

_ROUTER = "round_robin"
_INSTANTS_PER_UPDATE = 2048


def simulate_serving(
    scenario: ServingScenario, fetch: FetchSurfaces, progress: JobProgress
) -> ServingReport:
    """Return what users of a deployment would see.

    A layout that does not fit the model or the device's memory is a result with its reason.
    `fetch` returns the latency surfaces of a deployment.

    Raises:
        InvalidRequestError: the engine's limits, the workload or the model cannot be used.
        UnknownDeviceError, UnknownPluginError: no such device, scheduler or arrival process.
        CancelledJobError: the job was cancelled.

    """
    check_engine(scenario.engine)
    scheduler = find_scheduler(scenario.engine.scheduler)
    requests = resolve_requests(scenario.workload, scenario.seed)
    report = ServingReport(num_requests=len(requests), scenario_json=_resolved_json(scenario))
    memory, reason = judge_feasibility(scenario)
    num_blocks = _count_blocks(scenario.engine, memory)
    if not reason and num_blocks == 0:
        reason = "the memory left for the KV cache holds no block"
    if reason:
        return replace(report, feasibility=Feasibility(is_feasible=False, reason=reason))
    progress.update(0.05, "ask the predictor")
    longest = max(r.num_prefill_tokens + r.num_decode_tokens for r in requests)
    surfaces = fetch(surface_spec(scenario, min(longest, scenario.model.max_position)))
    cost = SurfaceCost(surfaces, scenario.engine.max_num_batched_tokens)
    outcome = run_deployment(scenario, scheduler, requests, (cost, num_blocks), progress)
    return build_report(report, scenario, outcome, surfaces.model_version, cost)


def check_engine(engine: EngineSpec) -> None:
    """Check the engine's limits.

    Raises:
        InvalidRequestError: with one violation per limit that cannot be used.

    """
    checks = {
        "max_num_seqs": (engine.max_num_seqs >= 1, "must be at least 1"),
        "max_num_batched_tokens": (engine.max_num_batched_tokens >= 1, "must be at least 1"),
        "block_size": (engine.block_size >= 1, "must be at least 1"),
        "num_kv_blocks": (engine.num_kv_blocks >= 0, "must be at least 0"),
        "host_gap_us": (engine.host_gap_us >= 0, "must be at least 0"),
        "memory_utilization_ratio": (
            0 < engine.memory_utilization_ratio <= 1,
            "must be above 0 and at most 1",
        ),
    }
    violations = [
        FieldViolation(f"engine.{name}", description)
        for name, (is_legal, description) in checks.items()
        if not is_legal
    ]
    if violations:
        raise InvalidRequestError.of_violations(violations)


def find_scheduler(name: str) -> Scheduler:
    """Return the scheduler of that name.

    Raises:
        UnknownPluginError: there is none; the message names the nearest.

    """
    schedulers: Mapping[str, Scheduler] = scan_modules(
        "foretoken.simulator.serving.schedulers", "SCHEDULER"
    )
    return UnknownPluginError.look_up(name, schedulers)


def judge_feasibility(scenario: ServingScenario) -> tuple[ServingMemory | None, str]:
    """Return the memory of the fullest rank, and why the deployment cannot run or nothing.

    Raises:
        InvalidRequestError: the model has an operator that cannot be simulated yet.

    """
    device = find_device(scenario.device)
    engine, model = scenario.engine, scenario.model
    tokens, seqs = engine.max_num_batched_tokens, engine.max_num_seqs
    shape = BatchShape(
        num_tokens=tokens,
        num_output_rows=seqs,
        prefill=PrefillShape(num_seqs=1, q_tokens=tokens, kv_tokens=tokens, score_pairs=tokens),
        decode=DecodeShape(num_seqs=seqs, kv_tokens=seqs, kv_tokens_max=1),
    )
    options = serving_options(scenario.dtype, engine.fuses_add_norm)
    ranks = replica_ranks(scenario)
    try:
        check_layout(ranks[0])
    except InvalidRequestError as err:
        return None, err.message
    memories = [
        plan_serving_memory(lower_rank(shape, options, rank), model.hidden, engine, device)
        for rank in ranks
    ]
    memory = min(memories, key=lambda memory: memory.kv_bytes / memory.kv_bytes_per_token)
    return memory, memory.infeasibility


def run_deployment(
    scenario: ServingScenario,
    scheduler: Scheduler,
    requests: Sequence[Request],
    machine: tuple[StepCost, int],
    progress: JobProgress,
) -> ServingOutcome:
    """Run requests through a deployment; `machine` is step cost and KV blocks of a replica.

    Raises:
        CancelledJobError: the job was cancelled.

    """
    engine = scenario.engine
    cost, num_blocks = machine
    rules = ReplicaRules(
        scheduler=scheduler,
        budget=StepBudget(engine.max_num_batched_tokens, engine.max_num_seqs),
        max_context=scenario.model.max_position,
        host_gap_ns=round(engine.host_gap_us * NS_PER_US),
    )
    replicas = [
        Replica(rules, cost, KvCache(num_blocks, engine.block_size))
        for _ in range(scenario.layout.dp)
    ]
    sim_requests = [
        SimRequest(index, round(r.arrival_s * NS_PER_S), r.num_prefill_tokens, r.num_decode_tokens)
        for index, r in enumerate(requests)
    ]
    router = scan_modules("foretoken.simulator.serving.routers", "ROUTER")[_ROUTER]()
    cluster = Cluster(replicas, router, sim_requests)
    cluster.run(_watch(cluster, len(requests), progress))
    return ServingOutcome(
        requests=sim_requests,
        steps=[replica.log.columns() for replica in replicas],
        num_kv_blocks=num_blocks,
    )


def _watch(cluster: Cluster, num_requests: int, progress: JobProgress) -> Callable[[], None]:
    num_instants = 0

    def watch() -> None:
        nonlocal num_instants
        num_instants += 1
        if num_instants % _INSTANTS_PER_UPDATE == 0:
            num_done = cluster.num_done + cluster.num_refused
            progress.update(
                0.1 + 0.85 * num_done / num_requests, f"{num_done} of {num_requests} requests"
            )

    return watch


def _count_blocks(engine: EngineSpec, memory: ServingMemory | None) -> int:
    if engine.num_kv_blocks or memory is None:
        return engine.num_kv_blocks
    return memory.num_kv_blocks(engine.block_size)


def _resolved_json(scenario: ServingScenario) -> str:
    # Inline requests are in the report's columns already, arrival by arrival.
    workload = replace(scenario.workload, trace_requests=())
    return json.dumps(schema.encode(replace(scenario, workload=workload)))
