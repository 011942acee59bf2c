"""Chunks of small training runs, as memory sees them."""

from dataclasses import dataclass

from foretoken.domain.lowering.graph import RankContext, Section
from foretoken.domain.lowering.lower import lower_rank
from foretoken.domain.lowering.options import Nodes
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.training_report import MemoryColumns, SpanColumns, StageMemory
from foretoken.simulator.rank import chunk_layers, chunk_ranks
from foretoken.simulator.steps.held.state_bytes import StateBytes
from foretoken.simulator.steps.memory import ModelMemory
from foretoken.simulator.steps.pipelines.schedule import find_schedule
from foretoken.simulator.steps.recompute import RecomputePlan, plan_recompute
from foretoken.simulator.steps.stage_operators import micro_batch_shape, training_options
from foretoken.simulator.training.memory.measure import ChunkNeed, measure_memory, name_needs

_AXES = ("tp", "pp", "dp", "cp", "ep")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkGraph:
    """What one rank runs forward for a chunk, and what it keeps of that."""

    rank: RankContext
    forward: Nodes
    plan: RecomputePlan


def memory_scenario(model: str = "llama-3.2-1b", **changes: object) -> TrainingScenario:
    """Return a scenario; `tp`, `pp`, `dp`, `cp`, `ep` are the layout's."""
    degrees = {axis: changes.pop(axis) for axis in _AXES if axis in changes}
    fields: dict[str, object] = {
        "device": "h200_sxm",
        "sequence_length": 1024,
        "global_batch_size": 16,
        **changes,
    }
    return TrainingScenario(
        model=find_model(model),
        layout=ParallelLayout(**degrees),  # type: ignore[arg-type]
        **fields,  # type: ignore[arg-type]
    )


def chunk_graphs(scenario: TrainingScenario) -> list[ChunkGraph]:
    """Return every chunk of the model in order."""
    options = training_options(scenario, scenario.trainer.resolve())
    graphs = []
    for rank in chunk_ranks(scenario):
        nodes = lower_rank(micro_batch_shape(scenario), options, rank)
        forward = tuple(node for node in nodes if node.section is not Section.BOUNDARY)
        plan = plan_recompute(forward, scenario, rank)
        graphs.append(ChunkGraph(rank=rank, forward=forward, plan=plan))
    return graphs


def measure_states(scenario: TrainingScenario) -> StateBytes:
    """Return the states of a scenario without a pipeline."""
    memory = ModelMemory(scenario)
    _, states = memory.measure(memory.cut([scenario.model.num_layers], [[0]]))
    return states.take((0, 0))


def chunk_needs(scenario: TrainingScenario) -> list[ChunkNeed]:
    """Return what every chunk of the model needs, in order, each on a rank of its own."""
    memory, layers = ModelMemory(scenario), chunk_layers(scenario)
    chunks = memory.cut(layers, [[chunk] for chunk in range(len(layers))])
    return name_needs(memory.measure(chunks)[0], memory.places_of(chunks))


def follow(
    scenario: TrainingScenario, spans: SpanColumns | None = None
) -> tuple[tuple[StageMemory, ...], MemoryColumns]:
    """Return the memory of every rank of the pipeline, and over the step."""
    schedule = find_schedule(scenario.pipeline_schedule)
    orders = schedule.orders(
        scenario.layout.pp, scenario.num_micro_batches, scenario.virtual_stages
    )
    return measure_memory(scenario, orders, spans)
