"""The engines of a run by what they are: the pools of a cluster, or all alike."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from foretoken.domain.models.image import without_encoder
from foretoken.domain.requests.cluster import ReplicaPool
from foretoken.domain.requests.scenario import ServingScenario, replica_layout
from foretoken.domain.units import NS_PER_S
from foretoken.simulator.serving.record import PoolRecord, ReplicaSpan, ServingRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetPool:
    """Engines that are alike: what they did together, and the scenario of one of them alone.

    `spans` are those of the record by engine, each in order.
    """

    record: PoolRecord
    scenario: ServingScenario
    role: str = "aggregated"
    spans: Mapping[int, Sequence[ReplicaSpan]] = field(default_factory=dict)

    @property
    def engines(self) -> range:
        """The numbers of its engines, counted through all pools."""
        first = self.record.first_engine
        return range(first, first + self.record.num_engines)

    @property
    def num_stages(self) -> int:
        """Pipeline stages of an engine."""
        return self.scenario.layout.pp

    @property
    def num_devices(self) -> float:
        """Devices of an engine, with its part of those that engines share."""
        return self.scenario.num_devices / self.scenario.layout.dp

    def spans_of(self, engine: int, start_ns: int, end_ns: int) -> Sequence[ReplicaSpan]:
        """Return when an engine was held within a time; always where nothing is written down."""
        if not self.record.spans:
            return [ReplicaSpan(engine=engine, start_ns=start_ns, end_ns=end_ns)]
        within = (
            replace(span, start_ns=max(span.start_ns, start_ns), end_ns=min(span.end_ns, end_ns))
            for span in self.spans.get(engine, ())
        )
        return [span for span in within if span.end_ns > span.start_ns]


def make_fleet(scenario: ServingScenario, record: ServingRecord) -> tuple[FleetPool, ...]:
    """Return the engines of a run, pool by pool; one pool without a name where they are alike."""
    if scenario.cluster is None:
        whole = PoolRecord(
            name="",
            first_engine=0,
            num_engines=len(record.steps),
            num_kv_blocks=record.num_kv_blocks,
            block_size=record.block_size,
        )
        return (FleetPool(record=whole, scenario=scenario),)
    return tuple(
        FleetPool(record=kept, scenario=part, role=pool.role, spans=_by_engine(kept.spans))
        for kept, part, pool in zip(
            record.pools, pool_scenarios(scenario), scenario.cluster.engine_pools, strict=True
        )
    )


def _by_engine(spans: Sequence[ReplicaSpan]) -> Mapping[int, Sequence[ReplicaSpan]]:
    found: defaultdict[int, list[ReplicaSpan]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start_ns):
        found[span.engine].append(span)
    return found


def pool_scenarios(scenario: ServingScenario) -> tuple[ServingScenario, ...]:
    """Return the scenario of one replica of each pool; the scenario itself without a cluster.

    What a pool does not set is the scenario's; its topology only on the same device, and its power
    and price where the pool has none.
    """
    if scenario.cluster is None:
        return (scenario,)
    model, workload = scenario.model, scenario.workload
    if scenario.cluster.encoders is not None:
        # Images come as the embeddings that they are.
        model, workload = without_encoder(model), replace(workload, images=None)
    language = replace(scenario, model=model, workload=workload)
    return tuple(_part_of(language, pool) for pool in scenario.cluster.engine_pools)


def encoder_scenario(scenario: ServingScenario) -> ServingScenario | None:
    """Return the scenario of one replica that encodes images apart; None where engines do."""
    if scenario.cluster is None or scenario.cluster.encoders is None:
        return None
    return _part_of(replace(scenario, speculative=None), scenario.cluster.encoders)


def _part_of(scenario: ServingScenario, pool: ReplicaPool) -> ServingScenario:
    return replace(
        scenario,
        name=pool.name,
        device=pool.device or scenario.device,
        topology=pool.topology
        or (scenario.topology if pool.device in ("", scenario.device) else ""),
        layout=replica_layout(pool.layout_in(scenario.layout)),
        engine=pool.engine or scenario.engine,
        quantization=pool.quantization or scenario.quantization,
        device_usd_per_hour=pool.device_usd_per_hour or scenario.device_usd_per_hour,
        device_idle_w=pool.device_idle_w or scenario.device_idle_w,
        device_busy_w=pool.device_busy_w or scenario.device_busy_w,
        cluster=None,
    )


def seconds_of(spans: Sequence[ReplicaSpan], *, only_ready: bool = False) -> float:
    """Return how long an engine was held in all, or served."""
    total_ns = sum(span.end_ns - span.start_ns for span in spans if span.is_ready or not only_ready)
    return total_ns / NS_PER_S


def count_stages(fleet: Sequence[FleetPool]) -> list[int]:
    """Return the pipeline stages of each engine, counted through all pools."""
    return [pool.num_stages for pool in fleet for _ in pool.engines]
