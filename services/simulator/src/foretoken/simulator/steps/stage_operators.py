"""The operators of a training step: of each pass of each chunk of layers, and of its end."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Self

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.domain.lowering.communication import axis_group
from foretoken.domain.lowering.graph import (
    BatchShape,
    OperatorNode,
    PrefillShape,
    RankContext,
    Section,
)
from foretoken.domain.lowering.lower import lower_backward, lower_rank
from foretoken.domain.lowering.options import (
    LoweringOptions,
    Nodes,
    TrainingOptions,
)
from foretoken.domain.lowering.training_layer import (
    check_kernels,
    scales_loss,
    update_kernels,
)
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.steps.chunk_placement import (
    ChunkPlaces,
    place_far_ends,
    place_states,
    place_transfers,
    share_embedding,
)
from foretoken.simulator.steps.pipelines.schedule import RankOrder
from foretoken.simulator.steps.program import PassNodes
from foretoken.simulator.steps.recompute import RecomputePlan, plan_recompute
from foretoken.simulator.steps.stage_hardware import StageHardware, gather_at
from foretoken.simulator.steps.state_collectives import StateExchange, exchange_states

# Backward operators that only the optimizer waits for: what a split backward pass puts off.
_WEIGHT_ROLES = ("_wgrad", "_accumulate")
_TRANSFER = "send_recv"


@dataclass(frozen=True, kw_only=True, slots=True)
class FarEnd:
    """What a chunk sends, as the links of `stage` carry it, which has others than the chunk's."""

    stage: int
    sends: Nodes
    sends_back: Nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkOperators:
    """What one rank runs for one chunk of layers.

    `forward` is what lowering returns, without what shards of states exchange; `backward` its
    mirror, without what is recomputed. `sends` are the transfers to the next chunk, `sends_back`
    those of the gradients it returns. What arrives is put together by `receives_input` and
    `receives_gradient`, before either pass. Transfers to other hardware go at the pace of the
    slower end, of which `far_end` is the other one.
    """

    rank: RankContext
    forward: Nodes
    backward: Nodes
    plan: RecomputePlan
    states: StateExchange
    sends: Nodes
    sends_back: Nodes
    receives_input: Nodes
    receives_gradient: Nodes
    far_end: FarEnd | None = None

    @property
    def forward_pass(self) -> PassNodes:
        """The forward pass of a micro batch."""
        return PassNodes(
            nodes=_in_order((*self.receives_input, *self.states.forward), self.forward, ()),
            layers=self.rank.stage_layers,
        )

    def backward_pass(self, half: str = "both") -> PassNodes:
        """Return the backward pass of a micro batch: `both` halves, or `input` or `weight` alone.

        Gathered parameters and what is recomputed come first in every layer, for the half that
        computes the gradient of the input; gradients are scattered once they are computed.
        """
        gathers, reduction = self.states.backward_gather, self.states.backward_reduction
        backward, again = self.backward, (*self.receives_gradient, *self.plan.recomputed)
        if half == "weight":
            gathers, again = (), ()
            backward = tuple(node for node in backward if _is_weight_gradient(node))
        elif half == "input":
            reduction = ()
            backward = tuple(node for node in backward if not _is_weight_gradient(node))
        return PassNodes(
            nodes=_in_order((*gathers, *again), backward, reduction),
            layers=self.rank.stage_layers[::-1],
        )

    @property
    def all_nodes(self) -> Iterator[OperatorNode]:
        """Every operator of the chunk."""
        states = self.states
        yield from (*self.forward, *self.backward, *self.plan.recomputed)
        yield from (*self.sends, *self.sends_back)
        yield from (*self.receives_input, *self.receives_gradient)
        yield from (*states.forward, *states.backward_gather, *states.backward_reduction)
        yield from (*states.reduction, *states.gather)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOperators:
    """The chunks of a step, in the order of the model, and on each rank of the pipeline its own.

    `checks` is what a rank runs on its reduced gradients before it updates its parameters, and
    `updates` what that takes, one entry per rank.
    """

    chunks: tuple[ChunkOperators, ...]
    chunks_of_rank: tuple[tuple[int, ...], ...]
    checks: tuple[Nodes, ...]
    updates: tuple[Nodes, ...]

    @property
    def all_nodes(self) -> Iterator[OperatorNode]:
        """Every operator of the step."""
        for chunk in self.chunks:
            yield from chunk.all_nodes
        for nodes in (*self.checks, *self.updates):
            yield from nodes

    def nodes_of_rank(self, rank: int) -> Iterator[OperatorNode]:
        """Yield every operator that a rank of the pipeline runs, and what others send to it."""
        for index in self.chunks_of_rank[rank]:
            yield from self.chunks[index].all_nodes
        for chunk in self.chunks:
            if chunk.far_end is not None and chunk.far_end.stage == rank:
                yield from (*chunk.far_end.sends, *chunk.far_end.sends_back)
        yield from (*self.checks[rank], *self.updates[rank])

    def with_passes(self, change: Callable[[Nodes], Nodes]) -> Self:
        """Return the same with what passes run, forward and backward, changed."""
        chunks = tuple(
            replace(
                chunk,
                forward=change(chunk.forward),
                backward=change(chunk.backward),
                plan=replace(chunk.plan, recomputed=change(chunk.plan.recomputed)),
            )
            for chunk in self.chunks
        )
        return replace(self, chunks=chunks)

    def rank_of_chunk(self, chunk: int) -> int:
        """Return the first rank of the pipeline that holds a chunk."""
        return next(rank for rank, held in enumerate(self.chunks_of_rank) if chunk in held)


