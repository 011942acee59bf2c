"""How many parameters the chunks of a shape have, by kind of chunk."""

from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.domain.lowering.graph import OperatorNode, Section
from foretoken.domain.lowering.sequence_parallel import splits_tokens
from foretoken.domain.units import ceil_divide
from foretoken.simulator.search.training.chunk_kinds import ChunkKind
from foretoken.simulator.search.training.shapes import Shape
from foretoken.simulator.steps.sharding import ScenarioDegrees
from foretoken.simulator.training.state_sharding import (
    is_expert,
    is_summed_over_tp,
    weight_parts,
)

_HEAD, _EMBEDDING = "lm_head", "embedding"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCounts:
    """Parameters of one chunk as a rank keeps them before states are sharded.

    `layer` is of the largest layer, `tensors` are how many tensors they are. `norms` are summed
    over tp, `table` is a tied embedding or its copy.
    """

    dense: int
    dense_layer: int
    dense_tensors: int
    expert: int
    expert_layer: int
    expert_tensors: int
    norms: int
    table: int


class ShapeWeights:
    """The operators of a shape that have weights, and what chunks have of them."""

    def __init__(self, shape: Shape) -> None:
        """Find the operators with weights."""
        self._degree = ScenarioDegrees.of(shape.scenario).weight_parts
        self._splits = splits_tokens(shape.rank, shape.scenario)
        self._weights = [_Weight.of_node(node) for node in shape.forward if _has_weights(node)]
        self._is_tied = shape.rank.model.has_tied_embedding
        self._known: dict[ChunkKind, ParameterCounts] = {}

    @property
    def key(self) -> tuple[object, ...]:
        """What counts depend on, equal for shapes whose counts are."""
        weights = tuple(
            (weight.once, weight.node.role, weight.node.has_bias) for weight in self._weights
        )
        return self._degree, self._splits, weights

    def count(self, kind: ChunkKind) -> ParameterCounts:
        """Return the parameters of a chunk."""
        if kind not in self._known:
            self._known[kind] = self._count(kind)
        return self._known[kind]

    def _count(self, kind: ChunkKind) -> ParameterCounts:
        held = [(weight, kind.count(weight.node)) for weight in self._weights]
        held = [
            (weight, count)
            for weight, count in held
            if count and (kind.has_copy or not weight.is_shared)
        ]
        dense = [item for item in held if not item[0].is_expert]
        experts = [item for item in held if item[0].is_expert]
        return ParameterCounts(
            dense=self._total(dense, self._degree),
            dense_layer=self._largest_layer(dense, self._degree, kind),
            dense_tensors=_num_tensors(dense),
            expert=self._total(experts, 1),
            expert_layer=self._largest_layer(experts, 1, kind),
            expert_tensors=_num_tensors(experts),
            norms=sum(
                weight.once * count
                for weight, count in held
                if is_summed_over_tp(weight.node, splits_tokens=self._splits)
            ),
            table=sum(
                weight.kept(count, self._degree)
                for weight, count in held
                if weight.node.role in (_HEAD, _EMBEDDING)
            )
            if self._is_tied
            else 0,
        )

    def _total(self, held: Sequence[tuple["_Weight", int]], degree: int) -> int:
        return sum(weight.kept(count, degree) for weight, count in held)

    def _largest_layer(
        self, held: Sequence[tuple["_Weight", int]], degree: int, kind: ChunkKind
    ) -> int:
        """Return the parameters of the largest layer: the first and the last are of all types."""
        most = 0
        for at in {*kind.layers[:1], *kind.layers[-1:]}:
            total = sum(
                weight.kept(count, degree) // count
                for weight, count in held
                if weight.node.section is Section.LAYER and at in weight.layers
            )
            most = max(most, total)
        return most


@dataclass(frozen=True, slots=True)
class _Weight:
    """An operator with weights: `once` of them in each repetition."""

    node: OperatorNode
    once: int
    is_shared: bool
    is_expert: bool

    @classmethod
    def of_node(cls, node: OperatorNode) -> "_Weight":
        return cls(node, _num_weights(node) // node.repeat, node.shares_weights, is_expert(node))

    @property
    def layers(self) -> range:
        node = self.node
        stop = node.first_layer + node.repeat * node.layer_stride
        return range(node.first_layer, stop, node.layer_stride)

    def kept(self, count: int, degree: int) -> int:
        """Return what a rank keeps of `count` repetitions."""
        return int(ceil_divide(self.once * count, weight_parts(self.node, degree)))


def _num_tensors(held: Sequence[tuple[_Weight, int]]) -> int:
    return sum(count * weight.node.num_tensors for weight, count in held)


def _num_weights(node: OperatorNode) -> int:
    """Return the weights of all repetitions, those shared with another operator included."""
    if not node.shares_weights:
        return int(node.num_weights)
    return int(node.dims["n"] * node.dims["k"]) * node.repeat


def _has_weights(node: OperatorNode) -> bool:
    return _num_weights(node) > 0
