"""Parameters of a model by place, as a rank keeps them before their states are sharded.

A place is the embedding, the head, or a layer; layers that the same operators run in are of one
kind, and one stands for all. Chunks of layers are sums over their places.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.domain.lowering.graph import OperatorNode, Partition, Section
from foretoken.domain.lowering.options import Nodes
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.units import Quantity, ceil_divide
from foretoken.simulator.grid import Ints
from foretoken.simulator.steps.sharding import Degrees
from foretoken.simulator.steps.state_sums import HeldParameters

# The places of a model: both ends, a tied head with a copy of the embedding, then the layers.
EMBEDDING, HEAD, COPIED_HEAD, LAYERS = range(4)
# What is counted of a place: parameters of experts and all others (dense), and the tensors that
# they are in; what is summed over tp, tables that may be tied, weights multiplied in 8 bit.
FIGURES = (
    *("dense", "expert", "dense_tensors", "expert_tensors"),
    *("norms", "table", "dense_narrow", "expert_narrow"),
)
_TABLES = ("lm_head", "embedding")
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


def is_summed_over_tp(node: OperatorNode, *, splits_tokens: bool) -> bool:
    """Tell whether a rank of tp has gradients of its own tokens or heads alone.

    Norms of heads are whole on every rank but saw its heads; with tokens split, all that is whole
    saw its tokens.
    """
    is_own = splits_tokens and node.partition is Partition.REPLICATED and not is_expert(node)
    return node.partition is Partition.HEADS or is_own


def number_layer_kinds(forward: Nodes, num_layers: int) -> tuple[int, ...]:
    """Return the number of each layer's kind, counted from 0, given the whole model's operators.

    Layers are alike that the same operators run in.
    """
    ranges = [node.layers for node in forward]
    edges = {0, num_layers, *(end for item in ranges if item for end in (item[0], item[-1] + 1))}
    are_runs = all(len(item) == item[-1] + 1 - item[0] for item in ranges if item)
    if edges == {0, num_layers} and are_runs:
        return (0,) * num_layers
    kinds: dict[tuple[bool, ...], int] = {}
    return tuple(
        kinds.setdefault(tuple(layer in item for item in ranges), len(kinds))
        for layer in range(num_layers)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldWeights:
    """The operators of a model with weights, which `isp` splits over `degree` ranks.

    `layers` are some of the model's, one of each kind, or those of a chunk. `splits_tokens` tells
    whether ranks of tp have different tokens.
    """

    forward: Nodes
    layers: Sequence[int]
    degree: int
    trainer: TrainerProfile
    splits_tokens: bool

    def count(self) -> Ints:
        """Return what each place has: [figure, place]."""
        counts = np.zeros((len(FIGURES), LAYERS + len(self.layers)), dtype=np.int64)
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

    def _figures(self, node: OperatorNode) -> Ints:
        """Return what one repetition of an operator has."""
        if node.shares_weights:
            num_weights = int(node.dims["n"] * node.dims["k"])
        else:
            num_weights = int(node.num_weights) // node.repeat
        kept = ceil_divide(num_weights, weight_parts(node, self.degree))
        name = "expert" if is_expert(node) else "dense"
        is_summed = is_summed_over_tp(node, splits_tokens=self.splits_tokens)
        own = {
            name: kept,
            f"{name}_tensors": node.num_tensors,
            "norms": num_weights * is_summed,
            "table": kept * (node.role in _TABLES),
            f"{name}_narrow": kept * (node.dtype is DType.FP8),
        }
        return np.array([own.get(figure, 0) for figure in FIGURES], dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChunkParameters:
    """Parameters of a chunk by the ranks that hold the same, as numbers or columns of cases.

    `norms` are summed over tp, `table` is an embedding or its copy.
    """

    groups: Mapping[str, HeldParameters]
    norms: Quantity
    table: Quantity

    @property
    def num_updated(self) -> Quantity:
        """How many of them one rank updates."""
        parts = [ceil_divide(held.num_params, held.ranks.shards) for held in self.groups.values()]
        return sum(parts[1:], parts[0])


def add_places(counts: Ints, places: Sequence[int], degrees: Degrees) -> ChunkParameters:
    """Return the parameters of a chunk of these places, counts being [..., figure, place]."""
    own = counts[..., list(places)]
    in_layers = own[..., np.flatnonzero(np.asarray(places) >= LAYERS)]
    total = dict(zip(FIGURES, np.moveaxis(own.sum(axis=-1), -1, 0), strict=True))
    largest = np.moveaxis(in_layers.max(axis=-1, initial=0), -1, 0)
    groups = {
        name: HeldParameters(
            num_params=total[name],
            num_layer_params=largest[FIGURES.index(name)],
            num_tensors=total[f"{name}_tensors"],
            num_narrow=total[f"{name}_narrow"],
            ranks=getattr(degrees, name),
        )
        for name in ("dense", "expert")
        if name == "dense" or np.any(total[name])
    }
    return ChunkParameters(groups=groups, norms=total["norms"], table=total["table"])
