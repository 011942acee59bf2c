"""A request in a line, as it was understood: defaults filled in, names resolved."""

from collections.abc import Iterable, Mapping

from foretoken.domain.metrics.registry import describe_limit
from foretoken.domain.metrics.request import LIMITED
from foretoken.domain.models.quantization import UNQUANTIZED
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario, TrainingScenario
from foretoken.domain.requests.search import (
    CapacityRequest,
    LatencyLimit,
    ServingSearchRequest,
    ServingTargets,
)
from foretoken.domain.requests.slo import Slo
from foretoken.domain.requests.training_run import TrainingRunRequest
from foretoken.domain.requests.training_search import TrainingSearchRequest
from foretoken.domain.requests.workload import LengthSpec, WorkloadSpec
from foretoken.domain.units import MS_PER_S

# What `OBJECTIVES` and `TRAINING_OBJECTIVES` ask for, in words.
OBJECTIVE_WORDS: Mapping[str, str] = {
    "throughput_per_gpu": "tokens/s per GPU",
    "cost": "least cost per token",
    "num_devices": "fewest GPUs",
    "latency": "shortest TPOT",
    "step_time": "shortest step",
    "memory_headroom": "most free memory",
}
_AXES = ("tp", "pp", "dp", "cp", "ep")


Asked = (
    ServingScenario
    | TrainingScenario
    | CapacityRequest
    | ServingSearchRequest
    | TrainingSearchRequest
)


def name_request(request: Asked) -> str:
    """Return the model and the devices of a request: `llama-3.1-8b on up to 8 x h100_sxm`."""
    match request:
        case ServingSearchRequest():
            devices = _space(request)
        case TrainingSearchRequest():
            devices = _clusters(request)
        case CapacityRequest():
            devices = _deployment(request.scenario)
        case TrainingScenario():
            devices = _cluster(request)
        case ServingScenario():
            workload = request.workload
            load = "a trace" if workload.trace_requests else f"{workload.rate_rps:g} requests/s"
            devices = f"{_deployment(request)}, {load}"
    scenario = (
        request if isinstance(request, ServingScenario | TrainingScenario) else request.scenario
    )
    return f"{scenario.model.name} on {devices}"


def describe_serving(scenario: ServingScenario) -> str:
    """Return what is served, on what, by which engine, under which traffic and targets."""
    parts = (
        _model(scenario),
        f"on {_deployment(scenario)}",
        f"engine {scenario.engine.profile}",
        _traffic(scenario.workload),
        _slo(scenario.slo),
    )
    return "; ".join(part for part in parts if part)


def describe_training(scenario: TrainingScenario) -> str:
    """Return what is trained, on what, by which framework, in which steps."""
    return "; ".join((_trained(scenario), f"on {_cluster(scenario)}", _step(scenario)))


def describe_run(request: TrainingRunRequest) -> str:
    """Return the question of a whole run: the step's, and how many tokens it takes."""
    tokens = (
        f"{request.num_epochs:g} epochs of {request.dataset}"
        if request.dataset
        else f"{request.num_tokens:.4g} tokens"
    )
    days = f"; to be done in {request.target_days:g} days" if request.target_days else ""
    return f"{describe_training(request.scenario)}; {tokens}{days}"


def describe_capacity(request: CapacityRequest) -> str:
    """Return the question of a search for the highest rate."""
    scenario = request.scenario
    asked = f"the highest rate of {_model(scenario)} on {_deployment(scenario)}"
    traffic = _traffic(scenario.workload, has_rate=False)
    parts = (asked, f"engine {scenario.engine.profile}", traffic, _targets(request.targets))
    return "; ".join(part for part in parts if part)


def describe_serving_search(request: ServingSearchRequest) -> str:
    """Return the question of a search for deployments: its space and its targets."""
    scenario, space = request.scenario, request.space
    engines = ", ".join(space.profiles or (scenario.engine.profile,))
    rate = f"carrying {request.target_rps:g} requests/s" if request.target_rps else ""
    parts = (
        f"the best deployment of {_model(scenario)} by {OBJECTIVE_WORDS[request.objective]}",
        f"on {_space(request)}",
        f"engine {engines}",
        _traffic(scenario.workload, has_rate=False),
        rate,
        _targets(request.targets),
    )
    return "; ".join(part for part in parts if part)


