"""How much of the devices a run used, and what that takes in energy and money."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from foretoken.domain.lowering.memory import ServingMemory
from foretoken.domain.metrics.serving import RunTotals, rates_of
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.results.report import (
    EngineReport,
    ServingReport,
    ServingStageMemory,
    StageReport,
)
from foretoken.domain.units import NS_PER_S
from foretoken.simulator.cluster.fleet import FleetPool
from foretoken.simulator.cluster.fleet_run import (
    FleetRun,
    mean_of,
    mean_use,
    pool_report,
)
from foretoken.simulator.serving.occupancy import held_ns
from foretoken.simulator.serving.step_cost import StepAccount
from foretoken.simulator.serving.work import NecessaryWork, measure_work

_PRICES = (
    *("energy_wh", "energy_j_per_output_token", "power_w_mean"),
    *("usd_per_million_output_tokens", "usd_per_million_tokens"),
)


def add_step_time(report: ServingReport, accounts: Sequence[StepAccount]) -> ServingReport:
    """Return the report with where the busy time went, what it rests on and how sure it is."""
    busy_s = sum(account.busy_s for account in accounts)
    if busy_s == 0:
        return report
    return replace(
        report,
        step_time_s_by_group=_sum_by_key([account.time_s_by_group for account in accounts]),
        step_time_ratio_by_provenance={
            name: time_s / busy_s
            for name, time_s in _sum_by_key([a.time_s_by_provenance for a in accounts]).items()
        },
        step_time_low_ratio=sum(account.low_s for account in accounts) / busy_s,
        step_time_high_ratio=sum(account.high_s for account in accounts) / busy_s,
    )


def add_use(
    report: ServingReport,
    run: FleetRun,
    accounts: Sequence[StepAccount],
    memories: Sequence[Sequence[ServingMemory]],
) -> ServingReport:
    """Return the report with the use of devices and KV cache; its duration must be known.

    `memories` are of one device of each stage, by pool. Means over engines weigh each by what it
    held for how long.
    """
    work = measure_work(run.record, run.fleet, memories)
    engines = tuple(
        _engine_report(run, pool, accounts[engine], work, engine)
        for pool in run.fleet
        for engine in pool.engines
    )
    if not engines:
        return report
    pools = tuple(pool_report(run, pool, engines) for pool in run.fleet)
    block_s = [
        run.held_s(pool, engine) * max(pool.record.num_kv_blocks, 1)
        for pool in run.fleet
        for engine in pool.engines
    ]
    use: dict[str, Any] = {**mean_use(run, run.fleet, engines)}
    return replace(
        report,
        engines=engines,
        pools=pools if run.record.pools else (),
        **use,
        kv_utilization_ratio_mean=mean_of([e.kv_utilization_ratio_mean for e in engines], block_s),
        kv_utilization_ratio_max=max(e.kv_utilization_ratio_max for e in engines),
    )


def add_prices(report: ServingReport, run: FleetRun, totals: RunTotals) -> ServingReport:
    """Return the report with energy and cost, where the scenario gives power and price.

    A device takes `device_busy_w` while its stage is busy and `device_idle_w` for the rest of the
    time that it is held, which is what it costs.
    """
    energy_j = sum(
        run.device_s(pool) * _power_w(pool.scenario, busy_ratio)
        for pool, busy_ratio in zip(run.fleet, _busy_ratios(report, run), strict=True)
    )
    cost_usd = sum(run.cost_usd(pool) for pool in run.fleet)
    totals = replace(totals, energy_j=energy_j, cost_usd=cost_usd)
    return replace(report, cost_usd=cost_usd, **rates_of(totals, *_PRICES))


def describe_memory(
    fleet: Sequence[FleetPool], memories: Sequence[Sequence[ServingMemory]]
) -> tuple[ServingStageMemory, ...]:
    """Return what occupies a device of each stage; the KV cache is the one the run had."""
    return tuple(
        ServingStageMemory(
            stage=stage,
            device_bytes=memory.device_bytes,
            usable_bytes=memory.usable_bytes,
            weights_bytes=memory.weights_bytes,
            activations_bytes=memory.activations_bytes,
            graphs_bytes=memory.graphs_bytes,
            reserved_bytes=memory.reserved_bytes,
            kv_bytes=memory.kv_bytes_per_token * pool.record.num_kv_blocks * pool.record.block_size
            + memory.window_bytes,
            pool=pool.record.name,
        )
        for pool, stages in zip(fleet, memories, strict=True)
        for stage, memory in enumerate(stages)
    )


def _busy_ratios(report: ServingReport, run: FleetRun) -> Sequence[float]:
    if report.pools:
        return [pool.utilization_ratio for pool in report.pools]
    return [report.utilization_ratio] * len(run.fleet)


def _power_w(scenario: ServingScenario, busy_ratio: float) -> float:
    """Return the power of a device that is busy for a share of the time, in W."""
    idle_w, busy_w = scenario.device_idle_w, scenario.device_busy_w
    return idle_w + (busy_w - idle_w) * busy_ratio


def _engine_report(
    run: FleetRun, pool: FleetPool, account: StepAccount, work: NecessaryWork, engine: int
) -> EngineReport:
    steps = run.record.steps[engine]
    held_s = run.held_s(pool, engine)
    num_blocks = max(pool.record.num_kv_blocks, 1)
    used = np.asarray(steps.num_used_blocks)
    block_s = float(used @ held_ns(steps)) / NS_PER_S
    report = EngineReport(
        engine=engine,
        num_requests=int(run.is_on([engine]).sum()),
        num_serving_steps=len(used),
        num_preemptions=run.count_preemptions(engine),
        kv_utilization_ratio_mean=_share(block_s, held_s * num_blocks),
        kv_utilization_ratio_max=float(used.max(initial=0)) / num_blocks,
        stages=tuple(
            StageReport(
                stage=stage,
                utilization_ratio=_share(account.stage_busy_s[stage], held_s),
                mfu_ratio=_share(float(flops_s), held_s),
                mbu_ratio=_share(float(bytes_s), held_s),
            )
            for stage, (flops_s, bytes_s) in enumerate(
                zip(work.flops_s[engine], work.bytes_s[engine], strict=True)
            )
        ),
    )
    if not run.record.pools:
        return report
    phases = run.phases_of(pool, engine)
    return replace(
        report,
        pool=pool.record.name,
        num_failures=sum(phase.state == "restarting" for phase in phases),
        running_s=sum(p.end_s - p.start_s for p in phases if p.state == "running"),
        phases=phases,
    )


def _share(used: float, held: float) -> float:
    return used / held if held else 0.0


def _sum_by_key(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}
