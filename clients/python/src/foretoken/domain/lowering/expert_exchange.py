"""Bring the tokens of a training step to their experts and back.

The ranks of tp, cp and dp hold experts on a mesh of their own (`placement.ExpertMesh`). Each sends
its pairs of a token and an expert to the rank of the expert; ranks that split an expert gather what
they got and scatter their sums. Where tensor parallelism left all tokens on every rank, each first
takes its share of them and they are gathered at the end, unless it splits every expert itself.

An all-to-all sends a token once for each of its experts, of which its rank first makes as many
copies and at the end sums what came back. With `sends_tokens_once` a token crosses the network once
for each node that has any of them, to be spread over the node's own links meanwhile; inside one
node it is sent once for each rank. The sums come back the same way, so that a rank copies and sums
nothing before and after. With `sends_scores` the router's weight of each pair follows on its own.
Source: Megatron-Core, `MoEAlltoAllTokenDispatcher` and `MoEFlexTokenDispatcher`; Singh et al., "A
Hybrid Tensor-Expert-Data Parallelism Approach to Optimize Mixture-of-Experts Training", 2023
(dropping copied tokens); DeepSeek-V3 Technical Report, 2024, section 3.2.2, and DeepEP (tokens sent
once).
"""

import dataclasses
from collections.abc import Iterator, Sequence

from foretoken.domain.lowering.communication import (
    PlacedGroup,
    axis_group,
    expert_mesh,
    overlapped_with,
)
from foretoken.domain.lowering.context_parallel import ATTENTION_KERNELS
from foretoken.domain.lowering.expert_capacity import ExpertCapacity
from foretoken.domain.lowering.expert_layer import (
    ExpertRouting,
    count_places,
    expert_load,
    is_expert_node,
    larger,
    reached_places,
    rounded,
)
from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.lowering.options import LayoutCases, Lowering, TrainingOptions
from foretoken.domain.lowering.sequence_parallel import splits_tokens
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.layer import LayerPart
from foretoken.domain.models.stack import stack_of
from foretoken.domain.requests.limit import Limit
from foretoken.domain.units import Quantity


def expert_limits(
    cases: LayoutCases, training: TrainingOptions, experts: LayerPart
) -> Iterator[Limit]:
    """Yield why the experts of a model cannot be spread in training."""
    tp, ep, width, num_ranks = cases.tp, cases.ep, cases.expert_width, cases.stage_ranks
    yield Limit(
        "experts",
        experts["num_experts"] % ep != 0,
        lambda: f"{ep} does not divide the {experts['num_experts']} experts of {cases.model.name}",
    )
    yield Limit(
        "experts",
        num_ranks % (width * ep) != 0,
        lambda: (
            f"experts over {ep} groups of {width} ranks do not divide the {num_ranks} ranks"
            " of tp, cp and dp"
        ),
    )
    yield Limit(
        "experts",
        experts["intermediate"] % width != 0,
        lambda: (
            f"the {width} ranks that share an expert do not divide its width"
            f" {experts['intermediate']}"
        ),
    )
    num_tokens = cases.micro_batch_size * training.sequence_length // cases.cp
    yield Limit(
        "sequence",
        num_tokens % tp != 0,
        lambda: f"tp {tp} does not divide the {num_tokens} tokens of a rank to route",
    )


def distribute_experts(
    nodes: Sequence[OperatorNode], lowering: Lowering
) -> tuple[OperatorNode, ...]:
    """Return the graph with the experts of one rank and the exchanges around them."""
    training = lowering.options.training
    if training is None:
        return tuple(nodes)
    kernel = next((n.role for n in nodes if n.operator in ATTENTION_KERNELS), "")
    halves = stack_of(lowering.rank.model).layers
    spreads: dict[LayerPart, _Spread] = {}
    written: list[OperatorNode] = []
    for node in nodes:
        part = halves[node.first_layer].feed_forward if is_expert_node(node) else None
        if part is None:
            written.append(node)
            continue
        # The first operator of experts is the one that sees every token once.
        if part not in spreads:
            spreads[part] = _Spread(lowering, training, part, node.dims["num_tokens"], kernel)
        written.extend(spreads[part].write(node))
    return tuple(written)


