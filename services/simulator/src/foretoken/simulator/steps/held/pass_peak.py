"""What a pass needs for a moment, above what it finds and what it leaves.

The backward pass is walked operator by operator. At each there are the gradients of its output and
of its input, the gradient of the residual stream, and what all operators before it have kept; what
later ones kept is freed. A layer that runs again has all of its tensors then.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Annotated

import numpy as np

from foretoken.domain.lowering.backward import keeps_gathered_input
from foretoken.domain.lowering.graph import OperatorNode, Section
from foretoken.domain.lowering.options import Nodes
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.steps.axes import CASE, CHUNK, PLACE, FloatPerCase
from foretoken.simulator.steps.held.saved_tensor import SavedTensor
from foretoken.simulator.steps.held.state_bytes import weight_bytes
from foretoken.simulator.steps.held.tensor_size import read_bytes, written_bytes

_FIELDS = ("saved", "forward", "backward", "weight_half")
# Keys of what lies before and after all layers.
_BEFORE, _AFTER = -1, 1_000_000_000
# Operators that only add gradients to those that are there.
_MATRICES = ("gemm", "grouped_gemm")
_NO_TEMPORARY = ("residual_add", "embedding", "cast", "bias_add")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChunkNeeds:
    """Bytes of one micro batch of every chunk.

    `saved` is kept between its passes. `forward` and `backward` are what the passes take at most
    above what is kept when the forward pass has ended. `weight_half` is what a backward pass of the
    input alone leaves for that of the weights.
    """

    saved: Annotated[Floats, CASE, CHUNK]
    weight_half: Annotated[Floats, CASE, CHUNK]
    forward: Annotated[Floats, CASE, CHUNK]
    backward: Annotated[Floats, CASE, CHUNK]

    @property
    def counted(self) -> Floats:
        """All in the order of `FullMoments`: [case, 4, chunk]."""
        return np.stack([self.saved, self.weight_half, self.forward, self.backward], axis=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceNeed:
    """Bytes of one micro batch in one layer, or in what lies before or after all layers.

    As `ChunkNeeds` has them of a chunk of this place alone, but for what a pipeline adds; `forward`
    is negative where later operators keep more than any takes. `kept` are the tensors that are
    saved, `largest_passing` is the operator at which a backward pass takes most.
    """

    kept: Sequence[SavedTensor]
    forward: float
    backward: float
    weight_half: float
    largest_passing: str = ""

    @property
    def saved(self) -> int:
        """What is kept between the passes."""
        return sum(tensor.num_bytes for tensor in self.kept)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlaceColumns:
    """`PlaceNeed` in columns, and the residual stream, which stages of a pipeline hand on."""

    saved: Annotated[Floats, CASE, PLACE]
    forward: Annotated[Floats, CASE, PLACE]
    backward: Annotated[Floats, CASE, PLACE]
    weight_half: Annotated[Floats, CASE, PLACE]
    stream: FloatPerCase

    @classmethod
    def of_needs(
        cls, needs: Sequence[Sequence[PlaceNeed]], stream_bytes: Sequence[float]
    ) -> "PlaceColumns":
        """Return the needs of cases with equally many places."""
        columns = {
            name: np.array([[getattr(place, name) for place in own] for own in needs], dtype=float)
            for name in _FIELDS
        }
        return cls(stream=np.array(stream_bytes), **columns)

    def of_cases(self, cases: Ints) -> "PlaceColumns":
        """Return the needs of some cases."""
        return PlaceColumns(**{item.name: getattr(self, item.name)[cases] for item in fields(self)})

    def take(self, places: Ints) -> "PlaceColumns":
        """Return these places, in this order."""
        return replace(self, **{name: getattr(self, name)[:, places] for name in _FIELDS})


def cut_places(places: PlaceColumns, layers: Sequence[int]) -> ChunkNeeds:
    """Return what chunks of so many layers need, in columns [case, chunk], in the model's order."""
    starts, stops = chunk_bounds(layers)
    sums = np.cumsum(places.saved, axis=1)
    # What a chunk keeps up to a place is there in its passes; what it keeps later is not.
    kept = sums[:, stops - 1]
    forward, backward = (
        np.maximum.reduceat(values + sums, starts, axis=1) - kept
        for values in (places.forward, places.backward)
    )
    # The gradient that was last handed to the chunk before is still referred to.
    handed = places.stream[:, None] * (np.arange(len(layers)) > 0)
    return ChunkNeeds(
        saved=np.add.reduceat(places.saved, starts, axis=1),
        forward=np.maximum(0.0, forward),
        backward=np.maximum(0.0, backward) + handed,
        weight_half=np.add.reduceat(places.weight_half, starts, axis=1),
    )


