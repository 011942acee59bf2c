"""What a pass needs for a moment, above what it finds and what it leaves.

The backward pass is walked operator by operator. At each there are the gradients of its output and
of its input, the gradient of the residual stream, and what all operators before it have kept; what
later ones kept is freed. A layer that runs again has all of its tensors then.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from foretoken.domain.backward_collectives import keeps_gathered_input
from foretoken.domain.estimate import DType
from foretoken.domain.graph import OperatorNode, Section
from foretoken.domain.lowering import Nodes
from foretoken.domain.scenario import TrainingScenario
from foretoken.domain.trainer import TrainerProfile
from foretoken.simulator.training.memory.chunk import ChunkGraph
from foretoken.simulator.training.memory.saved_tensor import SavedTensor, layers_of
from foretoken.simulator.training.memory.state_bytes import weight_bytes
from foretoken.simulator.training.memory.tensor_size import read_bytes, written_bytes

# Keys of what lies before and after all layers.
_BEFORE, _AFTER = -1, 1_000_000_000
# Operators that only add gradients to those that are there.
_NO_TEMPORARY = ("residual_add", "embedding", "cast", "bias_add")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkNeed:
    """Bytes of one micro batch of a chunk.

    `saved` is kept between its passes. `forward` and `backward` are what the passes take at most
    above what is kept when the forward pass has ended. `weight_half` is what a backward pass of the
    input alone leaves for that of the weights. `largest_saved` names the operator that keeps most,
    `largest_passing` the one at which a backward pass takes most.
    """

    saved: float
    forward: float
    backward: float
    weight_half: float
    largest_saved: str = ""
    largest_passing: str = ""


def measure_chunk(chunk: ChunkGraph, scenario: TrainingScenario) -> ChunkNeed:
    """Return what one micro batch of a chunk needs."""
    walk = _Walk(chunk, scenario, scenario.trainer.resolve())
    backward, role = walk.backward_peak()
    largest = max(chunk.plan.saved, key=lambda tensor: tensor.total_bytes, default=None)
    return ChunkNeed(
        saved=chunk.plan.saved_bytes,
        forward=walk.forward_peak(),
        backward=backward,
        weight_half=walk.weight_half(),
        largest_saved=largest.role if largest else "",
        largest_passing=role,
    )


class _Walk:
    """Goes over the operators of a chunk, as many layers of a kind as differ."""

    def __init__(
        self, chunk: ChunkGraph, scenario: TrainingScenario, trainer: TrainerProfile
    ) -> None:
        self._trainer = trainer
        self._tp = scenario.layout.tp
        self._keeps_inputs = keeps_gathered_input(scenario)
        self._roles = {node.role for node in chunk.forward}
        self._saved = _by_place(chunk.plan.saved)
        self._rebuilt = _by_place(chunk.plan.rebuilt)
        self._places = list(_places(chunk.forward, chunk.rank.stage_layers))
        self._all = (*chunk.plan.saved, *chunk.plan.rebuilt)
        self.stream_bytes = _stream_bytes(chunk.forward)
        self._has_pipeline = chunk.rank.num_stages > 1 and chunk.rank.stage > 0

    def backward_peak(self) -> tuple[float, str]:
        """Return the most a backward pass takes above what was kept when it began, and where."""
        peak, freed = (0.0, ""), 0.0
        seen = set()
        # The gradient that was last handed to the stage before is still referred to.
        handed = self.stream_bytes if self._has_pipeline else 0.0
        for place, nodes in reversed(self._places):
            saved, rebuilt = self._saved[place], self._rebuilt[place]
            kind = (*(node.role for node in nodes), sum(saved.values()), sum(rebuilt.values()))
            if kind not in seen:
                seen.add(kind)
                size, role = self._place_peak(nodes, saved, rebuilt)
                peak = max(peak, (size - freed + handed, role))
            freed += sum(saved.values())
        return peak

    def _place_peak(
        self, nodes: Sequence[OperatorNode], saved: Mapping[str, int], rebuilt: Mapping[str, int]
    ) -> tuple[float, str]:
        """Return the most a layer takes above what was kept when its backward pass began."""
        alive, freed = float(sum(rebuilt.values())), 0.0
        peak = (alive, "")
        for node in reversed(nodes):
            peak = max(peak, (alive - freed + self._gradient_bytes(node), node.role))
            alive -= rebuilt.get(node.role, 0)
            freed += saved.get(node.role, 0)
        return peak

    def forward_peak(self) -> float:
        """Return the most a forward pass takes above what it leaves."""
        peak, later = 0.0, 0.0
        for place, nodes in reversed(self._places):
            saved = self._saved[place]
            for node in reversed(nodes):
                passing = self._passing_bytes(node, saved)
                peak = max(peak, passing - later)
                later += saved.get(node.role, 0)
        return peak

    def weight_half(self) -> float:
        """Return what weight gradients need: inputs of matrix products, gradients of outputs."""
        inputs = {(tensor.role, tensor.layers): tensor.total_bytes for tensor in self._all}
        roles = {node.role: node for _, nodes in self._places for node in nodes if node.num_weights}
        total = float(sum(size for (role, _), size in inputs.items() if role in roles))
        for _, nodes in self._places:
            matrices = (node for node in nodes if node.operator in ("gemm", "grouped_gemm"))
            total += sum(written_bytes(node) for node in matrices)
        return total

    def _passing_bytes(self, node: OperatorNode, saved: Mapping[str, int]) -> float:
        if node.operator == "cross_entropy":
            return self._loss_bytes(node)
        if node.operator in _NO_TEMPORARY:
            return self.stream_bytes
        kept = saved.get(node.role, 0)
        return max(0.0, read_bytes(node) - kept) + written_bytes(node)

    def _loss_bytes(self, node: OperatorNode) -> float:
        """Return what the loss needs beside what it keeps: logits, and copies of them in fp32."""
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
        inside, outside = read_bytes(node), written_bytes(node)
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


def _by_place(tensors: Sequence[SavedTensor]) -> defaultdict[int, dict[str, int]]:
    """Return bytes by layer, or by what lies before and after all, and by role."""
    places: defaultdict[int, dict[str, int]] = defaultdict(dict)
    for tensor in tensors:
        before_or_after = _BEFORE if tensor.section is Section.EMBEDDING else _AFTER
        for layer in tensor.layers or (before_or_after,):
            roles = places[layer]
            roles[tensor.role] = roles.get(tensor.role, 0) + tensor.num_bytes
    return places


def _places(
    forward: Nodes, layers: Sequence[int]
) -> Iterator[tuple[int, tuple[OperatorNode, ...]]]:
    """Yield the operators before all layers, of every layer, and after all."""
    in_layer: defaultdict[int, list[OperatorNode]] = defaultdict(list)
    for node in forward:
        for layer in layers_of(node):
            in_layer[layer].append(node)
    yield _BEFORE, tuple(node for node in forward if node.section is Section.EMBEDDING)
    for layer in layers:
        yield layer, tuple(in_layer[layer])
    yield _AFTER, tuple(node for node in forward if node.section is Section.HEAD)


def _stream_bytes(forward: Nodes) -> float:
    for node in forward:
        if node.role in ("input_norm", "final_norm"):
            return written_bytes(node)
    return 0.0
