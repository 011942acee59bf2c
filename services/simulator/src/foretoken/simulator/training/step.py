"""Simulate one optimizer step: what each stage runs, for how long, and what it must hold."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.lowering.graph import RankContext
from foretoken.domain.metrics.training import (
    StepTotals,
    hfu_ratio,
    mfu_ratio,
    tokens_per_s,
    tokens_per_s_per_gpu,
)
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.report import Feasibility, Percentiles
from foretoken.domain.results.training_report import TrainingReport
from foretoken.domain.units import US_PER_MS
from foretoken.jobs.runner import JobProgress
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.rank import chunk_ranks
from foretoken.simulator.software_note import list_trainer_notes
from foretoken.simulator.steps.error_parts import bound_cases
from foretoken.simulator.steps.pipelines.schedule import (
    RankOrder,
    find_schedule,
    order_step,
    with_chunks,
)
from foretoken.simulator.steps.stage_hardware import stage_devices
from foretoken.simulator.steps.stage_operators import StepOperators, lower_step
from foretoken.simulator.steps.trainer_limit import check_trainer
from foretoken.simulator.training.accounting import account_ranks, in_ms, sum_by_provenance
from foretoken.simulator.training.components import list_components
from foretoken.simulator.training.composition import ComposedStep, StepComposition, StepRules
from foretoken.simulator.training.efficiency import (
    count_recomputed_flops,
    count_step_flops,
    peak_flops_per_s,
)
from foretoken.simulator.training.memory.advice import judge_memory
from foretoken.simulator.training.memory.measure import measure_memory
from foretoken.simulator.training.memory_plan import measure_stages
from foretoken.simulator.training.module_profile import MeasuredPrices, measure_nodes
from foretoken.simulator.training.operator_prices import OperatorPrices, fetch_stage_prices
from foretoken.simulator.training.rank_traffic import measure_traffic
from foretoken.simulator.training.scenario_checks import check_chunks, check_scenario
from foretoken.simulator.training.timeline import draw_spans
from foretoken.simulator.training.variability import (
    ESTIMATE,
    NUM_DRAWS,
    RAW,
    Spread,
    StepColumns,
    pick_median,
    summarize,
)


def simulate_training(
    scenario: TrainingScenario, predictor: LatencySource, progress: JobProgress | None
) -> TrainingReport:
    """Return time, memory and efficiency of one optimizer step.

    A layout that does not fit the model or the device's memory is a result with its reason; in the
    second case the other figures are there.

    Raises:
        InvalidRequestError: the batch does not divide, rules contradict each other, or the trainer
            cannot do what is asked.
        UnknownPluginError: no pipeline schedule or trainer of that name.

    """
    schedule = find_schedule(scenario.pipeline_schedule)
    check_scenario(scenario)
    check_trainer(scenario)
    report = TrainingReport(
        num_devices=scenario.layout.num_devices,
        num_micro_batches=scenario.num_micro_batches,
        device_memory_bytes=min(find_device(name).memory_bytes for name in stage_devices(scenario)),
        scenario_json=json.dumps(schema.encode(scenario)),
    )
    scenario = with_chunks(scenario, schedule)
    try:
        ranks = chunk_ranks(scenario)
        check_chunks(ranks, scenario)
    except InvalidRequestError as err:
        return replace(report, feasibility=Feasibility(is_feasible=False, reason=err.message))
    orders = order_step(scenario, schedule)
    operators, prices = _price_step(scenario, ranks, orders, predictor, progress)
    rules = StepRules.of_scenario(scenario, schedule, orders)
    composition = StepComposition(
        operators, prices, rules, lambda: _update(progress, 0.7, "run the pipeline")
    )
    _update(progress, 0.7, "run the pipeline")
    composed, spread = _compose(composition, Spread.of_scenario(scenario))
    report = replace(
        _with_times(report, scenario, composition, composed),
        step_spread_ms=spread,
        traffic=measure_traffic(operators, orders, scenario),
        model_version=prices.model_version,
        notes=(
            *list_trainer_notes(scenario),
            *_price_notes(operators, prices),
            *_format_notes(scenario),
            *_spread_notes(scenario),
        ),
    )
    _update(progress, 0.9, "follow the memory")
    return _with_memory(report, scenario, orders)


def share_step_time(scenario: TrainingScenario, predictor: LatencySource) -> Mapping[str, float]:
    """Return the shares of a step's operators by `Provenance` in lower case, without composing it.

    They are those of the stage whose operators take longest, hidden communication included; what
    the pipeline sends is left out. The scenario must fit the model.

    Raises:
        InvalidRequestError: the batch does not divide, or the layout does not fit.

    """
    schedule = find_schedule(scenario.pipeline_schedule)
    scenario = with_chunks(scenario, schedule)
    orders = order_step(scenario, schedule)
    operators, prices = _price_step(scenario, chunk_ranks(scenario), orders, predictor, None)
    rules = StepRules.of_scenario(scenario, schedule, orders)
    stages = [
        sum_by_provenance(operators, prices, rank, rules.count_passes(rank))
        for rank in range(len(orders))
    ]
    longest = max(stages, key=lambda stage: sum(stage.values()))
    total_us = sum(longest.values())
    return {name: time_us / total_us for name, time_us in longest.items()}


def _price_step(
    scenario: TrainingScenario,
    ranks: Sequence[RankContext],
    orders: Sequence[RankOrder],
    predictor: LatencySource,
    progress: JobProgress | None,
) -> tuple[StepOperators, OperatorPrices]:
    """Return the operators of a step and what they cost."""
    _update(progress, 0.1, "lower the model to operators")
    operators = lower_step(scenario, scenario.trainer.resolve(), ranks, orders)
    _update(progress, 0.3, "ask the predictor")
    nodes = [tuple(operators.nodes_of_rank(rank)) for rank in range(len(orders))]
    prices = fetch_stage_prices(nodes, scenario, predictor)
    if scenario.module_times is None:
        return operators, prices
    measured = _measure_modules(scenario, operators, prices)
    return operators.with_passes(measured.expose), replace(prices, measured=measured)


def _measure_modules(
    scenario: TrainingScenario, operators: StepOperators, prices: OperatorPrices
) -> MeasuredPrices:
    """Return what the scenario's profile says of its operators."""
    return measure_nodes(
        scenario,
        tuple(node for chunk in operators.chunks for node in chunk.forward),
        tuple(node for chunk in operators.chunks for node in chunk.backward),
        lambda node: prices.find(node).latency_us,
    )