def describe_training_search(request: TrainingSearchRequest) -> str:
    """Return the question of a search for strategies: its clusters and its batch."""
    scenario, space = request.scenario, request.space
    batches = space.global_batch_sizes or (scenario.global_batch_size,)
    return "; ".join(
        (
            f"the best strategy of {_trained(scenario)} by {OBJECTIVE_WORDS[request.objective]}",
            f"on {_clusters(request)}",
            f"steps of {_join(batches)} samples of {scenario.sequence_length:,} tokens",
        )
    )


def _space(request: ServingSearchRequest) -> str:
    devices = ", ".join(request.space.devices or (request.scenario.device,))
    return f"up to {request.space.max_devices} x {devices}"


def _clusters(request: TrainingSearchRequest) -> str:
    scenario, space = request.scenario, request.space
    groups = [f"{_count(group.num_nodes, 'node')} of {group.device}" for group in space.node_groups]
    counts = space.num_devices or (scenario.layout.num_devices,)
    devices = ", ".join(space.devices or (scenario.device,))
    return " and ".join(groups) or f"{_join(counts)} x {devices}"


def _model(scenario: ServingScenario) -> str:
    scheme = scenario.quantization
    stored = "weights unquantised" if scheme == UNQUANTIZED else scheme and f"weights {scheme}"
    words = [f"{scenario.model.name} in {scenario.dtype.name.lower()}", stored]
    return ", ".join(word for word in words if word)


def _deployment(scenario: ServingScenario) -> str:
    if scenario.cluster is None:
        return f"{scenario.num_devices} x {scenario.device}{_layout(scenario.layout)}"
    return " and ".join(
        f"{_count(pool.num_replicas, 'replica')} of {pool.device or scenario.device}"
        f"{_layout(pool.layout_in(scenario.layout))} ({pool.role})"
        for pool in scenario.cluster.pools
    )


def _layout(layout: ParallelLayout) -> str:
    degrees = [f"{axis} {layout.degree(axis)}" for axis in _AXES if layout.degree(axis) > 1]
    degrees += ["attention_dp"] if layout.attention_dp else []
    return f" ({', '.join(degrees)})" if degrees else ""


def _traffic(workload: WorkloadSpec, *, has_rate: bool = True) -> str:
    if workload.trace_requests:
        return f"a trace of {len(workload.trace_requests):,} requests"
    rate = f" at {workload.rate_rps:g}/s ({workload.arrival})" if has_rate else ""
    return (
        f"{workload.num_requests:,} requests{rate}, {_length(workload.prefill)} prompt and"
        f" {_length(workload.decode)} answer tokens"
    )


def _length(length: LengthSpec) -> str:
    if length.kind == "fixed":
        return f"{length.mean:,}"
    if length.mean:
        return f"{length.kind} about {length.mean:,}"
    # Such as uniform lengths, which have bounds alone.
    return f"{length.minimum:,} to {length.maximum:,}" if length.maximum else length.kind


def _targets(targets: ServingTargets) -> str:
    limits = [_limit(limit) for limit in targets.limits]
    if targets.slo_attainment_ratio:
        limits.append(f"{targets.slo_attainment_ratio:.4g} of requests in their SLO")
    return f"targets {', '.join(limits)}" if limits else ""


def _limit(limit: LatencyLimit) -> str:
    return f"{describe_limit(limit.metric, limit.percentile)} at most {_time(limit.limit_ms)}"


def _slo(slo: Slo) -> str:
    limits = [(metric.label, getattr(slo, name)) for name, metric in LIMITED.items()]
    named = [f"{label} at most {_time(limit_ms)}" for label, limit_ms in limits if limit_ms > 0]
    return f"SLO {', '.join(named)}" if named else ""


def _time(time_ms: float) -> str:
    return f"{time_ms / MS_PER_S:g} s" if time_ms >= MS_PER_S else f"{time_ms:g} ms"


def _trained(scenario: TrainingScenario) -> str:
    dtype = scenario.dtype.name.lower()
    return f"training {scenario.model.name} in {dtype} (trainer {scenario.trainer.profile})"


def _cluster(scenario: TrainingScenario) -> str:
    devices = " and ".join(dict.fromkeys(scenario.stage_devices or (scenario.device,)))
    return f"{scenario.layout.num_devices:,} x {devices}{_layout(scenario.layout)}"


def _step(scenario: TrainingScenario) -> str:
    return (
        f"steps of {scenario.global_batch_size:,} samples of {scenario.sequence_length:,} tokens,"
        f" {scenario.micro_batch_size} at a time"
    )


def _count(num: int, name: str) -> str:
    return f"{num:,} {name}" if num == 1 else f"{num:,} {name}s"


def _join(counts: Iterable[int]) -> str:
    return ", ".join(f"{count:,}" for count in counts)