def chunk_bounds(layers: Sequence[int]) -> tuple[Ints, Ints]:
    """Return the first place of every chunk and the one after its last, of layers + 2 places."""
    stops = np.cumsum(layers) + 1
    starts = np.concatenate([[0], stops[:-1]])
    stops[-1] += 1
    return starts, stops


class PlaceMeter:
    """Goes over the operators of a model, place by place."""

    def __init__(self, forward: Nodes, scenario: TrainingScenario) -> None:
        """Keep what all plans of recomputation have in common."""
        self._forward = forward
        self._trainer = scenario.trainer.resolve()
        self._tp = scenario.layout.tp
        self._keeps_inputs = keeps_gathered_input(scenario)
        self._roles = {node.role for node in forward}
        self.stream_bytes = _stream_bytes(forward)
        self._read = {id(node): read_bytes(node) for node in forward}
        self._written = {id(node): written_bytes(node) for node in forward}
        self._gradients = {id(node): self._gradient_bytes(node) for node in forward}

    def measure(
        self, saved: Sequence[SavedTensor], rebuilt: Sequence[SavedTensor], layers: Sequence[int]
    ) -> tuple[PlaceNeed, ...]:
        """Return the needs of what lies before all layers, of what lies after, and of these layers.

        `saved` and `rebuilt` are as `RecomputePlan` has them.
        """
        kept, again = _by_place(saved, layers), _by_place(rebuilt, layers)
        return tuple(
            self._measure_place(nodes, kept[place], again[place])
            for place, nodes in _places(self._forward, layers)
        )

    def _measure_place(
        self,
        nodes: Sequence[OperatorNode],
        kept: Sequence[SavedTensor],
        again: Sequence[SavedTensor],
    ) -> PlaceNeed:
        saved, rebuilt = _by_role(kept), _by_role(again)
        backward, role = self._backward_peak(nodes, saved, rebuilt)
        return PlaceNeed(
            kept=kept,
            forward=self._forward_peak(nodes, saved),
            backward=backward,
            weight_half=self._weight_half(nodes, saved, rebuilt),
            largest_passing=role,
        )

    def _backward_peak(
        self, nodes: Sequence[OperatorNode], saved: Mapping[str, int], rebuilt: Mapping[str, int]
    ) -> tuple[float, str]:
        """Return the most a place takes above what was kept when its backward pass began."""
        alive, freed = float(sum(rebuilt.values())), 0.0
        peak = (alive, "")
        for node in reversed(nodes):
            peak = max(peak, (alive - freed + self._gradients[id(node)], node.role))
            alive -= rebuilt.get(node.role, 0)
            freed += saved.get(node.role, 0)
        return peak

    def _forward_peak(self, nodes: Sequence[OperatorNode], saved: Mapping[str, int]) -> float:
        """Return the most a forward pass of a place takes above what it leaves."""
        peak, later = -inf, 0.0
        for node in reversed(nodes):
            peak = max(peak, self._passing_bytes(node, saved) - later)
            later += saved.get(node.role, 0)
        return peak

    def _weight_half(
        self, nodes: Sequence[OperatorNode], saved: Mapping[str, int], rebuilt: Mapping[str, int]
    ) -> float:
        """Return what weight gradients need: inputs of matrix products, gradients of outputs."""
        roles = {node.role for node in nodes if node.num_weights}
        inputs = sum(saved.get(role, 0) + rebuilt.get(role, 0) for role in roles)
        return inputs + sum(self._written[id(n)] for n in nodes if n.operator in _MATRICES)

    def _passing_bytes(self, node: OperatorNode, saved: Mapping[str, int]) -> float:
        if node.operator == "cross_entropy":
            return self._loss_bytes(node)
        if node.operator in _NO_TEMPORARY:
            return self.stream_bytes
        kept = saved.get(node.role, 0)
        return max(0.0, self._read[id(node)] - kept) + self._written[id(node)]

    def _loss_bytes(self, node: OperatorNode) -> float:
        """Return what the loss needs besides what it keeps: logits, and copies of them in fp32."""
        if self._trainer.overwrites_logits:
            return 0.0
        elements = int(node.dims["num_tokens"] * node.dims["vocab"])
        copies = 1 if self._trainer.casts_logits else 0
        return float(node.dtype.bytes_of(elements) + copies * DType.FP32.bytes_of(elements))

    def _loss_gradient(self, node: OperatorNode) -> float:
        """Return the gradient of the logits, where it takes no other tensor's place."""
        if self._trainer.overwrites_logits:
            return 0.0
        elements = int(node.dims["num_tokens"] * node.dims["vocab"])
        if self._trainer.overwrites_softmax:
            return float(node.dtype.bytes_of(elements))
        # Of the logarithm of the softmax, and of the logits in fp32.
        return float(2 * DType.FP32.bytes_of(elements))

    def _gradient_bytes(self, node: OperatorNode) -> float:
        """Return what is there while an operator runs backward, kept tensors not counted."""
        if node.operator == "cross_entropy":
            return self._loss_gradient(node)
        in_layer = node.section is Section.LAYER
        stream = self.stream_bytes if in_layer else 0.0
        if node.operator in _NO_TEMPORARY:
            return stream + self._weight_gradient(node)
        inside, outside = self._read[id(node)], self._written[id(node)]
        total = inside + outside + stream + self._weight_gradient(node)
        if f"{node.role}_input_all_gather" in self._roles:
            # The part of the input's gradient that stays, and the input, where gathered again.
            total += inside / self._tp + (0.0 if self._keeps_inputs else inside)
        if f"{node.role}_reduce_scatter" in self._roles:
            total += outside / self._tp
        return total

    def _weight_gradient(self, node: OperatorNode) -> float:
        """Return the bytes of a weight gradient before it is added to the sum."""
        is_separate = self._trainer.gradient_accumulation != "fused"
        has_placeholder = self._trainer.keeps_gradient_placeholders
        if is_separate or (has_placeholder and node.section is not Section.LAYER):
            return float(weight_bytes(node))
        return 0.0


