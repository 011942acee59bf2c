"""The collectives of training states: what ranks with the same parameters exchange.

`steps/state_exchange.py` has what is summed and gathered once a step; here are also the exchanges
of every layer, and where each collective runs.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.domain.lowering.communication import PlacedGroup, RankGroup
from foretoken.domain.lowering.graph import OperatorNode, Overlap, RankContext, Section, place
from foretoken.domain.lowering.options import Nodes
from foretoken.domain.lowering.sequence_parallel import splits_tokens
from foretoken.domain.lowering.training_layer import reduction_kernels, sum_kernels
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.units import ceil_divide
from foretoken.simulator.grid import Ints
from foretoken.simulator.steps.parameters import (
    EMBEDDING,
    FIGURES,
    HEAD,
    LAYERS,
    HeldWeights,
    add_places,
    is_expert,
)
from foretoken.simulator.steps.sharding import SPLITS_GRADIENTS, SPLITS_PARAMETERS, ScenarioDegrees
from foretoken.simulator.steps.stage_hardware import StageHardware
from foretoken.simulator.steps.state_exchange import ChunkExchange
from foretoken.simulator.steps.state_sums import HeldParameters, StateCall, wide_values

_GRADIENT, _PARAMETER = "gradient_reduction", "parameter_gather"
# What has a weight that is split over ranks; norms and biases are small enough to stay whole.
_LISTED = ("gemm", "grouped_gemm")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterGroup(HeldParameters):
    """Parameters of one chunk that the same ranks hold copies of: `dense` or `expert`.

    `layer_params` are those of each of its layers.
    """

    name: str
    layer_params: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StateExchange:
    """The collectives of one chunk's states.

    For every micro batch: `forward` before its forward operators, `backward_gather` before and
    `backward_reduction` after its backward ones. Once a step: `reduction` after the last backward
    pass, or during it where deferred, and `gather` after the update. One rank updates
    `num_updated` parameters. In each layer a pass waits for the host meanwhile, in µs.
    """

    groups: tuple[ParameterGroup, ...]
    forward: Nodes = ()
    backward_gather: Nodes = ()
    backward_reduction: Nodes = ()
    reduction: Nodes = ()
    gather: Nodes = ()
    num_updated: int = 0
    forward_host_us: float = 0.0
    backward_host_us: float = 0.0


def exchange_states(forward: Nodes, rank: RankContext, scenario: TrainingScenario) -> StateExchange:
    """Return what a rank exchanges for the chunk whose forward operators these are."""
    writer = _Writer(forward, rank, scenario, scenario.trainer.resolve())
    return writer.write()


def exchange_in_layers(
    forward: Nodes, rank: RankContext, scenario: TrainingScenario
) -> StateExchange:
    """Return of `exchange_states` what is exchanged for every micro batch."""
    return _Writer(forward, rank, scenario, scenario.trainer.resolve()).write_layers()


class _Writer:
    """Writes the collectives of one chunk of a rank."""

    def __init__(
        self,
        forward: Nodes,
        rank: RankContext,
        scenario: TrainingScenario,
        trainer: TrainerProfile,
    ) -> None:
        self._forward = forward
        self._rank = rank
        self._scenario = scenario
        self._trainer = trainer
        self._dtype = scenario.dtype.kept_in_training
        self._gradient_dtype = trainer.gradient_dtype or self._dtype
        self._degrees = degrees = ScenarioDegrees.of(scenario)
        self._counts = HeldWeights(
            forward=forward,
            layers=rank.stage_layers,
            degree=degrees.weight_parts,
            trainer=trainer,
            splits_tokens=splits_tokens(rank, scenario),
        ).count()
        places = (EMBEDDING, HEAD, *range(LAYERS, self._counts.shape[1]))
        self._held = add_places(self._counts, places, degrees)
        self._stage = degrees.state_stage
        self._is_once = degrees.is_once

    def write(self) -> StateExchange:
        # FSDP2 reduces when a pipeline's last backward pass has ended.
        is_hidden = self._trainer.overlaps_gradient_reduction and not self._is_once
        reducing = Overlap.DEFERRED if is_hidden else Overlap.EXPOSED
        gathers_early = self._trainer.overlaps_parameter_gather
        gathering = Overlap.PREFETCH if gathers_early else Overlap.EXPOSED
        exchange = ChunkExchange.of_chunk(self._held, self._degrees)
        dtype, trainer = self._scenario.dtype, self._trainer
        return dataclasses.replace(
            self.write_layers(),
            reduction=(
                # Gradients laid out in a buffer and back, next to the sums.
                *sum_kernels(int(exchange.num_gradients), exchange.num_ranks, dtype, trainer),
                *reduction_kernels(int(exchange.num_shared), dtype, trainer),
                *(node for call in exchange.buckets for node in self._called(call, reducing)),
                *self._called(exchange.norms, Overlap.EXPOSED),
                *self._embedding_reduction(),
            ),
            gather=tuple(
                node for call in exchange.gathers for node in self._called(call, gathering)
            ),
            num_updated=int(self._held.num_updated),
        )

    def write_layers(self) -> StateExchange:
        groups = tuple(self._groups())
        gathers: Nodes = ()
        scatters: Nodes = ()
        if self._stage >= SPLITS_PARAMETERS and not self._is_once:
            gathers = tuple(node for group in groups for node in self._layer_gathers(group))
        if self._stage >= SPLITS_GRADIENTS and not self._is_once:
            scatters = tuple(node for group in groups for node in self._layer_scatters(group))
        is_again = self._trainer.gathers_again and self._scenario.recompute == "full"
        again = tuple(
            dataclasses.replace(node, role=f"{node.role}_again") for node in gathers if is_again
        )
        list_us = sum(self._list_us(group) for group in groups) if gathers else 0.0
        return StateExchange(
            groups=groups,
            forward=gathers,
            backward_gather=(*gathers, *again),
            forward_host_us=list_us,
            # Gradients are scattered like that too.
            backward_host_us=list_us * (2 + is_again),
            backward_reduction=scatters,
        )

    def _groups(self) -> Iterator[ParameterGroup]:
        """Yield the parameters by the ranks that hold the same."""
        for name, held in self._held.groups.items():
            yield ParameterGroup(
                name=name,
                num_params=int(held.num_params),
                num_tensors=int(held.num_tensors),
                num_layer_params=int(held.num_layer_params),
                num_narrow=int(held.num_narrow),
                layer_params=tuple(self._counts[FIGURES.index(name), LAYERS:].tolist()),
                ranks=held.ranks,
            )

    def _list_us(self, group: ParameterGroup) -> float:
        """Return how long the host takes in a layer over the lists of one exchange."""
        return float(
            self._num_layer_weights(group) * group.ranks.shards * self._trainer.list_rank_us
        )

    def _num_layer_weights(self, group: ParameterGroup) -> float:
        num_weights = sum(
            node.repeat
            for node in self._forward
            if node.section is Section.LAYER
            and node.operator in _LISTED
            and is_expert(node) == (group.name == "expert")
        )
        return num_weights / (sum(1 for count in group.layer_params if count) or 1)

    def _called(self, call: StateCall, overlap: Overlap) -> Iterator[OperatorNode]:
        if call.count:
            ranks = RankGroup(axis=call.axis, degree=int(call.degree), stride=int(call.stride))
            node = self._collective(call.role, call.operator, int(call.elements), ranks)
            yield dataclasses.replace(node, repeat=int(call.count), overlap=overlap)

    def _layer_gathers(self, group: ParameterGroup) -> Iterator[OperatorNode]:
        role = f"{group.name}_parameter_all_gather"
        is_hidden = self._trainer.overlaps_parameter_gather
        counts = self._counts[[FIGURES.index(group.name), FIGURES.index(f"{group.name}_narrow")]]
        values = wide_values(counts[0], counts[1], self._trainer)
        for node in self._by_layer(group, role, "all_gather", values):
            overlap = Overlap.PREFETCH if is_hidden else Overlap.EXPOSED
            yield from self._listed(node, ("zero", "fill"))
            yield dataclasses.replace(node, overlap=overlap)
            yield from self._listed(node, ("copy", "buffer_copy"))

    def _layer_scatters(self, group: ParameterGroup) -> Iterator[OperatorNode]:
        role = f"{group.name}_gradient_reduce_scatter"
        is_hidden = self._trainer.overlaps_gradient_reduction
        values = self._counts[FIGURES.index(group.name)]
        for node in self._by_layer(group, role, "reduce_scatter", values):
            overlap = Overlap.DEFERRED if is_hidden else Overlap.EXPOSED
            yield from self._listed(node, ("divide", "buffer_copy"), ("copy", "buffer_copy"))
            yield dataclasses.replace(node, overlap=overlap)

    def _listed(self, node: OperatorNode, *kernels: tuple[str, str]) -> Iterator[OperatorNode]:
        """Yield what runs on the device for a collective over lists: (suffix of role, operator)."""
        for suffix, operator in kernels if self._trainer.list_rank_us else ():
            yield dataclasses.replace(
                node,
                role=f"{node.role}_{suffix}",
                operator=operator,
                dims={"num_params": int(node.dims["message_bytes"] / node.dtype.num_bytes)},
                axis="",
                num_sharing=1,
            )

    def _by_layer(
        self, group: ParameterGroup, role: str, operator: str, values: Ints
    ) -> Iterator[OperatorNode]:
        """Yield a collective for all layers with as many values, and the rest's, given by place."""
        if group.ranks.shards == 1:
            return
        ranks, is_listed = group.ranks.of_shards, self._trainer.list_rank_us > 0
        layers: dict[int, list[int]] = {}
        for layer, count in zip(self._rank.stage_layers, values[LAYERS:].tolist(), strict=True):
            layers.setdefault(count, []).append(layer)
        layers.pop(0, None)
        for count, held in layers.items():
            # Lists are exchanged weight by weight.
            num_calls = round(self._num_layer_weights(group)) if is_listed else 1
            size = int(ceil_divide(count, num_calls))
            node = self._collective(role, operator, size, ranks)
            node = dataclasses.replace(node, section=Section.LAYER, **place(held))
            yield from (node for _ in range(num_calls))
        for section, end in ((Section.EMBEDDING, EMBEDDING), (Section.HEAD, HEAD)):
            if values[end]:
                node = self._collective(role, operator, int(values[end]), ranks)
                yield dataclasses.replace(node, section=section)

    def _embedding_reduction(self) -> Iterator[OperatorNode]:
        """Yield the sum of a tied embedding's gradients over the first and the last stage."""
        rank, pp = self._rank, self._rank.layout.pp
        last = (rank.num_stages - 1) % pp
        is_end = rank.stage in (0, rank.num_stages - 1)
        if not (rank.model.has_tied_embedding and last and is_end):
            return
        num_params = int(self._held.table)
        own, hardware = rank.stage % pp, StageHardware.of_scenario(self._scenario)
        group = hardware.pair(own, last - own, rank)
        yield self._placed("embedding_gradient_all_reduce", "all_reduce", num_params, group)

    def _collective(
        self, role: str, operator: str, num_params: int, ranks: RankGroup
    ) -> OperatorNode:
        group = PlacedGroup.of_rank(ranks, self._rank)
        return self._placed(role, operator, num_params, group)

    def _placed(
        self, role: str, operator: str, num_params: int, group: PlacedGroup
    ) -> OperatorNode:
        is_gradient = "_gradient_" in role
        dtype: DType = self._gradient_dtype if is_gradient else self._dtype
        return OperatorNode(
            role=role,
            group=_GRADIENT if is_gradient else _PARAMETER,
            section=Section.GRADIENT,
            operator=find_operator(operator).name,
            dims={"message_bytes": int(dtype.bytes_of(num_params)), **group.dims},
            dtype=dtype,
            axis=group.axis,
            num_sharing=group.num_sharing,
        )