def _format_notes(scenario: TrainingScenario) -> tuple[str, ...]:
    """Return what stands in for a number format that the device does not compute in."""
    dtype, name = scenario.dtype, scenario.dtype.name.lower()
    devices = [find_device(device) for device in dict.fromkeys(stage_devices(scenario))]
    return tuple(
        f"{device.name} has no {name}: products of {name} take as long as in a wider format"
        for device in devices
        if dtype not in device.peak_flops_per_s
    )


def _price_notes(operators: StepOperators, prices: OperatorPrices) -> tuple[str, ...]:
    """Return what a reader must know of prices, of each hardware by name if there are several."""
    if not prices.stages:
        return prices.list_notes(operators.all_nodes)
    found: dict[str, None] = {}
    for rank, own in enumerate(prices.stages):
        alike = [at for at, other in enumerate(prices.stages) if other is own]
        if rank == alike[0]:
            nodes = [node for at in alike for node in operators.nodes_of_rank(at)]
            stages = ", ".join(str(at) for at in alike)
            notes = own.list_notes(nodes)
            found.update({f"stages {stages}: {note}": None for note in notes})
    return tuple(found)


def _spread_notes(scenario: TrainingScenario) -> tuple[str, ...]:
    if not Spread.of_scenario(scenario).has_draws:
        return ()
    return (f"the median of {NUM_DRAWS} drawn steps; its parts are those of that one step",)


