"""Simulate one optimizer step: what each stage runs, for how long, and what it must hold."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from foretoken.domain import schema
from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.job_runner import JobProgress
from foretoken.domain.lowering import check_layout, lower_forward
from foretoken.domain.ports import PredictorPort
from foretoken.domain.report import Feasibility, PipelineSpan, StageMemory, TrainingReport
from foretoken.domain.scenario import TrainingScenario
from foretoken.domain.units import GIB, US_PER_MS, US_PER_S
from foretoken.simulator.model_flops import count_model_flops
from foretoken.simulator.rank import stage_ranks
from foretoken.simulator.training.composition import ComposedStep, StepComposition
from foretoken.simulator.training.memory_timeline import RESERVED_RATIO, measure_stage
from foretoken.simulator.training.operator_prices import fetch_prices
from foretoken.simulator.training.schedule import count_in_flight, find_schedule
from foretoken.simulator.training.stage_operators import (
    lower_stage,
    micro_batch_shape,
    training_options,
)
from foretoken.simulator.training.zero import ZERO_STAGES

# Forward and backward work of the model over the forward work, recomputation not counted. Source:
# Chowdhery et al., PaLM, 2022, appendix B; unlike there, masked query-key pairs are not counted.
_FORWARD_AND_BACKWARD = 3


def simulate_training(
    scenario: TrainingScenario, predictor: PredictorPort, progress: JobProgress | None
) -> TrainingReport:
    """Return time, memory and efficiency of one optimizer step.

    A layout that does not fit the model or the device's memory is a result with its reason; in the
    second case the other figures are there.

    Raises:
        InvalidRequestError: the batch does not divide, or an option is unknown.
        UnknownPluginError: no pipeline schedule of that name.

    """
    _check_scenario(scenario)
    scenario_json = json.dumps(schema.encode(scenario))
    report = TrainingReport(
        num_devices=scenario.layout.num_devices,
        num_micro_batches=_num_micro_batches(scenario),
        device_memory_bytes=find_device(scenario.device).memory_bytes,
        scenario_json=scenario_json,
    )
    try:
        ranks = stage_ranks(scenario.model, scenario.layout, scenario.device, scenario.topology)
        check_layout(ranks[0])
    except InvalidRequestError as err:
        return replace(report, feasibility=Feasibility(is_feasible=False, reason=err.message))
    _update(progress, 0.1, "lower the model to operators")
    stages = [lower_stage(scenario, rank) for rank in ranks]
    orders = find_schedule(scenario.pipeline_schedule).orders(len(stages), report.num_micro_batches)
    memory = tuple(
        measure_stage(stage, scenario, count_in_flight(order))
        for stage, order in zip(stages, orders, strict=True)
    )
    _update(progress, 0.3, "ask the predictor")
    prices = fetch_prices((n for stage in stages for n in stage.all_nodes), scenario, predictor)
    _update(progress, 0.7, "run the pipeline")
    report = replace(
        report,
        feasibility=_judge_memory(memory, report.device_memory_bytes),
        memory=memory,
        model_version=prices.model_version,
    )
    return _with_times(report, scenario, StepComposition(stages, orders, prices))


def _with_times(
    report: TrainingReport, scenario: TrainingScenario, composition: StepComposition
) -> TrainingReport:
    composed = composition.compose(lambda price: price.latency_us)
    step_us = composed.step_us
    work = composition.split_work(composed.run)
    critical = max(work, key=lambda stage: stage.busy_us)
    by_group = {group: time_us / US_PER_MS for group, time_us in critical.by_group.items()}
    # Sums of many floats differ in their last digits, which is no waiting.
    by_group["bubble"] = round(max(0.0, step_us - critical.busy_us), 6) / US_PER_MS
    tokens_per_s = scenario.global_batch_size * scenario.sequence_length / (step_us / US_PER_S)
    return replace(
        report,
        step_time_ms=step_us / US_PER_MS,
        step_time_low_ms=composition.compose(lambda price: price.low_us).step_us / US_PER_MS,
        step_time_high_ms=composition.compose(lambda price: price.high_us).step_us / US_PER_MS,
        mfu_ratio=_model_flops(scenario) / (step_us / US_PER_S) / _peak_flops_per_s(scenario),
        bubble_ratio=1 - sum(stage.busy_us for stage in work) / (len(work) * step_us),
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_gpu=tokens_per_s / report.num_devices,
        step_time_ms_by_group=dict(sorted(by_group.items(), key=lambda item: -item[1])),
        step_time_ratio_by_provenance={
            name: time_us / critical.busy_us for name, time_us in critical.by_provenance.items()
        },
        pipeline=tuple(_spans(composed)),
    )


def _spans(composed: ComposedStep) -> Iterator[PipelineSpan]:
    def span(stage: int, micro_batch: int, kind: str, start: float, end: float) -> PipelineSpan:
        return PipelineSpan(
            stage=stage,
            micro_batch=micro_batch,
            kind=kind,
            start_ms=start / US_PER_MS,
            end_ms=end / US_PER_MS,
        )

    for item in composed.run.spans:
        yield span(item.stage, item.micro_batch, item.kind, item.start_us, item.end_us)
    for stage, end in enumerate(composed.run.stage_ends_us):
        reduced, updated = composed.reduction_ends_us[stage], composed.update_ends_us[stage]
        if reduced > end:
            yield span(stage, -1, "gradient_reduction", end, reduced)
        yield span(stage, -1, "optimizer", composed.update_start_us, updated)


def _judge_memory(memory: Sequence[StageMemory], device_bytes: float) -> Feasibility:
    fullest = max(memory, key=lambda stage: stage.total_bytes)
    needed = fullest.total_bytes * RESERVED_RATIO
    if needed <= device_bytes:
        return Feasibility()
    return Feasibility(
        is_feasible=False,
        reason=(
            f"stage {fullest.stage} needs {needed / GIB:.1f} GiB per device and it has "
            f"{device_bytes / GIB:.1f} GiB; raise tp, pp or zero_stage, or set recompute to full"
        ),
    )


def _model_flops(scenario: TrainingScenario) -> float:
    nodes = lower_forward(scenario.model, micro_batch_shape(scenario), training_options(scenario))
    num_runs = scenario.global_batch_size // scenario.micro_batch_size
    return count_model_flops(nodes) * _FORWARD_AND_BACKWARD * num_runs


def _peak_flops_per_s(scenario: TrainingScenario) -> float:
    return find_device(scenario.device).peak_flops(scenario.dtype) * scenario.layout.num_devices


def _num_micro_batches(scenario: TrainingScenario) -> int:
    return scenario.global_batch_size // (scenario.layout.dp * scenario.micro_batch_size)


def _check_scenario(scenario: TrainingScenario) -> None:
    violations = [
        FieldViolation(name, "must be at least 1")
        for name in ("sequence_length", "micro_batch_size", "global_batch_size")
        if getattr(scenario, name) < 1
    ]
    step_samples = scenario.layout.dp * scenario.micro_batch_size
    if not violations and scenario.global_batch_size % step_samples:
        violations.append(
            FieldViolation(
                "global_batch_size",
                f"{scenario.global_batch_size} is not a multiple of dp times micro_batch_size, "
                f"{step_samples}",
            )
        )
    if scenario.recompute not in ("none", "full"):
        violations.append(FieldViolation("recompute", "must be none or full"))
    if scenario.zero_stage not in ZERO_STAGES:
        violations.append(FieldViolation("zero_stage", "must be 0, 1, 2 or 3"))
    model = scenario.model
    if model.position == "learned" and scenario.sequence_length > model.max_position:
        violations.append(
            FieldViolation("sequence_length", f"{model.name} has {model.max_position} positions")
        )
    if violations:
        raise InvalidRequestError.of_violations(violations)


def _update(progress: JobProgress | None, ratio: float, message: str) -> None:
    if progress is not None:
        progress.update(ratio, message)