def micro_batch_shape(scenario: TrainingScenario) -> BatchShape:
    """Return a micro batch of full sequences; every token has a label."""
    num_tokens = scenario.micro_batch_size * scenario.sequence_length
    prefill = prefill_dims(scenario.micro_batch_size, scenario.sequence_length, 0)
    return BatchShape(
        num_tokens=num_tokens, num_output_rows=num_tokens, prefill=PrefillShape(**prefill)
    )


def training_options(scenario: TrainingScenario, trainer: TrainerProfile) -> LoweringOptions:
    """Return what lowering has to know about a training run."""
    training = TrainingOptions(
        trainer=trainer,
        micro_batch_size=scenario.micro_batch_size,
        sequence_length=scenario.sequence_length,
        sequence_parallel=scenario.sequence_parallel,
        context_parallel=scenario.context_parallel,
        weight_parallel=scenario.weight_parallel,
        weight_degree=scenario.weight_degree or scenario.layout.tp,
        expert_tp=scenario.expert_tp,
    )
    return LoweringOptions(
        dtype=scenario.dtype,
        has_loss=True,
        mla_form="operators",
        moe_imbalance_ratio=scenario.moe_imbalance_ratio,
        moe_capacity_factor=scenario.moe_capacity_factor,
        moe_routing=scenario.moe_routing or LoweringOptions(dtype=scenario.dtype).moe_routing,
        training=training,
    )


def lower_chunk(
    scenario: TrainingScenario,
    options: LoweringOptions,
    rank: RankContext,
    before: ChunkOperators | None,
    places: ChunkPlaces,
) -> ChunkOperators:
    """Return the operators of one rank for one chunk of layers, `before` being the one before it.

    Raises:
        InvalidRequestError: the layout does not fit the model.

    """
    hardware = StageHardware.of_scenario(scenario)
    rank = hardware.place(rank, places.holders(rank.stage)[0])
    nodes = lower_rank(micro_batch_shape(scenario), options, rank)
    nodes = share_embedding(nodes, places, rank)
    forward = tuple(node for node in nodes if node.section is not Section.BOUNDARY)
    boundary = tuple(node for node in nodes if node.section is Section.BOUNDARY)
    sends = tuple(node for node in boundary if node.operator == _TRANSFER)
    far = place_far_ends(sends, places, rank, hardware)
    sends = place_transfers(sends, places, rank, hardware)
    gathers = tuple(node for node in boundary if node.operator != _TRANSFER) if sends else ()
    states = exchange_states(forward, rank, scenario)
    return ChunkOperators(
        rank=rank,
        forward=forward,
        backward=lower_backward(forward, options),
        plan=plan_recompute(forward, scenario, rank),
        states=place_states(states, places, rank, scenario),
        sends=sends,
        sends_back=lower_backward(sends, options),
        receives_input=(gather_at(before.receives_gradient, before.rank, rank) if before else ()),
        receives_gradient=gathers,
        far_end=(
            None
            if far is None
            else FarEnd(stage=far[0], sends=far[1], sends_back=lower_backward(far[1], options))
        ),
    )


