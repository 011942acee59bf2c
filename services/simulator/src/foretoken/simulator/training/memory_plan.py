"""What a strategy must hold on every stage, with nothing timed and no predictor asked."""

import json
from dataclasses import replace

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.lowering.lower import lower_forward
from foretoken.domain.requests.question import describe_training
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_run import TrainingMemoryReport
from foretoken.domain.results.accuracy import describe_accuracy, format_name
from foretoken.domain.results.echo import Echo
from foretoken.domain.results.report import Feasibility
from foretoken.domain.results.training_report import StageMemory
from foretoken.simulator.rank import chunk_ranks
from foretoken.simulator.steps.held.in_flight import settle_micro_batches
from foretoken.simulator.steps.pipelines.schedule import (
    RankOrder,
    find_schedule,
    order_step,
    with_chunks,
)
from foretoken.simulator.steps.stage_hardware import stage_devices
from foretoken.simulator.steps.stage_operators import micro_batch_shape, training_options
from foretoken.simulator.steps.trainer_limit import check_trainer
from foretoken.simulator.training.memory.advice import judge_memory
from foretoken.simulator.training.memory.measure import measure_memory
from foretoken.simulator.training.scenario_checks import check_chunks, check_scenario

# What the answer rests on.
_BASIS = "counted sizes of what training holds: no measurement, and no predicted time"


def plan_memory(scenario: TrainingScenario) -> TrainingMemoryReport:
    """Return what every stage of a strategy must hold, and what would help where it does not fit.

    A layout that does not fit the model is a result with its reason. Moments have no time.

    Raises:
        InvalidRequestError: the batch does not divide, rules contradict each other, or the trainer
            cannot do what is asked.
        UnknownPluginError: no pipeline schedule or trainer of that name.

    """
    check_scenario(scenario)
    check_trainer(scenario)
    report = TrainingMemoryReport(
        num_devices=scenario.layout.num_devices,
        device_memory_bytes=min(find_device(name).memory_bytes for name in stage_devices(scenario)),
        scenario_json=json.dumps(schema.encode(scenario)),
        echo=Echo(
            question=describe_training(scenario),
            basis=_BASIS,
            accuracy=describe_accuracy("memory", {"format": format_name(scenario.dtype)}),
        ),
    )
    try:
        chunked, orders = _order(scenario)
    except InvalidRequestError as err:
        return replace(report, feasibility=Feasibility(is_feasible=False, reason=err.message))
    memory, _ = measure_memory(chunked, orders)
    feasibility, memory = judge_memory(memory, scenario, measure_stages)
    options = training_options(scenario, scenario.trainer.resolve())
    nodes = lower_forward(scenario.model, micro_batch_shape(scenario), options)
    num_params = float(sum(int(node.num_weights) for node in nodes))
    return replace(report, feasibility=feasibility, memory=memory, num_params=num_params)


def measure_stages(scenario: TrainingScenario) -> tuple[StageMemory, ...]:
    """Return what every stage of a strategy must hold.

    Raises:
        InvalidRequestError: the layout does not fit the model, or as `plan_memory`.

    """
    check_scenario(scenario)
    memory, _ = measure_memory(*_order(scenario))
    return memory


def _order(scenario: TrainingScenario) -> tuple[TrainingScenario, tuple[RankOrder, ...]]:
    """Return a scenario with the chunks of its schedule, and the passes of each rank.

    They are of fewer micro batches where more of them are never held at once.
    """
    schedule = find_schedule(scenario.pipeline_schedule)
    scenario = with_chunks(scenario, schedule)
    check_chunks(chunk_ranks(scenario), scenario)
    return scenario, order_step(scenario, schedule, settle_micro_batches(scenario, schedule))
