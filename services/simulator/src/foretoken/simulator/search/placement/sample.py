"""Short pipelines that stand for all of a search: lowered once, priced on every kind of node.

Two pipelines of three stages have two and three equal layers a stage: their difference is a layer,
the rest is what the first stage, those between, and the last have in addition. A model whose first
layers are of another kind has two pipelines more, all of such layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.lowering.communication import PlacedGroup
from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.lowering.options import Nodes
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.rank import chunk_ranks
from foretoken.simulator.search.placement.cluster import NodeKind
from foretoken.simulator.search.placement.layer_kind import with_alike_layers
from foretoken.simulator.search.placement.strategy import StageWork
from foretoken.simulator.training.scenario_checks import check_chunks, check_scenario
from foretoken.simulator.training.schedule import RankOrder, find_schedule, order_step
from foretoken.simulator.training.stage_operators import StepOperators, lower_step

# Layers of a stage in the pipelines of a sample.
SAMPLE_LAYERS = (2, 3)
NUM_SAMPLE_STAGES = 3
_NUM_MICRO_BATCHES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleKey:
    """What decides the operators of a short pipeline.

    `is_first` is of the kind of layers that a model begins with. `node` are the devices and the
    ports of a node.
    """

    work: StageWork
    num_stages: int
    num_layers: int
    is_first: bool
    node: tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """A short pipeline; `sends` are what a stage sends inside a node, and to another one.

    Each has what is sent forward and back.
    """

    scenario: TrainingScenario
    operators: StepOperators
    orders: Sequence[RankOrder]
    sends: tuple[tuple[Nodes, Nodes], tuple[Nodes, Nodes]]

    @property
    def nodes(self) -> Iterator[OperatorNode]:
        """Every operator."""
        yield from self.operators.all_nodes
        for ahead, back in self.sends:
            yield from (*ahead, *back)


class Samples:
    """Short pipelines of a scenario; those asked for again are the same."""

    def __init__(self, scenario: TrainingScenario) -> None:
        """Take what stages vary."""
        self._scenario = scenario
        self._found: dict[SampleKey, Sample | InvalidRequestError] = {}

    def find(
        self, work: StageWork, kind: NodeKind, num_stages: int, *, is_first: bool = False
    ) -> list[Sample]:
        """Return the pipelines of a work on a kind of node, one for each of `SAMPLE_LAYERS`.

        Raises:
            InvalidRequestError: stages cannot work so.

        """
        links = find_topology(kind.topology)
        return [
            self._find(
                SampleKey(
                    work=work,
                    num_stages=num_stages,
                    num_layers=count,
                    is_first=is_first,
                    node=(links.devices_per_node, links.ports_per_node),
                ),
                kind,
            )
            for count in SAMPLE_LAYERS
        ]

    def _find(self, key: SampleKey, kind: NodeKind) -> Sample:
        found = self._found.get(key)
        if found is None:
            try:
                on_kind = replace(self._scenario, device=kind.device, topology=kind.topology)
                found = _lower(key, on_kind)
            except InvalidRequestError as err:
                found = err
            self._found[key] = found
        if isinstance(found, InvalidRequestError):
            raise found
        return found


def _lower(key: SampleKey, scenario: TrainingScenario) -> Sample:
    layout = replace(scenario.layout, pp=key.num_stages)
    model = with_alike_layers(
        scenario.model, key.num_stages * key.num_layers, is_first=key.is_first
    )
    sample = key.work.apply(replace(scenario, layout=layout, model=model, stage_layers=()))
    batch = key.work.dp * key.work.micro_batch_size * _NUM_MICRO_BATCHES
    sample = replace(sample, global_batch_size=batch, virtual_stages=1)
    schedule = find_schedule(sample.pipeline_schedule)
    check_scenario(sample)
    ranks = chunk_ranks(sample)
    check_chunks(ranks, sample)
    orders = order_step(sample, schedule)
    operators = lower_step(sample, sample.trainer.resolve(), ranks, orders)
    return Sample(
        scenario=sample,
        operators=operators,
        orders=orders,
        sends=_sends(operators, key.num_stages // 2),
    )


def _sends(operators: StepOperators, stage: int) -> tuple[tuple[Nodes, Nodes], tuple[Nodes, Nodes]]:
    chunk = operators.chunks[stage]
    near = {"devices_per_node": 2, "num_nodes": 1}, 1
    far = PlacedGroup.of_nodes("pp", chunk.rank)
    across = far.dims, far.num_sharing
    return (
        (_over(chunk.sends, *near), _over(chunk.sends_back, *near)),
        (_over(chunk.sends, *across), _over(chunk.sends_back, *across)),
    )


def _over(nodes: Nodes, dims: dict[str, int], num_sharing: int) -> Nodes:
    return tuple(
        replace(node, dims={**node.dims, **dims}, num_sharing=num_sharing) for node in nodes
    )