def _compose(composition: StepComposition, spread: Spread) -> tuple[ComposedStep, Percentiles]:
    """Return the median step in the columns of the answer, and how steps spread."""
    if not spread.has_draws:
        composed = composition.compose(StepColumns.of_answer(spread, 0))
        return composed, summarize(composed.step_us[ESTIMATE : ESTIMATE + 1])
    drawn = composition.compose(StepColumns.of_draws(spread))
    median = pick_median(drawn.step_us)
    lags = [float(np.ravel(lag)[median if np.size(lag) > 1 else 0]) for lag in drawn.end.lags]
    composed = composition.compose(StepColumns.of_answer(spread, median), lags)
    return composed, summarize(drawn.step_us)


def _with_times(
    report: TrainingReport,
    scenario: TrainingScenario,
    composition: StepComposition,
    composed: ComposedStep,
) -> TrainingReport:
    steps_us, factor = composed.step_us, float(composed.factor[ESTIMATE])
    step_us, (low_us, high_us) = float(steps_us[ESTIMATE]), bound_cases(steps_us[:RAW])
    accounts = account_ranks(composition, composed)
    critical = max(accounts, key=lambda account: account.busy_us)
    busy_us = critical.busy_us * factor
    # Sums of many floats differ in their last digits, which is no waiting.
    bubble_us = round(max(0.0, step_us - busy_us), 6)
    by_group = {**in_ms(critical.by_group, factor), "bubble": bubble_us / US_PER_MS}
    exposed = in_ms(critical.exposed_by_axis, factor)
    all_busy_us = sum(account.busy_us for account in accounts) * factor
    all_priced_us = sum(critical.by_provenance.values())
    totals = StepTotals(
        step_us=step_us,
        num_tokens=scenario.global_batch_size * scenario.sequence_length,
        num_devices=report.num_devices,
        flops=count_step_flops(scenario),
        recomputed_flops=count_recomputed_flops(scenario, composition.operators),
        peak_flops_per_s=peak_flops_per_s(scenario),
    )
    return replace(
        report,
        step_time_ms=step_us / US_PER_MS,
        step_time_low_ms=low_us / US_PER_MS,
        step_time_high_ms=high_us / US_PER_MS,
        step_time_raw_ms=float(steps_us[RAW]) / US_PER_MS,
        mfu_ratio=mfu_ratio(totals),
        hfu_ratio=hfu_ratio(totals),
        bubble_ratio=max(0.0, 1 - all_busy_us / (len(accounts) * step_us)),
        exposed_communication_ratio=sum(exposed.values()) * US_PER_MS / step_us,
        tokens_per_s=tokens_per_s(totals),
        tokens_per_s_per_gpu=tokens_per_s_per_gpu(totals),
        step_time_ms_by_group=dict(sorted(by_group.items(), key=lambda item: -item[1])),
        step_time_ratio_by_provenance={
            name: time_us / all_priced_us for name, time_us in critical.by_provenance.items()
        },
        communication_ms_by_axis=in_ms(critical.communication_by_axis, factor),
        exposed_ms_by_axis=exposed,
        components=list_components(composition, composed),
        spans=draw_spans(composed),
    )


def _with_memory(
    report: TrainingReport, scenario: TrainingScenario, orders: Sequence[RankOrder]
) -> TrainingReport:
    memory, timeline = measure_memory(scenario, orders, report.spans)
    feasibility, memory = judge_memory(memory, scenario, measure_stages)
    return replace(report, feasibility=feasibility, memory=memory, memory_timeline=timeline)


def _update(progress: JobProgress | None, ratio: float, message: str) -> None:
    if progress is not None:
        progress.update(ratio, message)
