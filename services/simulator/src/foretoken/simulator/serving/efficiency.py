"""How much of the devices a run used, and what that takes in energy and money."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from foretoken.domain.memory import ServingMemory
from foretoken.domain.report import EngineReport, ServingReport, ServingStageMemory, StageReport
from foretoken.domain.scenario import ServingScenario
from foretoken.domain.units import NS_PER_S
from foretoken.simulator.serving.occupancy import held_ns
from foretoken.simulator.serving.record import ServingRecord
from foretoken.simulator.serving.work import NecessaryWork, measure_work
from foretoken.simulator.step_cost import StepAccount

_S_PER_HOUR = 3600.0
_MILLION = 1e6


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
    scenario: ServingScenario,
    record: ServingRecord,
    accounts: Sequence[StepAccount],
    memories: Sequence[ServingMemory],
) -> ServingReport:
    """Return the report with the use of devices and KV cache; its duration must be known."""
    work = measure_work(scenario, record, memories)
    engines = tuple(
        _engine_report(report.duration_s, record, accounts[engine], work, engine)
        for engine in range(len(record.steps))
    )
    if not engines:
        return report
    stages = [stage for engine in engines for stage in engine.stages]
    return replace(
        report,
        engines=engines,
        utilization_ratio=_mean([stage.utilization_ratio for stage in stages]),
        mfu_ratio=_mean([stage.mfu_ratio for stage in stages]),
        mbu_ratio=_mean([stage.mbu_ratio for stage in stages]),
        kv_utilization_ratio_mean=_mean([e.kv_utilization_ratio_mean for e in engines]),
        kv_utilization_ratio_max=max(e.kv_utilization_ratio_max for e in engines),
    )


def add_prices(report: ServingReport, scenario: ServingScenario) -> ServingReport:
    """Return the report with energy and cost, where the scenario gives power and price.

    A device takes `device_busy_w` while its stage is busy and `device_idle_w` otherwise.
    """
    device_s = report.duration_s * report.num_devices
    output_tokens = report.output_throughput_tps * report.duration_s
    all_tokens = output_tokens + report.input_throughput_tps * report.duration_s
    power_w = mean_power_w(scenario, report.utilization_ratio)
    energy_j = power_w * report.duration_s
    cost_usd = scenario.device_usd_per_hour * device_s / _S_PER_HOUR
    return replace(
        report,
        energy_wh=energy_j / _S_PER_HOUR,
        energy_j_per_output_token=energy_j / output_tokens if output_tokens else 0.0,
        power_w_mean=power_w,
        cost_usd=cost_usd,
        usd_per_million_output_tokens=cost_usd / output_tokens * _MILLION if output_tokens else 0.0,
        usd_per_million_tokens=cost_usd / all_tokens * _MILLION if all_tokens else 0.0,
    )


def mean_power_w(scenario: ServingScenario, busy_ratio: float) -> float:
    """Return the power of all devices that are busy for a share of the time, in W."""
    idle_w, busy_w = scenario.device_idle_w, scenario.device_busy_w
    return scenario.layout.num_devices * (idle_w + (busy_w - idle_w) * busy_ratio)


def describe_memory(
    record: ServingRecord, memories: Sequence[ServingMemory]
) -> tuple[ServingStageMemory, ...]:
    """Return what occupies a device of each stage; the KV cache is the one the run had."""
    num_tokens = record.num_kv_blocks * record.block_size
    return tuple(
        ServingStageMemory(
            stage=stage,
            device_bytes=memory.device_bytes,
            usable_bytes=memory.usable_bytes,
            weights_bytes=memory.weights_bytes,
            activations_bytes=memory.activations_bytes,
            graphs_bytes=memory.graphs_bytes,
            reserved_bytes=memory.reserved_bytes,
            kv_bytes=memory.kv_bytes_per_token * num_tokens + memory.window_bytes,
        )
        for stage, memory in enumerate(memories)
    )


def _engine_report(
    duration_s: float,
    record: ServingRecord,
    account: StepAccount,
    work: NecessaryWork,
    engine: int,
) -> EngineReport:
    steps = record.steps[engine]
    num_blocks = max(record.num_kv_blocks, 1)
    used = np.asarray(steps.num_used_blocks)
    block_s = float(used @ held_ns(steps)) / NS_PER_S
    is_here = np.asarray(record.requests.engine) == engine
    return EngineReport(
        engine=engine,
        num_requests=int(is_here.sum()),
        num_serving_steps=len(used),
        num_preemptions=int(np.asarray(record.requests.num_preemptions)[is_here].sum()),
        kv_utilization_ratio_mean=block_s / (duration_s * num_blocks),
        kv_utilization_ratio_max=float(used.max(initial=0)) / num_blocks,
        stages=tuple(
            StageReport(
                stage=stage,
                utilization_ratio=account.stage_busy_s[stage] / duration_s,
                mfu_ratio=float(work.flops_s[engine, stage]) / duration_s,
                mbu_ratio=float(work.bytes_s[engine, stage]) / duration_s,
            )
            for stage in range(work.flops_s.shape[1])
        ),
    )


def _sum_by_key(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
