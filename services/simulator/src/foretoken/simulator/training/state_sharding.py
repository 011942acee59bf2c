"""The collectives of training states: what ranks with the same parameters exchange.

Parameters are of two groups, for other ranks hold the same experts than the same dense parameters.
Gradients are summed once a step, or for every micro batch where a rank keeps only its share of
them (ZeRO 2 and 3); parameters are gathered after the update (1 and 2) or before each pass of a
layer (3). In a pipeline FSDP2 does both once a step. With fewer shards than ranks (HSDP) the
shards' sums are summed again over the replicas.
Source: Rajbhandari et al., ZeRO, 2020; Zhao et al., "PyTorch FSDP", 2023, section 3.2.2;
Megatron-Core, `distributed/finalize_model_grads.py`.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from foretoken.domain.communication import PlacedGroup
from foretoken.domain.estimate import DType
from foretoken.domain.graph import OperatorNode, Overlap, Partition, RankContext, Section
from foretoken.domain.lowering_options import Nodes
from foretoken.domain.operator import find_operator
from foretoken.domain.placement import RankGroup, axis_group
from foretoken.domain.scenario import TrainingScenario
from foretoken.domain.sequence_parallel import splits_tokens
from foretoken.domain.trainer import TrainerProfile
from foretoken.domain.training_kernels import reduction_kernels, sum_kernels
from foretoken.domain.units import ceil_divide
from foretoken.simulator.steps.sharding import ScenarioDegrees, Sharding
from foretoken.simulator.training.stage_hardware import StageHardware

_GRADIENT, _PARAMETER = "gradient_reduction", "parameter_gather"
# What has a weight that is split over ranks; norms and biases are small enough to stay whole.
_LISTED = ("gemm", "grouped_gemm")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterGroup:
    """Parameters of one rank that the same ranks hold copies of: `dense` or `expert`.

    `num_params` counts those of the rank before their states are sharded, `layer_params` those of
    each of its layers. States are split over `num_shards` ranks, which `num_replicas` sets have.
    """

    name: str
    num_params: int
    layer_params: tuple[int, ...]
    num_shards: int
    num_replicas: int
    stride: int

    @property
    def num_layer_params(self) -> int:
        """Parameters of the largest layer."""
        return max(self.layer_params, default=0)

    @property
    def all_ranks(self) -> RankGroup:
        """Every rank with the same parameters."""
        return RankGroup(axis="dp", degree=self.num_shards * self.num_replicas, stride=self.stride)

    @property
    def shard_ranks(self) -> RankGroup:
        """Ranks whose shards make up the whole."""
        return RankGroup(axis="dp", degree=self.num_shards, stride=self.stride)

    @property
    def replica_ranks(self) -> RankGroup:
        """Ranks with the same shard."""
        stride = self.stride * self.num_shards
        return RankGroup(axis="dp", degree=self.num_replicas, stride=stride)


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


def parameter_groups(
    forward: Nodes, rank: RankContext, scenario: TrainingScenario
) -> tuple[ParameterGroup, ...]:
    """Return the parameters of a chunk by the ranks that hold the same."""
    degrees = ScenarioDegrees.of(scenario)
    parts, ranks = degrees.weight_parts, degrees.dense
    dense = ParameterGroup(
        name="dense",
        num_params=sum(_num_kept(node, parts) for node in forward if not _is_expert(node)),
        layer_params=_layer_params([n for n in forward if not _is_expert(n)], rank, parts),
        num_shards=ranks.shards,
        num_replicas=ranks.replicas,
        stride=ranks.stride,
    )
    experts = [node for node in forward if _is_expert(node)]
    if not experts:
        return (dense,)
    ranks = degrees.expert
    expert = ParameterGroup(
        name="expert",
        num_params=sum(int(node.num_weights) for node in experts),
        layer_params=_layer_params(experts, rank, 1),
        num_shards=ranks.shards,
        num_replicas=ranks.replicas,
        stride=ranks.stride,
    )
    return (dense, expert)


def _is_expert(node: OperatorNode) -> bool:
    return node.operator == "grouped_gemm"


def _num_kept(node: OperatorNode, weight_degree: int) -> int:
    """Return the parameters a rank keeps of an operator; `isp` leaves norms whole."""
    is_split = node.operator in ("gemm", "embedding")
    return int(ceil_divide(int(node.num_weights), weight_degree if is_split else 1))


def _layer_params(
    nodes: list[OperatorNode], rank: RankContext, weight_degree: int
) -> tuple[int, ...]:
    counts = dict.fromkeys(rank.stage_layers, 0)
    for node in nodes:
        if node.section is Section.LAYER and node.repeat:
            count = _num_kept(node, weight_degree) // node.repeat
            for index in range(node.repeat):
                counts[node.first_layer + index * node.layer_stride] += count
    return tuple(counts.values())


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
        degrees = ScenarioDegrees.of(scenario)
        self._weight_parts = degrees.weight_parts
        self._sharding = Sharding.of_stage(degrees.state_stage)
        self._is_once = degrees.is_once

    def write(self) -> StateExchange:
        in_layers = self.write_layers()
        groups = in_layers.groups
        gathers_updated = self._sharding.optimizer and not in_layers.forward
        return dataclasses.replace(
            in_layers,
            reduction=(
                *self._kernels(groups),
                *(node for group in groups for node in self._reduction(group)),
                *self._norm_reduction(),
                *self._embedding_reduction(),
            ),
            gather=tuple(
                node for group in groups if gathers_updated for node in self._gather(group)
            ),
            num_updated=sum(ceil_divide(group.num_params, group.num_shards) for group in groups),
        )

    def write_layers(self) -> StateExchange:
        groups = parameter_groups(self._forward, self._rank, self._scenario)
        gathers: Nodes = ()
        scatters: Nodes = ()
        if self._sharding.parameters and not self._is_once:
            gathers = tuple(node for group in groups for node in self._layer_gathers(group))
        if self._sharding.gradients and not self._is_once:
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

    def _list_us(self, group: ParameterGroup) -> float:
        """Return how long the host takes in a layer over the lists of one exchange."""
        return self._num_layer_weights(group) * group.num_shards * self._trainer.list_rank_us

    def _num_layer_weights(self, group: ParameterGroup) -> float:
        num_weights = sum(
            node.repeat
            for node in self._forward
            if node.section is Section.LAYER
            and node.operator in _LISTED
            and _is_expert(node) == (group.name == "expert")
        )
        return num_weights / (sum(1 for count in group.layer_params if count) or 1)

    def _kernels(self, groups: tuple[ParameterGroup, ...]) -> Nodes:
        """Return what runs beside the sums: gradients laid out in a buffer and back."""
        num_params = sum(
            group.num_params for group in groups if group.num_shards * group.num_replicas > 1
        )
        own, layout = sum(group.num_params for group in groups), self._scenario.layout
        dtype = self._scenario.dtype
        return (
            *sum_kernels(own, layout.dp * layout.cp, dtype, self._trainer),
            *reduction_kernels(num_params, dtype, self._trainer),
        )

    def _reduction(self, group: ParameterGroup) -> Iterator[OperatorNode]:
        """Yield the sums of gradients once a step."""
        keeps_shares = self._sharding.gradients or not self._trainer.reduces_whole_gradients
        if not (self._sharding.optimizer and keeps_shares):
            ranks = group.all_ranks
            yield from self._buckets(group, ranks, "all_reduce", group.num_params)
            return
        if not self._sharding.gradients or self._is_once:
            ranks = group.shard_ranks
            yield from self._buckets(group, ranks, "reduce_scatter", group.num_params)
        num_summed = int(ceil_divide(group.num_params, group.num_shards))
        yield from self._buckets(group, group.replica_ranks, "all_reduce", num_summed)

    def _buckets(
        self, group: ParameterGroup, ranks: RankGroup, operator: str, num_params: int
    ) -> Iterator[OperatorNode]:
        """Yield a collective over gradients, cut to buckets where the framework does."""
        if ranks.degree == 1 or num_params == 0:
            return
        # A bucket holds whole gradients; of sums that are scattered each rank has its share.
        share = group.num_params // num_params or 1
        # Gradients that are scattered layer by layer are summed over replicas so, too.
        is_layered = self._sharding.gradients and not self._is_once
        most = group.num_layer_params if is_layered else self._trainer.bucket_elements
        size = int(ceil_divide(most, share)) or num_params
        num_full, rest = divmod(num_params, min(size, num_params))
        # FSDP2 reduces when a pipeline's last backward pass has ended.
        is_hidden = self._trainer.overlaps_gradient_reduction and not self._is_once
        overlap = Overlap.DEFERRED if is_hidden else Overlap.EXPOSED
        for elements, count in ((min(size, num_params), num_full), (rest, 1)):
            if elements:
                node = self._collective(
                    f"{group.name}_gradient_{operator}", operator, elements, ranks
                )
                yield dataclasses.replace(node, repeat=count, overlap=overlap)

    def _gather(self, group: ParameterGroup) -> Iterator[OperatorNode]:
        if group.num_shards == 1 or group.num_params == 0:
            return
        role = f"{group.name}_parameter_all_gather"
        num_calls = self._num_owners(group)
        size = int(ceil_divide(group.num_params, num_calls))
        node = self._collective(role, "all_gather", size, group.shard_ranks)
        overlap = Overlap.PREFETCH if self._trainer.overlaps_parameter_gather else Overlap.EXPOSED
        yield dataclasses.replace(node, repeat=num_calls, overlap=overlap)

    def _num_owners(self, group: ParameterGroup) -> int:
        """Return the ranks that send parameters one after the other, 1 where all do at once.

        A broadcast goes through a ring as a gather of as many bytes does.
        """
        if not self._trainer.broadcasts_parameters:
            return 1
        nodes = (node for node in self._forward if _is_expert(node) == (group.name == "expert"))
        num_tensors = sum(node.repeat * node.num_tensors for node in nodes if int(node.num_weights))
        return min(group.num_shards, num_tensors)

    def _layer_gathers(self, group: ParameterGroup) -> Iterator[OperatorNode]:
        role = f"{group.name}_parameter_all_gather"
        is_hidden = self._trainer.overlaps_parameter_gather
        for node in self._by_layer(group, role, "all_gather"):
            overlap = Overlap.PREFETCH if is_hidden else Overlap.EXPOSED
            yield from self._listed(node, ("zero", "fill"))
            yield dataclasses.replace(node, overlap=overlap)
            yield from self._listed(node, ("copy", "buffer_copy"))

    def _layer_scatters(self, group: ParameterGroup) -> Iterator[OperatorNode]:
        role = f"{group.name}_gradient_reduce_scatter"
        is_hidden = self._trainer.overlaps_gradient_reduction
        for node in self._by_layer(group, role, "reduce_scatter"):
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

    def _by_layer(self, group: ParameterGroup, role: str, operator: str) -> Iterator[OperatorNode]:
        """Yield a collective for every run of layers with as many parameters, and the rest's."""
        if group.num_shards == 1:
            return
        ranks, layers = group.shard_ranks, group.layer_params
        is_listed = self._trainer.list_rank_us > 0
        start = 0
        for index in range(1, len(layers) + 1):
            if index < len(layers) and layers[index] == layers[start]:
                continue
            if layers[start]:
                # Lists are exchanged weight by weight.
                num_calls = round(self._num_layer_weights(group)) if is_listed else 1
                size = int(ceil_divide(layers[start], num_calls))
                node = dataclasses.replace(
                    self._collective(role, operator, size, ranks),
                    section=Section.LAYER,
                    first_layer=self._rank.stage_layers[start],
                    repeat=index - start,
                )
                yield from (node for _ in range(num_calls))
            start = index
        for section in (Section.EMBEDDING, Section.HEAD):
            num_params = self._num_outside(group, section)
            if num_params:
                node = self._collective(role, operator, num_params, ranks)
                yield dataclasses.replace(node, section=section)

    def _num_outside(self, group: ParameterGroup, section: Section) -> int:
        if group.name == "expert":
            return 0
        parts = self._weight_parts
        return sum(_num_kept(node, parts) for node in self._forward if node.section is section)

    def _norm_reduction(self) -> Iterator[OperatorNode]:
        """Yield the sum over tp of gradients that each rank has of its own tokens or heads alone.

        Norms of heads are whole on every rank but saw its heads; with tokens split, all that is
        whole saw its tokens.
        """
        ranks = axis_group(self._rank.layout, "tp")
        if ranks.degree == 1 or self._scenario.weight_parallel == "isp":
            return
        splits = splits_tokens(self._rank, self._scenario)
        num_params = sum(
            int(node.num_weights)
            for node in self._forward
            if node.partition is Partition.HEADS
            or (splits and node.partition is Partition.REPLICATED and not _is_expert(node))
        )
        if num_params:
            yield self._collective("norm_gradient_all_reduce", "all_reduce", num_params, ranks)

    def _embedding_reduction(self) -> Iterator[OperatorNode]:
        """Yield the sum of a tied embedding's gradients over the first and the last stage."""
        rank, pp = self._rank, self._rank.layout.pp
        last = (rank.num_stages - 1) % pp
        is_end = rank.stage in (0, rank.num_stages - 1)
        if not (rank.model.has_tied_embedding and pp > 1 and last and is_end):
            return
        role = "embedding" if rank.stage == 0 else "lm_head"
        table = next(node for node in self._forward if node.role == role)
        num_params = _num_kept(table, self._weight_parts)
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
