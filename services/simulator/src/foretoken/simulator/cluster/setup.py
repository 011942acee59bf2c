"""From the specification of a cluster to the pools a simulation runs, and their routing."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from foretoken.domain.errors import (
    FieldViolation,
    InvalidRequestError,
    UnknownTopologyError,
    find_violations,
)
from foretoken.domain.frameworks.engine import EngineProfile
from foretoken.domain.hardware.topology import Link, topology_of_device
from foretoken.domain.lowering.memory import ServingMemory
from foretoken.domain.models.stack import stack_of
from foretoken.domain.requests.cluster import (
    AutoscalingSpec,
    ClusterSpec,
    FailureSpec,
    KvTransferSpec,
    ReplicaPool,
    RoutingSpec,
)
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario, replica_layout
from foretoken.domain.units import NS_PER_US
from foretoken.simulator.cluster.encoding import EncoderSetup, set_up_encoders
from foretoken.simulator.cluster.engine_pool import PoolRole
from foretoken.simulator.cluster.fleet import encoder_scenario, pool_scenarios
from foretoken.simulator.cost.latency_surfaces import engine_layout, serving_options
from foretoken.simulator.rank import stage_ranks
from foretoken.simulator.serving.compiled_kernels import find_kernels
from foretoken.simulator.serving.draft import follow_speculation
from foretoken.simulator.serving.feasibility import count_kv_blocks, place_tiers, whole_memory
from foretoken.simulator.serving.lora import adapter_load_ns
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.speculation import speculation_of


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSetup:
    """LoRA adapters of a replica: so many in device memory at once, and how long one loads."""

    max_loaded: int
    load_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSetup:
    """Replicas that are alike, `num_replicas` of which run at first.

    `engines.num_engines` are all there may ever be. A replica is `engines_per_replica` of them, one
    or several in lock step, over which `engines.router` spreads its requests. All devices of a
    replica together send or receive `port_bytes_per_s` of KV caches. With `has_retries` a request
    may come again, for what served it failed.
    """

    name: str
    engines: DeploymentSetup
    role: PoolRole = PoolRole.AGGREGATED
    num_replicas: int = 1
    engines_per_replica: int = 1
    port_bytes_per_s: float = float("inf")
    autoscaling: AutoscalingSpec | None = None
    adapters: AdapterSetup | None = None
    has_retries: bool = True

    @property
    def num_replicas_max(self) -> int:
        """Replicas there may ever be."""
        return self.engines.num_engines // self.engines_per_replica


@dataclass(frozen=True, kw_only=True, slots=True)
class KvTransferSetup:
    """How a prompt's KV cache moves: its bytes in the whole model, and `latency_ns` more.

    Every token has `bytes_per_token`, the last `window_tokens` of a prompt also those of layers
    with a sliding window, `window_bytes_per_token`, and a prompt the `state_bytes` of recurrent
    layers.
    With `overlaps_prefill` what could be sent while the prompt was computed need not be any more;
    the last of `num_layers` always is.
    """

    bytes_per_token: float = 0.0
    latency_ns: int = 0
    overlaps_prefill: bool = False
    num_layers: int = 1
    window_bytes_per_token: float = 0.0
    window_tokens: int = 0
    state_bytes: float = 0.0

    def bytes_of(self, num_tokens: int) -> float:
        """Return the bytes of a prompt's KV cache."""
        num_in_window = min(num_tokens, self.window_tokens)
        token_bytes = num_tokens * self.bytes_per_token
        return token_bytes + num_in_window * self.window_bytes_per_token + self.state_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSetup:
    """Pools, all aggregated or some for prompts and some for answers, and what happens to them.

    `routing` spreads requests that arrive, `decode_routing` those whose prompt is computed; its
    `max_queued` has no meaning. All that is drawn comes from the `seed`.
    """

    pools: Sequence[PoolSetup]
    routing: RoutingSpec = field(default_factory=RoutingSpec)
    decode_routing: RoutingSpec = field(default_factory=RoutingSpec)
    kv_transfer: KvTransferSetup = field(default_factory=KvTransferSetup)
    failures: FailureSpec | None = None
    encoders: EncoderSetup | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedPool:
    """One replica of a pool: its scenario, engine, and the memory of a rank of every stage."""

    scenario: ServingScenario
    engine: EngineProfile
    memories: Sequence[ServingMemory]


