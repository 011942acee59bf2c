"""The devices and links of every rank of a pipeline, which need not be alike.

All replicas and tensor-parallel ranks of a stage are on its device. Neighbouring stages that are
alike share nodes, filled one after the other; where the hardware changes, a node begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from foretoken.domain.hardware.topology import TopologySpec
from foretoken.domain.lowering.communication import PlacedGroup, axis_group
from foretoken.domain.lowering.graph import RankContext
from foretoken.domain.lowering.options import Nodes
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.rank import links_within


@dataclass(frozen=True, slots=True)
class StageHardware:
    """`devices` and `topologies` of the ranks of a pipeline, by name; empty where all are alike.

    A topology without a name is the first of the device.
    """

    devices: tuple[str, ...] = ()
    topologies: tuple[str, ...] = ()

    @classmethod
    def of_scenario(cls, scenario: TrainingScenario) -> Self:
        """Return the hardware of a scenario's pipeline."""
        if not (scenario.stage_devices or scenario.stage_topologies):
            return cls()
        pp = scenario.layout.pp
        # The links of the whole are those of its device, not of others.
        links = scenario.topology if not scenario.stage_devices else ""
        return cls(
            scenario.stage_devices or (scenario.device,) * pp,
            scenario.stage_topologies or (links,) * pp,
        )

    @property
    def is_given(self) -> bool:
        """Whether every stage has hardware of its own."""
        return bool(self.devices)

    def key(self, stage: int) -> tuple[str, str]:
        """Return the device and the topology of a stage."""
        return self.devices[stage], self.topologies[stage]

    def is_alike(self, first: int, second: int) -> bool:
        """Return whether two stages have the same device and links."""
        return not self.is_given or self.key(first) == self.key(second)

    def place(self, rank: RankContext, stage: int) -> RankContext:
        """Return a rank on the nodes of a stage."""
        if not self.is_given:
            return rank
        links = self._links(stage, rank)
        return replace(
            rank,
            devices_per_node=links.devices_per_node if links else 1,
            ports_per_node=links.ports_per_node if links else 0,
        )

    def pair(self, first: int, second: int, rank: RankContext) -> PlacedGroup:
        """Return a rank of a stage and its peer of another, as the first one's links see it."""
        if not self.is_given:
            return PlacedGroup.of_stages(first, second, rank)
        start = self._run_start(first)
        if start == self._run_start(second):
            return PlacedGroup.of_stages(first - start, second - start, rank)
        return PlacedGroup.of_nodes("pp", rank)

    def _run_start(self, stage: int) -> int:
        """Return the first of the neighbouring stages that are alike with this one."""
        while stage and self.key(stage - 1) == self.key(stage):
            stage -= 1
        return stage

    def _links(self, stage: int, rank: RankContext) -> TopologySpec | None:
        device, topology = self.key(stage)
        return links_within(rank.layout, device, topology)


def gather_at(nodes: Nodes, sender: RankContext, receiver: RankContext) -> Nodes:
    """Return what puts a transfer together on the nodes of its receiver, over tp as the sender's.

    The ranks of tp may lie otherwise there.
    """
    if sender.devices_per_node == receiver.devices_per_node and (
        sender.ports_per_node == receiver.ports_per_node
    ):
        return nodes
    group = PlacedGroup.of_rank(axis_group(receiver.layout, "tp"), receiver)
    return tuple(
        replace(node, dims={**node.dims, **group.dims}, num_sharing=group.num_sharing)
        for node in nodes
    )


def stage_devices(scenario: TrainingScenario) -> Sequence[str]:
    """Return the device of every rank of the pipeline."""
    return StageHardware.of_scenario(scenario).devices or (scenario.device,) * scenario.layout.pp
