"""A run by the pools of its engines: what each held for how long, and what it did."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.results.report import EngineReport, PoolReport, ReplicaPhase
from foretoken.domain.units import NS_PER_S
from foretoken.simulator.cluster.fleet import FleetPool, seconds_of
from foretoken.simulator.serving.metrics import join_steps
from foretoken.simulator.serving.occupancy import Interval
from foretoken.simulator.serving.record import ServingRecord

S_PER_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetRun:
    """A run, its engines pool by pool, and the time that rates count.

    `encoder` is the scenario of a replica that encodes images apart.
    """

    record: ServingRecord
    fleet: Sequence[FleetPool]
    interval: Interval
    encoder: ServingScenario | None = None

    @property
    def encoders(self) -> PoolReport | None:
        """What replicas that encode images apart did, as a pool; None where engines do."""
        done, replica, duration_s = self.record.encoders, self.encoder, self.interval.duration_s
        if done is None or replica is None:
            return None
        num_devices = done.num_replicas * replica.layout.tp
        held_s = done.num_replicas * duration_s
        device_s = num_devices * duration_s
        return PoolReport(
            name=done.name,
            role="encoder",
            device=replica.device,
            num_engines=done.num_replicas,
            num_devices=num_devices,
            running_engines_mean=float(done.num_replicas),
            num_requests=done.num_prompts,
            utilization_ratio=min(done.busy_ns / NS_PER_S / held_s, 1.0) if held_s else 0.0,
            sent_bytes_per_s=done.sent_bytes / duration_s if duration_s else 0.0,
            port_utilization_ratio=(
                min(done.port_busy_ns / NS_PER_S / held_s, 1.0) if held_s else 0.0
            ),
            device_s=device_s,
            cost_usd=replica.device_usd_per_hour * device_s / S_PER_HOUR,
        )

    def held_s(self, pool: FleetPool, engine: int) -> float:
        """Return how long the devices of an engine were held."""
        if not pool.record.spans:
            return self.interval.duration_s
        return seconds_of(pool.spans_of(engine, self.interval.start_ns, self.interval.end_ns))

    def device_s(self, pool: FleetPool) -> float:
        """Return how long the devices of a pool were held, all together."""
        return sum(self.held_s(pool, engine) for engine in pool.engines) * pool.num_devices

    def running_s(self, pool: FleetPool) -> float:
        """Return how long the engines of a pool served, all together."""
        bounds_ns = (self.interval.start_ns, self.interval.end_ns)
        return sum(
            seconds_of(pool.spans_of(engine, *bounds_ns), only_ready=True)
            for engine in pool.engines
        )

    def cost_usd(self, pool: FleetPool) -> float:
        """Return the price of the devices of a pool."""
        return pool.scenario.device_usd_per_hour * self.device_s(pool) / S_PER_HOUR

    def phases_of(self, pool: FleetPool, engine: int) -> tuple[ReplicaPhase, ...]:
        """Return what an engine was held for, from the start of the run to its end.

        What does not serve starts, or starts again where it served the instant before.
        """
        phases: list[ReplicaPhase] = []
        for span in pool.spans_of(engine, 0, self.interval.end_ns):
            start_s, end_s = span.start_ns / NS_PER_S, span.end_ns / NS_PER_S
            before = phases[-1] if phases and phases[-1].end_s == start_s else None
            state = "running" if span.is_ready else "starting"
            if not span.is_ready and before is not None:
                state = "restarting"
            if before is not None and before.state == state == "running":
                phases[-1] = replace(before, end_s=end_s)
            else:
                phases.append(ReplicaPhase(state=state, start_s=start_s, end_s=end_s))
        return tuple(phases)

    def is_on(self, engines: Sequence[int]) -> NDArray[np.bool_]:
        """Return which requests had their prompt or their answer computed on some engines."""
        requests = self.record.requests
        chosen = np.isin(np.asarray(requests.engine), engines)
        if requests.prefill_engine is not None:
            chosen |= np.isin(np.asarray(requests.prefill_engine), engines)
        return chosen

    def count_preemptions(self, engine: int) -> int:
        """Return how often requests lost their blocks on an engine."""
        record = self.record
        if record.pools:
            return int(np.sum(record.steps[engine].num_preempted))
        is_here = np.asarray(record.requests.engine) == engine
        return int(np.asarray(record.requests.num_preemptions)[is_here].sum())


def pool_report(run: FleetRun, pool: FleetPool, engines: Sequence[EngineReport]) -> PoolReport:
    """Return what the engines of a pool did; `engines` are the reports of all there are."""
    record, duration_s = pool.record, run.interval.duration_s
    mine = [engines[engine] for engine in pool.engines]
    steps = [run.record.steps[engine] for engine in pool.engines]
    sizes = join_steps(steps, "num_decodes") + join_steps(steps, "num_prefills")
    held_s = [run.held_s(pool, engine) for engine in pool.engines]
    # Engines in lock step are one replica, whose devices count as one port.
    ports_held_s = sum(held_s) / pool.scenario.layout.dp
    return PoolReport(
        name=record.name,
        role=pool.role,
        device=pool.scenario.device,
        num_engines=record.num_engines,
        num_devices=round(record.num_engines * pool.num_devices),
        running_engines_mean=run.running_s(pool) / duration_s,
        num_requests=int(run.is_on(pool.engines).sum()),
        num_failures=record.num_failures,
        num_scale_ups=record.num_scale_ups,
        num_scale_downs=record.num_scale_downs,
        **mean_use(run, [pool], mine),
        kv_utilization_ratio_mean=mean_of([e.kv_utilization_ratio_mean for e in mine], held_s),
        batch_size_mean=float(sizes.mean()) if len(sizes) else 0.0,
        sent_bytes_per_s=record.sent_bytes / duration_s,
        port_utilization_ratio=(
            record.port_busy_ns / NS_PER_S / ports_held_s if ports_held_s else 0.0
        ),
        num_adapter_loads=record.num_adapter_loads,
        device_s=run.device_s(pool),
        cost_usd=run.cost_usd(pool),
        num_kv_blocks=record.num_kv_blocks,
        kv_block_size=record.block_size,
    )


def mean_use(
    run: FleetRun, pools: Sequence[FleetPool], engines: Sequence[EngineReport]
) -> dict[str, float]:
    """Return the mean use of the devices of some pools, whose engines' reports are given."""
    device_s = [
        run.held_s(pool, engine) * pool.num_devices / pool.num_stages
        for pool in pools
        for engine in pool.engines
        for _ in range(pool.num_stages)
    ]
    stages = [stage for engine in engines for stage in engine.stages]
    return {
        name: mean_of([getattr(stage, name) for stage in stages], device_s)
        for name in ("utilization_ratio", "mfu_ratio", "mbu_ratio")
    }


def mean_of(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the mean of values by weight; the plain one where all weigh the same, 0 of none."""
    if len(set(weights)) <= 1:
        return sum(values) / len(values) if values else 0.0
    products = (value * weight for value, weight in zip(values, weights, strict=True))
    return sum(products) / sum(weights)
