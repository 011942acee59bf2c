"""The report of a simulation: what users of the deployment saw, and what it took."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.lowering.memory import ServingMemory
from foretoken.domain.metrics.serving import RunTotals, rates_of
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.results.report import (
    REFUSALS,
    REQUEST_OUTCOMES,
    Feasibility,
    ServingReport,
)
from foretoken.domain.units import NS_PER_MS, NS_PER_S
from foretoken.simulator.cluster.fleet import count_stages, encoder_scenario, make_fleet
from foretoken.simulator.cluster.fleet_run import FleetRun
from foretoken.simulator.serving.efficiency import (
    add_prices,
    add_step_time,
    add_use,
    describe_memory,
)
from foretoken.simulator.serving.metrics import (
    OF_EXECUTION,
    PlacedRuns,
    count_whole,
    execution_ns,
    instants_of,
    is_completed,
    join_steps,
    make_histogram,
    place_runs,
    summarize,
    summarize_latencies,
    summarize_over_time,
    summarize_requests,
    summarize_token_gaps,
)
from foretoken.simulator.serving.occupancy import count_outputs, find_interval, held_ns
from foretoken.simulator.serving.record import (
    RequestRecord,
    ServingRecord,
    StepRecord,
)
from foretoken.simulator.serving.service_level import (
    find_attaining,
    find_steady_window,
    report_classes,
)
from foretoken.simulator.serving.step_cost import StepAccount

_RATES = (
    *("request_throughput_rps", "input_throughput_tps", "output_throughput_tps", "goodput_rps"),
    *("request_throughput_rps_per_gpu", "input_throughput_tps_per_gpu"),
    "output_throughput_tps_per_gpu",
)


def build_report(
    report: ServingReport,
    scenario: ServingScenario,
    record: ServingRecord,
    accounts: Sequence[StepAccount],
    memories: Sequence[Sequence[ServingMemory]],
) -> ServingReport:
    """Return the report with everything the record tells, without its bulk columns.

    `report` brings what was known before the run: model version and configuration. `accounts` are
    those of each engine's steps, in the record's order; `memories` are of one device of each
    pipeline stage, by pool of the cluster or of the one kind of engines. `requests` and `series`
    stay empty; `serving/tables.py` makes them.
    """
    runs = place_runs(record)
    interval = find_interval(record)
    run = FleetRun(
        record=record,
        fleet=make_fleet(scenario, record),
        interval=interval,
        encoder=encoder_scenario(scenario),
    )
    limits = (*(item.slo for item in scenario.slo_classes), scenario.slo)
    attains = find_attaining(record.requests, runs, limits)
    totals = _count_totals(run, attains, scenario.num_devices)
    itl_ms, itl_ms_quantiles = summarize_token_gaps(runs)
    report = replace(
        report,
        **summarize_requests(record),
        itl_ms=itl_ms,
        itl_ms_quantiles=itl_ms_quantiles,
        num_requests=len(attains),
        num_refused_by_reason=_count_refused(record.requests),
        feasibility=judge_refusals(record, scenario),
        **rates_of(totals, "slo_attainment_ratio", "prefix_cache_hit_ratio"),
        classes=report_classes(
            scenario.slo_classes, scenario.slo, record.requests, attains, interval.duration_s
        ),
        memory=describe_memory(run.fleet, memories),
        num_devices=scenario.num_devices,
    )
    report = _add_counts(report, run)
    report = _add_steps(report, record)
    report = _add_execution(report, run, runs)
    report = add_step_time(report, accounts)
    if interval.duration_s == 0:
        return report
    report = replace(
        report,
        duration_s=interval.duration_s,
        steady=find_steady_window(record, interval),
        **rates_of(totals, *_RATES),
    )
    return add_prices(add_use(report, run, accounts, memories), run, totals)


def rate_of(arrival_ns: NDArray[np.integer]) -> float:
    """Return how many requests arrive in a second; 0 where all arrive at once."""
    span_ns = float(np.ptp(arrival_ns)) if len(arrival_ns) else 0.0
    return (len(arrival_ns) - 1) * NS_PER_S / span_ns if span_ns > 0 else 0.0


def _count_totals(run: FleetRun, attains: NDArray[np.bool_], num_devices: int) -> RunTotals:
    """Return what rates are made from; the devices are those held on average."""
    record, duration_s = run.record, run.interval.duration_s
    requests = record.requests
    done = is_completed(requests)
    held = float(num_devices)
    if record.pools and duration_s:
        held = sum(run.device_s(pool) for pool in run.fleet) / duration_s
        held += run.encoders.device_s / duration_s if run.encoders else 0.0
    return RunTotals(
        duration_s=duration_s,
        num_devices=held,
        num_requests=len(attains),
        num_completed=int(done.sum()),
        num_attaining=int(attains.sum()),
        num_input_tokens=float(np.asarray(requests.num_prefill_tokens)[done].sum()),
        num_output_tokens=float(np.asarray(requests.num_decode_tokens)[done].sum()),
        num_cached_tokens=int(np.sum(requests.num_cached_tokens)),
        num_computed_tokens=sum(int(np.sum(steps.prefill_tokens)) for steps in record.steps),
    )


def judge_refusals(record: ServingRecord, scenario: ServingScenario) -> Feasibility:
    """Return that a deployment which serves none of the requests that came cannot run, and why."""
    counts = _count_refused(record.requests)
    num_requests = len(record.requests.arrival_ns)
    if num_requests == 0 or sum(counts.values()) < num_requests:
        return Feasibility()
    limits = {"context_too_long": f" of {scenario.model.max_position:,} tokens"}
    reasons = [
        f"{REFUSALS[name]}{limits.get(name, '')} ({count:,} of {num_requests:,})"
        for name, count in counts.items()
    ]
    reason = f"it serves none of the requests: {'; '.join(reasons)}"
    return Feasibility(is_feasible=False, reason=reason)


def _count_refused(requests: RequestRecord) -> Mapping[str, int]:
    counts = {
        name: int(np.sum(np.asarray(requests.outcome) == REQUEST_OUTCOMES.index(name)))
        for name in REFUSALS
    }
    return {name: count for name, count in counts.items() if count}


def _add_counts(report: ServingReport, run: FleetRun) -> ServingReport:
    record = run.record
    requests = record.requests
    # Of several pools the first that computes answers: there they fill up.
    answering = next(pool for pool in run.fleet if pool.role != "prefill").record
    return replace(
        report,
        num_completed=int(is_completed(requests).sum()),
        num_serving_steps=sum(len(steps.end_ns) for steps in record.steps),
        num_preemptions=int(np.sum(requests.num_preemptions)),
        num_cached_tokens=int(np.sum(requests.num_cached_tokens)),
        num_loaded_tokens=int(np.sum(requests.num_loaded_tokens)),
        num_kv_blocks=answering.num_kv_blocks,
        kv_block_size=answering.block_size,
        offered_rps=rate_of(requests.arrival_ns),
        num_retries=0 if requests.num_retries is None else int(np.sum(requests.num_retries)),
    )


def _add_steps(report: ServingReport, record: ServingRecord) -> ServingReport:
    if report.num_serving_steps == 0:
        return report
    steps = record.steps
    sizes = count_whole(join_steps(steps, "num_decodes") + join_steps(steps, "num_prefills"))
    tokens = count_whole(join_steps(steps, "num_tokens"))
    held = np.concatenate([held_ns(engine) for engine in steps])
    step_ns = join_steps(steps, "end_ns") - join_steps(steps, "start_ns")
    batch_size = summarize(*sizes)
    return replace(
        report,
        batch_size=batch_size,
        batch_size_mean=batch_size.mean,
        batch_tokens=summarize(*tokens),
        batch_size_histogram=make_histogram(*sizes),
        batch_tokens_histogram=make_histogram(*tokens),
        step_ms=summarize(step_ns / NS_PER_MS),
        tokens_per_decode_mean=_tokens_per_decode(steps),
        running=summarize_over_time(join_steps(steps, "num_running"), held),
        waiting=summarize_over_time(join_steps(steps, "num_waiting"), held),
    )


def _tokens_per_decode(steps: Sequence[StepRecord]) -> float:
    """Return how many tokens a decoding sequence gets in a step: 1 where no engine speculates.

    Every token that a decoding sequence computes is sampled from, of a prompt only the last.
    """
    steps = [engine for engine in steps if engine.num_output_tokens is not None]
    num_decodes = sum(int(np.sum(engine.num_decodes)) for engine in steps)
    num_left = sum(
        int(np.sum(count_outputs(engine)) - np.sum(engine.num_rows) + np.sum(engine.num_tokens))
        - int(np.sum(engine.prefill_tokens))
        for engine in steps
    )
    return num_left / num_decodes if num_decodes else 1.0


def _add_execution(report: ServingReport, run: FleetRun, runs: PlacedRuns) -> ServingReport:
    requests = run.record.requests
    execution = execution_ns(run.record, runs, count_stages(run.fleet))
    found: dict[str, Any] = {**summarize_latencies(instants_of(requests, execution), OF_EXECUTION)}
    return replace(report, **found)