def lower_step(
    scenario: TrainingScenario,
    trainer: TrainerProfile,
    ranks: Sequence[RankContext],
    orders: Sequence[RankOrder],
) -> StepOperators:
    """Return all operators of a step, whose chunks are `ranks`.

    Raises:
        InvalidRequestError: the layout does not fit the model.

    """
    options = training_options(scenario, trainer)
    places = ChunkPlaces.of_orders(orders)
    _check_holders(places, StageHardware.of_scenario(scenario), len(ranks))
    chunks: list[ChunkOperators] = []
    for rank in ranks:
        chunks.append(lower_chunk(scenario, options, rank, chunks[-1] if chunks else None, places))
    updated = [
        sum(chunks[index].states.num_updated for index in indices)
        for indices in places.chunks_of_rank
    ]
    hardware = StageHardware.of_scenario(scenario)
    agreed = [
        list_agreements(scenario, trainer, hardware.place(ranks[0], rank))
        for rank in range(len(updated))
    ]
    return StepOperators(
        chunks=tuple(chunks),
        chunks_of_rank=places.chunks_of_rank,
        checks=tuple(
            (*check_kernels(count, scenario.dtype, trainer), *together)
            for count, together in zip(updated, agreed, strict=True)
        ),
        updates=tuple(update_kernels(count, scenario.dtype, trainer) for count in updated),
    )


def list_agreements(
    scenario: TrainingScenario, trainer: TrainerProfile, rank: RankContext
) -> Nodes:
    """Return how the ranks of a replica agree on a norm, and on whether any gradient overflowed."""
    axes = ("dp", "cp", "pp", "tp") if scenario.zero_stage else ("pp", "tp")
    groups = [axis_group(scenario.layout, axis) for axis in axes]
    num_ranks = prod(group.degree for group in groups)
    checks = {
        "overflow": scales_loss(scenario.dtype, trainer),
        "gradient_norm": trainer.clips_gradients,
    }
    per_node = prod(group.dims(rank.devices_per_node)["devices_per_node"] for group in groups)
    return tuple(
        OperatorNode(
            role=f"{name}_all_reduce",
            group="collective",
            section=Section.OPTIMIZER,
            operator="all_reduce",
            dims={
                "message_bytes": int(DType.FP32.num_bytes),
                "devices_per_node": per_node,
                "num_nodes": num_ranks // per_node,
            },
            dtype=DType.FP32,
            axis=next(group.axis for group in groups if group.degree > 1),
        )
        for name, is_checked in checks.items()
        if is_checked and num_ranks > 1
    )


def _check_holders(places: ChunkPlaces, hardware: StageHardware, num_chunks: int) -> None:
    for chunk in range(num_chunks):
        first, *others = places.holders(chunk)
        for other in others:
            if not hardware.is_alike(first, other):
                problem = f"stages {first} and {other} hold the same layers in this schedule"
                raise InvalidRequestError.of_field(
                    "stage_devices", f"{problem} and must have the same device and topology"
                )


def _is_weight_gradient(node: OperatorNode) -> bool:
    return node.role.endswith(_WEIGHT_ROLES)


def _in_order(before: Nodes, nodes: Nodes, after: Nodes) -> Nodes:
    """Return a pass with what `before` and `after` add in every layer and outside of layers.

    What `before` has outside of layers comes first of all, and what `after` has there last.
    """
    layers = [node for node in nodes if node.section is Section.LAYER]
    first = nodes.index(layers[0]) if layers else len(nodes)
    outside = Section.LAYER
    return (
        *(node for node in before if node.section is not outside),
        *nodes[:first],
        *(node for node in before if node.section is outside),
        *layers,
        *(node for node in after if node.section is outside),
        *(node for node in nodes[first:] if node.section is not outside),
        *(node for node in after if node.section is not outside),
    )
