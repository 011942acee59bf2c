"""Bytes of the training states of a chunk: weights, gradients, optimizer, and what they need.

Source: Rajbhandari et al., ZeRO, 2020, section 3; Megatron-Core, `optimizer/distrib_optimizer.py`
and `distributed/param_and_grad_buffer.py`; PyTorch FSDP2, `fully_shard`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Self

import numpy as np

from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.domain.lowering.graph import OperatorNode, Section
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.units import Quantity
from foretoken.simulator.steps.sharding import ScenarioDegrees, Sharding
from foretoken.simulator.training.memory.chunk import ChunkGraph
from foretoken.simulator.training.state_sharding import ParameterGroup, parameter_groups

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
    """States of the chunks of one rank, or columns of them.

    `gathered` is what sharded parameters and gradients take while a layer runs, `placeholders` the
    empty gradients and workspaces that stay, `update` what the end of the step takes for a moment.
    """

    weights: Quantity = 0.0
    gradients: Quantity = 0.0
    optimizer: Quantity = 0.0
    gathered: Quantity = 0.0
    placeholders: Quantity = 0.0
    update: Quantity = 0.0

    @property
    def kept(self) -> Quantity:
        """What is there from the first step on."""
        return self.weights + self.gradients + self.optimizer + self.placeholders

    def at_most(self, passing: Quantity) -> Quantity:
        """Return what is there at the fullest moment, if passes hold so much at most."""
        return self.kept + np.maximum(passing + self.gathered, self.update)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GroupSizes:
    """Parameters that the same ranks hold copies of, in the chunks of a rank: the last axis.

    `num_layer_params` are those of the largest of a chunk's `num_layers` layers, `num_outside`
    those outside of layers. `num_shards` ranks split their states where they are split;
    `num_parts` ranks hold a weight together, which is whole while its layer runs.
    """

    num_params: np.ndarray
    num_layer_params: np.ndarray
    num_outside: np.ndarray
    num_layers: np.ndarray
    num_shards: np.ndarray
    num_parts: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRules:
    """What a framework keeps of parameters, and what of that is split.

    With `is_once` sharded parameters are whole from the first pass of a step to the last.
    """

    trainer: TrainerProfile
    dtype: DType
    sharding: Sharding
    is_once: bool

    @classmethod
    def of_scenario(cls, scenario: TrainingScenario) -> Self:
        """Return the rules of a scenario."""
        degrees = ScenarioDegrees.of(scenario)
        return cls(
            trainer=scenario.trainer.resolve(),
            dtype=scenario.dtype.kept_in_training,
            sharding=Sharding.of_stage(degrees.state_stage),
            is_once=degrees.is_once,
        )

    @property
    def gradient_dtype(self) -> DType:
        """The format in which gradients are summed."""
        return self.trainer.gradient_dtype or self.dtype


def count_states(chunks: Sequence[ChunkGraph], scenario: TrainingScenario) -> StateBytes:
    """Return the states of the chunks that one rank of the pipeline holds."""
    rules = StateRules.of_scenario(scenario)
    by_chunk = [parameter_groups(chunk.forward, chunk.rank, scenario) for chunk in chunks]
    names = dict.fromkeys(group.name for groups in by_chunk for group in groups)
    degree = ScenarioDegrees.of(scenario).weight_parts
    states = sum_states([_sizes_of(name, by_chunk, degree) for name in names], rules)
    nodes = [node for chunk in chunks for node in chunk.forward]
    return StateBytes(
        weights=float(states.weights) + narrow_copies(nodes, rules),
        gradients=float(states.gradients),
        optimizer=float(states.optimizer),
        gathered=float(states.gathered),
        placeholders=count_placeholders(nodes, rules.trainer),
        update=float(states.update),
    )


def _sizes_of(
    name: str, by_chunk: Sequence[Sequence[ParameterGroup]], weight_degree: int
) -> GroupSizes:
    groups = [group for groups in by_chunk for group in groups if group.name == name]
    return GroupSizes(
        num_params=np.array([group.num_params for group in groups]),
        num_layer_params=np.array([group.num_layer_params for group in groups]),
        num_outside=np.array([group.num_params - sum(group.layer_params) for group in groups]),
        num_layers=np.array([len(group.layer_params) for group in groups]),
        num_shards=np.array([group.ranks.shards for group in groups]),
        num_parts=np.array([weight_degree if name == "dense" else 1]),
    )


def sum_states(groups: Sequence[GroupSizes], rules: StateRules) -> StateBytes:
    """Return the states of all groups of a rank, without copies in 8 bit and placeholders.

    Every figure has the axes of the groups but the last.
    """
    trainer, sharding, dtype = rules.trainer, rules.sharding, rules.dtype
    weight = trainer.master_dtype if trainer.trains_master_weights else dtype
    master = 0.0 if trainer.trains_master_weights else trainer.master_dtype.num_bytes
    per_param = master + _NUM_MOMENTS * DType.FP32.num_bytes
    whole = sum(group.num_params.sum(axis=-1) for group in groups)
    shares = sum((group.num_params / group.num_shards).sum(axis=-1) for group in groups)
    return StateBytes(
        weights=weight.num_bytes * (shares if sharding.parameters else whole),
        gradients=rules.gradient_dtype.num_bytes * (shares if sharding.gradients else whole),
        optimizer=per_param * (shares if sharding.optimizer else whole),
        gathered=_gathered(groups, rules),
        update=_update(whole, shares if sharding.optimizer else whole, rules),
    )


def narrow_copies(nodes: Iterable[OperatorNode], rules: StateRules) -> float:
    """Return the copies of weights in 8 bit, and of their transposes, that stay for a step.

    Where weights are sharded, or have another format anyhow, they are made for each layer anew.
    Source: Transformer Engine 2, `get_weight_workspace` (is_first_microbatch).
    """
    if rules.sharding.parameters or rules.trainer.trains_master_weights:
        return 0.0
    narrow = (node for node in nodes if node.dtype is DType.FP8)
    return sum(_NUM_NARROW_COPIES * float(node.num_weights) for node in narrow)


def _update(num_params: Quantity, num_updated: Quantity, rules: StateRules) -> Quantity:
    """Return what reduction and update take beside the states, one after the other.

    Gradients are laid out in a buffer to reduce them; an optimizer in fp32 makes a copy of its
    share of gradients in another format.
    Source: DeepSpeed, `runtime/zero/stage_1_and_2.py` (ipg_buffer, single_grad_partition).
    """
    trainer, gradient = rules.trainer, rules.gradient_dtype
    flat: Quantity = 0.0 * num_params
    if trainer.flattens_gradients:
        most = trainer.bucket_elements or inf
        flat = gradient.num_bytes * np.minimum(num_params, most)
    if gradient is trainer.master_dtype:
        return flat
    return np.maximum(flat, trainer.master_dtype.num_bytes * num_updated)


def weight_bytes(node: OperatorNode) -> int:
    """Return the bytes of one layer's weights of an operator, in the compute format."""
    return int(node.written_dtype.bytes_of(int(node.num_weights) // max(1, node.repeat)))


def _gathered(groups: Sequence[GroupSizes], rules: StateRules) -> Quantity:
    """Return what is whole for a moment of states that are sharded, in the chunk with most.

    Parameters outside of layers are gathered once and stay until the backward pass has ended.
    """
    sharding, dtype, gradient = rules.sharding, rules.dtype, rules.gradient_dtype
    if rules.is_once:
        whole_params: Quantity = sum(group.num_params.sum(axis=-1) for group in groups)
        return (dtype.num_bytes + gradient.num_bytes) * whole_params
    # The gradients as computed, and the buffer in which they are reduced.
    reduced = dtype.num_bytes + gradient.num_bytes if sharding.gradients else 0.0
    largest: Quantity = 0.0
    for group in groups:
        whole = np.minimum(_NUM_GATHERED_LAYERS, group.num_layers) * group.num_layer_params
        num_bytes = reduced * group.num_layer_params
        if sharding.parameters:
            num_bytes = num_bytes + dtype.num_bytes * (whole + group.num_outside)
        split = np.where(group.num_parts > 1, group.num_parts, 0)
        num_bytes = num_bytes + dtype.num_bytes * split * whole
        largest = np.maximum(largest, num_bytes.max(axis=-1))
    return largest


def count_placeholders(nodes: Sequence[OperatorNode], trainer: TrainerProfile) -> float:
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