class _Spread:
    """The experts of one rank for `num_tokens` that its tensor-parallel group routes."""

    def __init__(
        self,
        lowering: Lowering,
        training: TrainingOptions,
        part: LayerPart,
        num_tokens: Quantity,
        kernel: str,
    ) -> None:
        rank = lowering.rank
        self._part, self._kernel = part, kernel
        self._routing = ExpertRouting(top_k=part["top_k"], num_experts=part["num_experts"])
        self._hidden = part["latent"] or rank.model.hidden
        self._mesh = expert_mesh(rank.layout, training.expert_tp)
        self._trainer, self._dtype = training.trainer, lowering.options.dtype
        self._tensor = PlacedGroup.of_rank(axis_group(rank.layout, "tp"), rank)
        self._experts = PlacedGroup.of_rank(self._mesh.expert_group, rank)
        self._width = PlacedGroup.of_rank(self._mesh.tensor_group, rank)
        self._num_routed = num_tokens
        has_copies = rank.layout.tp > 1 and not splits_tokens(rank, training)
        # Ranks that split every expert as they split all else need no share of the tokens.
        self._is_summed = has_copies and self._mesh.ep == 1 and self._mesh.tp == rank.layout.tp
        self._is_dropped = has_copies and not self._is_summed
        self._num_own = num_tokens if self._is_summed else num_tokens // rank.layout.tp
        self._num_pairs, self._load_ratio = self._load(lowering)
        self._num_copies = self._count_copies(self._experts.dims["num_nodes"])
        self._slowness = self._count_slowness()

    def _count_copies(self, num_nodes: int) -> float:
        """Return how often a token is sent, to its own rank or node too."""
        part = self._part
        if not self._trainer.sends_tokens_once:
            return part["top_k"]
        if num_nodes == 1:
            return self._count_ranks(reached_places(part, self._mesh.ep))
        most = self._trainer.nodes_per_token or reached_places(part, num_nodes)
        return count_places(self._routing, num_nodes, most)

    def _count_ranks(self, most: int) -> float:
        """Return on how many ranks the experts of a token are, of `most` there may be."""
        return count_places(self._routing, self._mesh.ep, most)

    def _count_slowness(self) -> float:
        """Return how much longer tokens take that came once and are passed on inside the node."""
        num_nodes, per_node = (self._experts.dims[n] for n in ("num_nodes", "devices_per_node"))
        ratio = self._trainer.forward_ratio
        if not (self._is_sent_once and ratio and num_nodes > 1):
            return 1.0
        most = self._trainer.nodes_per_token * per_node or reached_places(self._part, self._mesh.ep)
        received = self._num_copies * (num_nodes - 1) / num_nodes
        return max(1.0, self._count_ranks(most) / (ratio * received))

    def _load(self, lowering: Lowering) -> tuple[Quantity, float]:
        """Return the pairs that the busiest rank computes, and over the mean of what is routed."""
        part, options = self._part, lowering.options
        num_sources = self._mesh.ep * (1 if self._is_summed else self._mesh.tp)
        num_tokens = self._num_own * num_sources
        routing = ExpertRouting(
            top_k=part["top_k"],
            num_experts=part["num_experts"],
            num_ranks=self._mesh.ep,
            name=options.moe_routing,
        )
        load = expert_load(num_tokens, routing, options.moe_imbalance_ratio)
        pairs, mean = load.num_pairs, num_tokens * part["top_k"] / self._mesh.ep
        if options.moe_capacity_factor:
            capacity = ExpertCapacity(
                factor=options.moe_capacity_factor,
                num_tokens=self._num_own,
                top_k=part["top_k"],
                num_experts=part["num_experts"],
            )
            pairs = capacity.keep(pairs, self._num_local * num_sources)
        return pairs, pairs / mean

    def write(self, node: OperatorNode) -> Iterator[OperatorNode]:
        """Yield what becomes of an operator of experts on the rank."""
        yield from getattr(self, f"_{node.role.removeprefix('moe_')}")(node)

    def _permute(self, node: OperatorNode) -> Iterator[OperatorNode]:
        if not self._is_sent_once:
            yield _with_dims(node, num_tokens=self._num_own)
        if self._mesh.ep > 1:
            dtype = self._trainer.dispatch_dtype or node.written_dtype
            exchange = self._exchange(node, "moe_dispatch_all_to_all", dtype)
            yield overlapped_with(exchange, self._kernel, is_hidden=self._is_hidden)
            if self._trainer.sends_scores and not self._is_sent_once:
                scores = self._exchange(node, "moe_scores_all_to_all", DType.FP32, width=1)
                yield overlapped_with(scores, self._kernel, is_hidden=self._is_hidden)
        if self._mesh.tp > 1 and not self._is_summed:
            yield self._of_pairs(node, "moe_dispatch_all_gather", "all_gather")
        yield from self._sort(node, "moe_sort")
        yield from self._pad(node, "moe_pad")

    def _up_proj(self, node: OperatorNode) -> Iterator[OperatorNode]:
        dims = {"num_groups": self._num_local, "m": self._num_pairs}
        yield _with_dims(node, **dims, n=node.dims["n"] // self._mesh.tp)

    def _up_proj_quantize(self, node: OperatorNode) -> Iterator[OperatorNode]:
        yield _with_dims(node, num_tokens=self._num_pairs)

    def _down_proj_quantize(self, node: OperatorNode) -> Iterator[OperatorNode]:
        width = node.dims["hidden"] // self._mesh.tp
        yield _with_dims(node, num_tokens=self._num_pairs, hidden=width)

    def _activation(self, node: OperatorNode) -> Iterator[OperatorNode]:
        width = node.dims["intermediate"] // self._mesh.tp
        yield _with_dims(node, num_tokens=self._num_pairs, intermediate=width)

    def _down_proj(self, node: OperatorNode) -> Iterator[OperatorNode]:
        dims = {"num_groups": self._num_local, "m": self._num_pairs}
        yield _with_dims(node, **dims, k=node.dims["k"] // self._mesh.tp)
        yield from self._pad(node, "moe_unpad")
        yield from self._sort(node, "moe_unsort")
        if self._mesh.tp > 1 and not self._is_summed:
            yield self._of_pairs(node, "moe_combine_reduce_scatter", "reduce_scatter")
        if self._mesh.ep > 1:
            exchange = self._exchange(node, "moe_combine_all_to_all", node.written_dtype)
            yield overlapped_with(exchange, "moe_up_proj", is_hidden=self._is_hidden)

    def _unpermute(self, node: OperatorNode) -> Iterator[OperatorNode]:
        if not self._is_sent_once:
            yield _with_dims(node, num_tokens=self._num_own)
        message_bytes = node.dtype.bytes_of(self._num_routed * self._hidden)
        if self._is_summed or self._is_dropped:
            operator = "all_reduce" if self._is_summed else "all_gather"
            role = f"moe_unpermute_{operator}"
            yield self._tensor.collective(node, role, operator, message_bytes)

    @property
    def _is_hidden(self) -> bool:
        return self._trainer.overlaps_expert_exchange

    @property
    def _is_sent_once(self) -> bool:
        return self._trainer.sends_tokens_once and self._mesh.ep > 1

    @property
    def _num_local(self) -> int:
        return self._part["num_experts"] // self._mesh.ep

    def _sort(self, node: OperatorNode, role: str) -> Iterator[OperatorNode]:
        """Yield the sorting of what came from several ranks by the rank's own experts.

        A token that came once is copied for each of its experts.
        """
        is_mixed = self._num_local > 1 or self._trainer.sends_tokens_once
        if self._mesh.ep > 1 and is_mixed:
            kernels = node.num_kernels if self._is_sent_once else (1, 1)
            yield dataclasses.replace(self._copy(node, role), num_kernels=kernels)

    def _pad(self, node: OperatorNode, role: str) -> Iterator[OperatorNode]:
        """Yield the copy of rows to where products in 8 bit have them, or back."""
        if self._trainer.pads_experts and self._dtype is DType.FP8:
            yield self._copy(node, role)

    def _copy(self, node: OperatorNode, role: str) -> OperatorNode:
        """Return a copy of the rank's rows."""
        return dataclasses.replace(
            node,
            role=role,
            group="moe",
            operator="copy",
            dims={"num_tokens": self._num_pairs, "hidden": self._hidden},
            num_kernels=(1, 1),
            dtype=node.written_dtype,
            output_dtype=None,
            weight_bits=0.0,
        )

    def _exchange(
        self, node: OperatorNode, role: str, dtype: DType, width: int = 0
    ) -> OperatorNode:
        # The busiest rank ends last: it receives, or sends back, more than its own.
        num_sent = larger(rounded(self._num_own * self._num_copies * self._load_ratio), 1)
        message_bytes = dtype.bytes_of(num_sent * (width or self._hidden))
        exchange = self._experts.collective(node, role, "all_to_all", message_bytes)
        return dataclasses.replace(exchange, share=self._slowness)

    def _of_pairs(self, node: OperatorNode, role: str, operator: str) -> OperatorNode:
        message_bytes = node.written_dtype.bytes_of(self._num_pairs * self._hidden)
        return self._width.collective(node, role, operator, message_bytes)


def _with_dims(node: OperatorNode, **dims: Quantity) -> OperatorNode:
    return dataclasses.replace(node, dims={**node.dims, **dims})