def as_cluster(scenario: ServingScenario) -> ServingScenario:
    """Return a deployment without a cluster as one of one pool: what the replicas do is the same.

    Its data-parallel replicas are those of the pool, unless they share experts.
    """
    layout = replica_layout(scenario.layout)
    pool = ReplicaPool(name="replicas", num_replicas=scenario.layout.dp // layout.dp, layout=layout)
    return replace(scenario, layout=layout, cluster=ClusterSpec(pools=(pool,)))


def check_cluster(scenario: ServingScenario) -> None:
    """Refuse a cluster whose pools cannot be simulated, or not together.

    Raises:
        InvalidRequestError: the message names the pool and says what to change.
        UnknownPluginError: no such engine.

    """
    cluster = scenario.cluster
    if cluster is None:
        return
    violations = [
        violation
        for pool, part in zip(cluster.engine_pools, pool_scenarios(scenario), strict=True)
        for violation in _check_pool(pool, part, pool.layout or scenario.layout)
    ]
    if cluster.is_disaggregated:
        violations += _check_transfer(scenario, cluster)
    if violations:
        raise InvalidRequestError.of_violations(violations, "cluster")


def set_up_cluster(scenario: ServingScenario, pools: Sequence[ResolvedPool]) -> ClusterSetup:
    """Return the pools that run; `pools` are those of the scenario's cluster, which fit.

    Raises:
        InvalidRequestError: nothing says how fast a KV cache moves between two pools.

    """
    cluster = scenario.cluster
    if cluster is None:
        raise InvalidRequestError.of_field("cluster", "must be set")
    links = _links(cluster, [pool.scenario for pool in pools])
    whole = whole_memory(pools[0].scenario)
    return ClusterSetup(
        pools=tuple(
            replace(_set_up_pool(spec, pool, link), has_retries=cluster.failures is not None)
            for spec, pool, link in zip(cluster.engine_pools, pools, links, strict=True)
        ),
        routing=cluster.routing,
        decode_routing=cluster.decode_routing,
        kv_transfer=KvTransferSetup(
            bytes_per_token=whole.kv_bytes_per_token,
            window_bytes_per_token=whole.window_bytes_per_token,
            window_tokens=stack_of(scenario.model).window,
            state_bytes=whole.state_bytes_per_request,
            latency_ns=round(max((link.latency_us for link in links), default=0.0) * NS_PER_US),
            overlaps_prefill=cluster.kv_transfer.overlaps_prefill,
            num_layers=scenario.model.num_layers,
        ),
        failures=cluster.failures,
        encoders=_set_up_encoders(scenario, cluster),
        seed=scenario.seed,
    )


def _set_up_encoders(scenario: ServingScenario, cluster: ClusterSpec) -> EncoderSetup | None:
    part = encoder_scenario(scenario)
    if part is None or cluster.encoders is None:
        return None
    link = _link(cluster.kv_transfer, part)
    return set_up_encoders(part, cluster.encoders.num_replicas, link)


def set_up_engines(
    scenario: ServingScenario, engine: EngineProfile, memories: Sequence[ServingMemory]
) -> DeploymentSetup:
    """Return engines that are alike; `memories` are of one rank of every pipeline stage of one.

    Each rank moves its own part of the KV cache. On several stages a request is in one batch at a
    time, asynchronous scheduling or not: the first stage needs the token that leaves the last.
    """
    kept_bytes = max(memory.kv_bytes_per_token for memory in memories)
    engine = follow_speculation(engine, scenario.speculative)
    if scenario.layout.pp > 1:
        engine = replace(engine, has_async_scheduling=False)
    # An adapter is loaded for the engine that a request was sent to.
    if scenario.lora is not None:
        engine = replace(engine, deals_requests=False)
    return DeploymentSetup(
        profile=engine,
        num_kv_blocks=count_kv_blocks(scenario, engine, memories),
        max_context=scenario.model.max_position,
        kv_bytes_per_token=round(kept_bytes),
        kv_tiers=place_tiers(scenario, kept_bytes),
        speculation=speculation_of(scenario.speculative, scenario.seed),
        kernels=find_kernels(scenario, engine),
    )


def _set_up_pool(spec: ReplicaPool, pool: ResolvedPool, link: Link) -> PoolSetup:
    layout = pool.scenario.layout
    most = spec.num_replicas
    if spec.autoscaling is not None:
        most = spec.autoscaling.max_replicas
    engines = set_up_engines(pool.scenario, pool.engine, pool.memories)
    held_bytes = max(_token_bytes(memory) for memory in pool.memories)
    # What the fullest rank holds goes through one port, so this much of the whole does in a second.
    port_bytes_per_s = link.bandwidth_bytes_per_s
    if held_bytes:
        port_bytes_per_s *= _token_bytes(whole_memory(pool.scenario)) / held_bytes
    return PoolSetup(
        name=spec.name,
        role=PoolRole(spec.role),
        engines=replace(
            engines,
            num_engines=most * layout.dp,
            is_lock_step=layout.dp > 1,
            router="least_loaded",
        ),
        num_replicas=spec.num_replicas,
        engines_per_replica=layout.dp,
        port_bytes_per_s=port_bytes_per_s,
        autoscaling=spec.autoscaling,
        adapters=_set_up_adapters(pool.scenario),
    )


def _set_up_adapters(scenario: ServingScenario) -> AdapterSetup | None:
    lora = scenario.lora
    if lora is None:
        return None
    ranks = stage_ranks(scenario.model, engine_layout(scenario), scenario.device, scenario.topology)
    load_ns = adapter_load_ns(lora, serving_options(scenario), ranks)
    return AdapterSetup(max_loaded=lora.max_loaded, load_ns=load_ns)


def _check_pool(
    pool: ReplicaPool, part: ServingScenario, layout: ParallelLayout
) -> list[FieldViolation]:
    scaling = pool.autoscaling
    fits = scaling is None or scaling.min_replicas <= pool.num_replicas <= scaling.max_replicas
    checks = {
        "layout.dp": (
            layout.dp == 1 or layout.shares_experts,
            "must be 1 unless engines share experts (ep or attention_dp): see num_replicas",
        ),
        "engine.kv_tiers": (
            not part.engine.kv_tiers
            or (pool.role != "decode" and part.resolve_engine().preemption != "swap"),
            "must be none where answers are decoded, nor under engines that swap",
        ),
        "num_replicas": (
            fits,
            "must be between autoscaling.min_replicas and autoscaling.max_replicas",
        ),
    }
    return find_violations(checks, f"pools.{pool.name}.")


def _check_transfer(scenario: ServingScenario, cluster: ClusterSpec) -> list[FieldViolation]:
    """Return why a KV cache that one pool wrote cannot be read in another: its blocks.

    Its number format is the scenario's, so that all pools have it.
    """
    blocks = [part.resolve_engine().block_size for part in pool_scenarios(scenario)]
    return [
        FieldViolation(
            f"pools.{pool.name}.engine.block_size",
            f"{block} and the {blocks[0]} of {cluster.engine_pools[0].name} must be multiples of"
            " each other",
        )
        for pool, block in zip(cluster.engine_pools, blocks, strict=True)
        if max(block, blocks[0]) % min(block, blocks[0])
    ]


def _token_bytes(memory: ServingMemory) -> float:
    return memory.kv_bytes_per_token + memory.window_bytes_per_token


def _links(cluster: ClusterSpec, parts: Sequence[ServingScenario]) -> list[Link]:
    """Return what a KV cache leaves or reaches each pool over; of no meaning without transfers."""
    if not cluster.is_disaggregated:
        return [Link(bandwidth_bytes_per_s=float("inf"), latency_us=0.0) for _ in parts]
    return [_link(cluster.kv_transfer, part) for part in parts]


def _link(spec: KvTransferSpec, part: ServingScenario) -> Link:
    if spec.bandwidth_bytes_per_s and spec.latency_us:
        return Link(bandwidth_bytes_per_s=spec.bandwidth_bytes_per_s, latency_us=spec.latency_us)
    try:
        topology = topology_of_device(part.device, part.topology)
    except UnknownTopologyError as err:
        if spec.bandwidth_bytes_per_s:
            return Link(bandwidth_bytes_per_s=spec.bandwidth_bytes_per_s, latency_us=0.0)
        raise InvalidRequestError.of_field(
            "cluster.kv_transfer.bandwidth_bytes_per_s",
            f"must be set: no topology of {part.device} says how fast its nodes are linked",
        ) from err
    return Link(
        bandwidth_bytes_per_s=spec.bandwidth_bytes_per_s or topology.port_bytes_per_s,
        latency_us=spec.latency_us or topology.inter_node.latency_us,
    )
