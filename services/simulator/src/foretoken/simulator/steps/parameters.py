"""Parameters of a model by place, as a rank keeps them before their states are sharded.

A place is the embedding, the head, or a layer; layers that the same operators run in are of one
kind, and one stands for all. Chunks of layers are sums over their places.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.domain.lowering.graph import OperatorNode, Section
from foretoken.domain.lowering.options import Nodes
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.units import ceil_divide
from foretoken.simulator.grid import Floats

# The places of a model: both ends, a tied head with a copy of the embedding, then the layers.
EMBEDDING, HEAD, COPIED_HEAD, LAYERS = range(4)
# What is counted of a place: parameters of its own and of experts, and weights kept in 8 bit.
FIGURES = ("dense", "expert", "narrow")
_GROUPED = "grouped_gemm"
_MATRICES = ("gemm", _GROUPED)
# The router's small matrix product is the framework's own and has no placeholder.
_ROUTER = "moe_router"


def is_expert(node: OperatorNode) -> bool:
    """Tell whether an operator's weights are those of experts."""
    return node.operator == _GROUPED


def weight_parts(node: OperatorNode, degree: int) -> int:
    """Return over how many ranks `isp` splits an operator's weights: it leaves norms whole."""
    return degree if node.operator in ("gemm", "embedding") else 1


def number_layer_kinds(forward: Nodes, num_layers: int) -> tuple[int, ...]:
    """Return the number of each layer's kind, counted from 0, given the whole model's operators.

    Layers are alike that the same operators run in.
    """
    ranges = [node.layers for node in forward]
    edges = {0, num_layers, *(end for item in ranges if item for end in (item[0], item[-1] + 1))}
    strides = {item.step for item in ranges if len(item) > 1}
    if edges == {0, num_layers} and strides <= {1}:
        return (0,) * num_layers
    kinds: dict[tuple[bool, ...], int] = {}
    return tuple(
        kinds.setdefault(tuple(layer in item for item in ranges), len(kinds))
        for layer in range(num_layers)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldWeights:
    """The operators of a model with weights, which `isp` splits over `degree` ranks.

    `layers` are some of the model's, one of each kind.
    """

    forward: Nodes
    layers: Sequence[int]
    degree: int
    trainer: TrainerProfile

    def count(self) -> Floats:
        """Return what each place has: [figure, place]."""
        counts = np.zeros((len(FIGURES), LAYERS + len(self.layers)))
        for node in self.forward:
            if node.shares_weights or node.num_weights:
                counts[:, self._places(node)] += self._figures(node)[:, None]
        return counts

    def count_placeholders(self, kinds: Sequence[int]) -> float:
        """Return the bytes that stay while layers of these kinds are held.

        They are workspaces, and the empty gradients of fused accumulation: one of each shape.
        Source: Transformer Engine 2.8 and later, `get_dummy_wgrad`.
        """
        held = {self.layers[kind] for kind in kinds}
        nodes = [node for node in self.forward if not held.isdisjoint(node.layers)]
        trainer, has_experts = self.trainer, any(is_expert(node) for node in nodes)
        workspaces = trainer.workspace_bytes + has_experts * trainer.expert_workspace_bytes
        if not trainer.keeps_gradient_placeholders:
            return workspaces
        shapes = {
            (int(node.dims["n"]), int(node.dims["k"])): node.dtype.num_bytes
            for node in nodes
            if node.operator in _MATRICES and node.role != _ROUTER
        }
        return workspaces + sum(n * k * num_bytes for (n, k), num_bytes in shapes.items())

    def _places(self, node: OperatorNode) -> list[int]:
        if node.section is Section.EMBEDDING:
            return [EMBEDDING]
        if node.section is Section.HEAD:
            return [COPIED_HEAD] if node.shares_weights else [HEAD, COPIED_HEAD]
        return [LAYERS + at for at, layer in enumerate(self.layers) if layer in node.layers]

    def _figures(self, node: OperatorNode) -> Floats:
        """Return what one repetition of an operator has."""
        if node.shares_weights:
            num_weights = int(node.dims["n"] * node.dims["k"])
        else:
            num_weights = int(node.num_weights) // node.repeat
        kept = ceil_divide(num_weights, weight_parts(node, self.degree))
        own = {"expert" if is_expert(node) else "dense": kept}
        own["narrow"] = num_weights * (node.dtype is DType.FP8)
        return np.array([own.get(name, 0) for name in FIGURES], dtype=np.float64)
