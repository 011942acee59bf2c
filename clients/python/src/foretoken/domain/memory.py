"""What serving a model occupies on one device: weights, activations, KV cache."""

from dataclasses import dataclass

from foretoken.domain.estimate import DType
from foretoken.domain.graph import OperatorNode
from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.lowering import Nodes
from foretoken.domain.operator import find_operator
from foretoken.domain.scenario import EngineSpec
from foretoken.domain.units import GIB

# Their traffic is the cache's or another operator's tensors, not activations of their own.
_WITHOUT_ACTIVATIONS = (
    "attention_prefill",
    "attention_decode",
    "attention_mixed",
    "kv_cache_write",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingMemory:
    """Bytes on one rank of a serving replica.

    `usable_bytes` is what the engine may take of the device's memory; what weights and the peak of
    the activations leave of it holds KV blocks. Graphs and the driver's own memory have to fit into
    what the engine leaves.
    """

    usable_bytes: float
    weights_bytes: float
    activations_bytes: float
    kv_bytes_per_token: float

    @property
    def kv_bytes(self) -> float:
        """Bytes left for the KV cache; negative when weights and activations do not fit."""
        return self.usable_bytes - self.weights_bytes - self.activations_bytes

    def num_kv_blocks(self, block_size: int) -> int:
        """Return how many blocks of `block_size` tokens fit; 0 when nothing does."""
        return max(0, int(self.kv_bytes // (self.kv_bytes_per_token * block_size)))

    @property
    def infeasibility(self) -> str:
        """Why the rank does not fit, or nothing."""
        if self.kv_bytes > 0:
            return ""
        return (
            f"weights ({self.weights_bytes / GIB:.2f} GiB) and activations"
            f" ({self.activations_bytes / GIB:.2f} GiB) of a rank do not fit into the"
            f" {self.usable_bytes / GIB:.2f} GiB the engine may use of a device"
        )


def plan_serving_memory(
    nodes: Nodes, hidden: int, engine: EngineSpec, device: DeviceSpec
) -> ServingMemory:
    """Return the memory of a rank.

    `nodes` are its operators on the largest batch the engine runs.
    """
    return ServingMemory(
        usable_bytes=device.memory_bytes * engine.memory_utilization_ratio,
        weights_bytes=sum(node.dtype.bytes_of(node.num_weights) for node in nodes),
        activations_bytes=_activations_bytes(nodes, engine.max_num_batched_tokens * hidden),
        kv_bytes_per_token=sum(_kv_bytes_per_token(node) for node in nodes),
    )


def _activations_bytes(nodes: Nodes, num_residual_elements: int) -> float:
    # The residual stream lives throughout; beside it the operator with the largest tensors counts.
    residual_bytes = nodes[0].dtype.bytes_of(num_residual_elements)
    return float(residual_bytes + max(_tensor_bytes(node) for node in nodes))


def _tensor_bytes(node: OperatorNode) -> float:
    """Return the bytes of an operator's inputs and outputs without its weights."""
    spec = find_operator(node.operator)
    if spec.is_collective or node.operator in _WITHOUT_ACTIVATIONS:
        return 0.0
    if node.operator == "sampler":
        # It works on a copy of the logits in fp32 and writes their probabilities.
        return float(2 * DType.FP32.bytes_of(node.dims["num_seqs"] * node.dims["vocab"]))
    element_bytes = node.dtype.num_bytes
    weights_bytes = spec.num_weights(node.dims) * element_bytes
    return float(max(0.0, spec.moved_bytes(node.dims, element_bytes) - weights_bytes))


def _kv_bytes_per_token(node: OperatorNode) -> float:
    if node.operator != "kv_cache_write":
        return 0.0
    num_elements = 2 * node.dims["num_kv_heads"] * node.dims["head_dim"] * node.repeat
    return float(node.dtype.bytes_of(num_elements))