def _by_place(
    tensors: Sequence[SavedTensor], layers: Sequence[int]
) -> defaultdict[int, list[SavedTensor]]:
    """Return the tensors of these layers, and of what lies before and after all."""
    places: defaultdict[int, list[SavedTensor]] = defaultdict(list)
    for tensor in tensors:
        before_or_after = (_BEFORE if tensor.section is Section.EMBEDDING else _AFTER,)
        has_layers = tensor.section is Section.LAYER
        among = set(tensor.layers) if has_layers else ()
        for place in [item for item in layers if item in among] if has_layers else before_or_after:
            places[place].append(tensor)
    return places


def _by_role(tensors: Sequence[SavedTensor]) -> dict[str, int]:
    """Return bytes by the role of the operator."""
    roles: dict[str, int] = {}
    for tensor in tensors:
        roles[tensor.role] = roles.get(tensor.role, 0) + tensor.num_bytes
    return roles


def _places(
    forward: Nodes, layers: Sequence[int]
) -> Iterator[tuple[int, tuple[OperatorNode, ...]]]:
    """Yield the operators before all layers, after all, and of every layer."""
    inside = [(node, node.layers) for node in forward if node.section is Section.LAYER]
    yield _BEFORE, tuple(node for node in forward if node.section is Section.EMBEDDING)
    yield _AFTER, tuple(node for node in forward if node.section is Section.HEAD)
    for layer in layers:
        yield layer, tuple(node for node, among in inside if layer in among)


def _stream_bytes(forward: Nodes) -> float:
    for node in forward:
        if node.role in ("input_norm", "final_norm"):
            return written_bytes(node)
    return 0.0
