"""What a strategy must hold on every stage, with nothing timed and no predictor asked."""

import json
from collections.abc import Hashable, Sequence
from dataclasses import replace

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.lowering.graph import RankContext, Section
from foretoken.domain.lowering.lower import lower_forward, lower_rank
from foretoken.domain.lowering.options import LoweringOptions
from foretoken.domain.requests.question import describe_training
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_run import TrainingMemoryReport
from foretoken.domain.results.echo import Echo
from foretoken.domain.results.report import Feasibility
from foretoken.domain.results.training_report import StageMemory
from foretoken.simulator.rank import chunk_ranks
from foretoken.simulator.steps.trainer_limit import check_trainer
from foretoken.simulator.training.chunk_placement import ChunkPlaces, share_embedding
from foretoken.simulator.training.memory.advice import judge_memory
from foretoken.simulator.training.memory.chunk import ChunkGraph
from foretoken.simulator.training.memory.in_flight import settle_micro_batches
from foretoken.simulator.training.memory.layer_kind import layer_kinds
from foretoken.simulator.training.memory.measure import measure_memory
from foretoken.simulator.training.recompute import plan_recompute
from foretoken.simulator.training.scenario_checks import check_chunks, check_scenario
from foretoken.simulator.training.schedule import (
    RankOrder,
    find_schedule,
    order_step,
    with_chunks,
)
from foretoken.simulator.training.stage_hardware import stage_devices
from foretoken.simulator.training.stage_operators import micro_batch_shape, training_options

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
        echo=Echo(question=describe_training(scenario), basis=_BASIS),
    )
    try:
        ranks, orders = _cut(scenario)
    except InvalidRequestError as err:
        return replace(report, feasibility=Feasibility(is_feasible=False, reason=err.message))
    model, graphs = _lower_graphs(scenario, ranks, orders)
    memory, _ = measure_memory(graphs, orders, scenario)
    feasibility, memory = judge_memory(memory, scenario, measure_stages)
    return replace(
        report, feasibility=feasibility, memory=memory, num_params=float(model.num_params)
    )


def measure_stages(scenario: TrainingScenario) -> tuple[StageMemory, ...]:
    """Return what every stage of a strategy must hold.

    Raises:
        InvalidRequestError: the layout does not fit the model, or as `plan_memory`.

    """
    check_scenario(scenario)
    ranks, orders = _cut(scenario)
    _, graphs = _lower_graphs(scenario, ranks, orders)
    memory, _ = measure_memory(graphs, orders, scenario)
    return memory


def _cut(
    scenario: TrainingScenario,
) -> tuple[tuple[RankContext, ...], tuple[RankOrder, ...]]:
    """Return a rank for every chunk of layers, and the passes of each rank of the pipeline.

    They are of fewer micro batches where more of them are never held at once.
    """
    schedule = find_schedule(scenario.pipeline_schedule)
    scenario = with_chunks(scenario, schedule)
    ranks = chunk_ranks(scenario)
    check_chunks(ranks, scenario)
    return ranks, order_step(scenario, schedule, settle_micro_batches(scenario, schedule))


class _Model:
    """The operators of a whole model on one device: which layers are alike, how large it is."""

    def __init__(self, scenario: TrainingScenario, options: LoweringOptions) -> None:
        model = scenario.model
        nodes = lower_forward(model, micro_batch_shape(scenario), options)
        self.num_params = sum(int(node.num_weights) for node in nodes)
        self._kinds = layer_kinds(nodes, model.num_layers)

    def kind_of(self, rank: RankContext) -> Hashable:
        """Return what is equal for chunks that run the same operators."""
        layers = rank.stage_layers
        kinds = self._kinds[layers.start : layers.stop]
        return rank.stage == 0, rank.is_last_stage, kinds


def _lower_graphs(
    scenario: TrainingScenario, ranks: Sequence[RankContext], orders: Sequence[RankOrder]
) -> tuple[_Model, list[ChunkGraph]]:
    """Return the chunks of a step as memory sees them; those that are alike are one object."""
    options = training_options(scenario, scenario.trainer.resolve())
    places, model = ChunkPlaces.of_orders(orders), _Model(scenario, options)
    graphs: dict[Hashable, ChunkGraph] = {}
    for rank in ranks:
        if model.kind_of(rank) not in graphs:
            nodes = lower_rank(micro_batch_shape(scenario), options, rank)
            nodes = share_embedding(nodes, places, rank)
            forward = tuple(node for node in nodes if node.section is not Section.BOUNDARY)
            plan = plan_recompute(forward, scenario, rank)
            graph = ChunkGraph(rank=rank, forward=forward, plan=plan)
            graphs[model.kind_of(rank)] = graph
    return model, [graphs[model.kind_of(rank)] for rank in ranks]
