"""Bytes of the training states of a chunk: weights, gradients, optimizer, and what they need.

Source: Rajbhandari et al., ZeRO, 2020, section 3; Megatron-Core, `optimizer/distrib_optimizer.py`
and `distributed/param_and_grad_buffer.py`; PyTorch FSDP2, `fully_shard`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.domain.estimate import DType
from foretoken.domain.graph import OperatorNode, Section
from foretoken.domain.scenario import TrainingScenario
from foretoken.domain.trainer import TrainerProfile
from foretoken.simulator.training.memory.chunk import ChunkGraph
from foretoken.simulator.training.state_sharding import ParameterGroup, parameter_groups
from foretoken.simulator.training.zero import Sharding, exchanges_once, weight_degree

# Adam's first and second moment, in fp32.
_NUM_MOMENTS = 2
# Layers whose gathered parameters exist at once: the one that runs and the one gathered for next.
_NUM_GATHERED_LAYERS = 2
# A weight in 8 bit and its transpose, a byte for each parameter.
_NUM_NARROW_COPIES = 2
_GROUPED = "grouped_gemm"
_MATRICES = ("gemm", _GROUPED)
# The router's small matrix product is the framework's own and has no placeholder.
_ROUTER = "moe_router"


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """States of the chunks of one rank.

    `gathered` is what sharded parameters and gradients take while a layer runs, `placeholders` the
    empty gradients and workspaces that stay, `update` what the end of the step takes for a moment.
    """

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    gathered: float = 0.0
    placeholders: float = 0.0
    update: float = 0.0

    @property
    def kept(self) -> float:
        """What is there from the first step on."""
        return self.weights + self.gradients + self.optimizer + self.placeholders


def count_states(chunks: Sequence[ChunkGraph], scenario: TrainingScenario) -> StateBytes:
    """Return the states of the chunks that one rank of the pipeline holds."""
    trainer, sharding = scenario.trainer.resolve(), Sharding.of_scenario(scenario)
    dtype = scenario.dtype.kept_in_training
    gradient = trainer.gradient_dtype or dtype
    weight = trainer.master_dtype if trainer.trains_master_weights else dtype
    master = 0.0 if trainer.trains_master_weights else trainer.master_dtype.num_bytes
    per_param = master + _NUM_MOMENTS * DType.FP32.num_bytes
    groups = [
        group for chunk in chunks for group in parameter_groups(chunk.forward, chunk.rank, scenario)
    ]

    def total(num_bytes: float, *, is_sharded: bool) -> float:
        return sum(
            num_bytes * group.num_params / (group.num_shards if is_sharded else 1)
            for group in groups
        )

    return StateBytes(
        weights=total(weight.num_bytes, is_sharded=sharding.parameters)
        + _narrow_copies(chunks, trainer, sharding),
        gradients=total(gradient.num_bytes, is_sharded=sharding.gradients),
        optimizer=total(per_param, is_sharded=sharding.optimizer),
        gathered=_gathered(groups, scenario, gradient),
        placeholders=_placeholders([n for chunk in chunks for n in chunk.forward], trainer),
        update=_update(groups, trainer, gradient, sharding),
    )


def _narrow_copies(
    chunks: Sequence[ChunkGraph], trainer: TrainerProfile, sharding: Sharding
) -> float:
    """Return the copies of weights in 8 bit, and of their transposes, that stay for a step.

    Where weights are sharded, or have another format anyhow, they are made for each layer anew.
    Source: Transformer Engine 2, `get_weight_workspace` (is_first_microbatch).
    """
    if sharding.parameters or trainer.trains_master_weights:
        return 0.0
    nodes = (node for chunk in chunks for node in chunk.forward if node.dtype is DType.FP8)
    return sum(_NUM_NARROW_COPIES * float(node.num_weights) for node in nodes)


def _update(
    groups: Sequence[ParameterGroup], trainer: TrainerProfile, gradient: DType, sharding: Sharding
) -> float:
    """Return what reduction and update take beside the states, one after the other.

    Gradients are laid out in a buffer to reduce them; an optimizer in fp32 makes a copy of its
    share of gradients in another format.
    Source: DeepSpeed, `runtime/zero/stage_1_and_2.py` (ipg_buffer, single_grad_partition).
    """
    num_params = sum(group.num_params for group in groups)
    flat = 0.0
    if trainer.flattens_gradients:
        flat = gradient.num_bytes * min(num_params, trainer.bucket_elements or num_params)
    if gradient is trainer.master_dtype:
        return flat
    shares = sum(
        group.num_params / (group.num_shards if sharding.optimizer else 1) for group in groups
    )
    return max(flat, trainer.master_dtype.num_bytes * shares)


def weight_bytes(node: OperatorNode) -> int:
    """Return the bytes of one layer's weights of an operator, in the compute format."""
    return int(node.written_dtype.bytes_of(int(node.num_weights) // max(1, node.repeat)))


def _gathered(
    groups: Sequence[ParameterGroup], scenario: TrainingScenario, gradient: DType
) -> float:
    """Return what is whole for a moment of states that are sharded, in the chunk with most.

    Parameters outside of layers are gathered once and stay until the backward pass has ended.
    """
    sharding, dtype = Sharding.of_scenario(scenario), scenario.dtype.kept_in_training
    if exchanges_once(scenario):
        num_bytes = dtype.num_bytes + gradient.num_bytes
        return num_bytes * sum(group.num_params for group in groups)
    # The gradients as computed, and the buffer in which they are reduced.
    reduced = dtype.num_bytes + gradient.num_bytes if sharding.gradients else 0.0
    isp_degree = weight_degree(scenario)
    largest = 0.0
    for group in groups:
        layer = group.num_layer_params
        whole_layers = min(_NUM_GATHERED_LAYERS, len(group.layer_params)) * layer
        num_bytes = reduced * layer
        if sharding.parameters:
            outside = group.num_params - sum(group.layer_params)
            num_bytes += dtype.num_bytes * (whole_layers + outside)
        if isp_degree > 1 and group.name == "dense":
            num_bytes += dtype.num_bytes * isp_degree * whole_layers
        largest = max(largest, num_bytes)
    return largest


def _placeholders(nodes: Sequence[OperatorNode], trainer: TrainerProfile) -> float:
    """Return workspaces, and the empty gradients of fused accumulation: one of each shape.

    Source: Transformer Engine 2.8 and later, `get_dummy_wgrad`.
    """
    has_experts = any(node.operator == _GROUPED for node in nodes)
    workspaces = trainer.workspace_bytes + has_experts * trainer.expert_workspace_bytes
    if not trainer.keeps_gradient_placeholders:
        return workspaces
    shapes = {
        (int(node.dims["n"]), int(node.dims["k"])): node.dtype.num_bytes
        for node in nodes
        if node.operator in _MATRICES and node.section is Section.LAYER and node.role != _ROUTER
    }
    return workspaces + sum(n * k * num_bytes for (n, k), num_bytes in shapes.items())
