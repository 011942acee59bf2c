"""Bytes of the training states of a chunk: weights, gradients, optimizer, and what they need.

Source: Rajbhandari et al., ZeRO, 2020, section 3; Megatron-Core, `optimizer/distrib_optimizer.py`
and `distributed/param_and_grad_buffer.py`; PyTorch FSDP2, `fully_shard`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import reduce
from math import inf
from typing import Any

import numpy as np

from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.units import Quantity
from foretoken.simulator.grid import Flags, Floats, Ints
from foretoken.simulator.steps.sharding import SPLITS_GRADIENTS, SPLITS_PARAMETERS

# Adam's first and second moment.
_NUM_MOMENTS = 2
# Layers whose gathered parameters exist at once: the one that runs and the one gathered for next.
_NUM_GATHERED_LAYERS = 2
# A weight in 8 bit and its transpose, a byte for each parameter.
_NUM_NARROW_COPIES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """States of the ranks of cases: [case, rank].

    `gathered` is what sharded parameters and gradients take while a layer runs, `placeholders` the
    empty gradients and workspaces that stay, `update` what the end of the step takes for a moment.
    """

    weights: Floats
    gradients: Floats
    optimizer: Floats
    gathered: Floats
    placeholders: Floats
    update: Floats

    @property
    def kept(self) -> Floats:
        """What is there from the first step on."""
        return self.weights + self.gradients + self.optimizer + self.placeholders

    def take(self, at: Any) -> "StateBytes":
        """Return the states of some cases, or of (case, rank)."""
        return StateBytes(**{item.name: getattr(self, item.name)[at] for item in fields(self)})

    def at_most(self, passing: Quantity) -> Floats:
        """Return what is there at the fullest moment, if passes hold so much at most."""
        most: Floats = self.kept + np.maximum(passing + self.gathered, self.update)
        return most


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GroupSizes:
    """Parameters that the same ranks hold copies of, in the chunks of a rank: [case, rank, chunk].

    `num_layer_params` are those of the largest of a chunk's `num_layers` layers, `num_outside`
    those outside of layers; `num_narrow` and `num_layer_narrow` are multiplied in 8 bit.
    `num_shards` ranks split their states where they are split; `num_parts` ranks hold a weight
    together, which is whole while its layer runs.
    """

    num_params: Floats
    num_layer_params: Floats
    num_narrow: Floats
    num_layer_narrow: Floats
    num_outside: Floats
    num_layers: Ints
    num_shards: Ints
    num_parts: Ints


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StateRules:
    """What a framework keeps of parameters, and what of that is split: columns [case, 1].

    `dtype` is what is computed in, `stage` that of ZeRO, 0 where nothing is split. With `is_once`
    sharded parameters are whole from the first pass of a step to the last.
    """

    trainer: TrainerProfile
    dtype: DType
    stage: Ints
    is_once: Flags

    @property
    def kept_dtype(self) -> DType:
        """The format of weights."""
        return self.dtype.kept_in_training

    @property
    def gradient_dtype(self) -> DType:
        """The format in which gradients are summed."""
        return self.trainer.gradient_dtype or self.kept_dtype

    @property
    def master_bytes(self) -> float:
        """What an optimizer keeps of a parameter next to its weight, moments aside."""
        master = self.trainer.master_dtype.num_bytes
        if self.trainer.trains_master_weights:
            return 0.0
        return master - self.kept_dtype.num_bytes * self.trainer.splits_masters(self.dtype)


def sum_states(groups: Sequence[GroupSizes], placeholders: Floats, rules: StateRules) -> StateBytes:
    """Return the states of ranks with these groups of parameters: [case, rank]."""
    trainer, stage = rules.trainer, rules.stage
    per_param = rules.master_bytes + _NUM_MOMENTS * trainer.moment_dtype.num_bytes
    none = np.zeros_like(placeholders)
    whole_of = [group.num_params.sum(axis=-1) for group in groups]
    share_of = [(group.num_params / group.num_shards).sum(axis=-1) for group in groups]
    whole, shares = sum(whole_of, none), sum(share_of, none)
    updated_of = [np.where(stage > 0, *pair) for pair in zip(share_of, whole_of, strict=True)]
    updated, most = sum(updated_of, none), reduce(np.maximum, updated_of, none)
    return StateBytes(
        weights=sum((_weights(group, rules) for group in groups), none),
        gradients=rules.gradient_dtype.num_bytes
        * np.where(stage >= SPLITS_GRADIENTS, shares, whole),
        optimizer=per_param * updated,
        gathered=_gathered(groups, whole, rules),
        placeholders=placeholders,
        update=_update(whole, updated, most, rules),
    )


def _weights(group: GroupSizes, rules: StateRules) -> Floats:
    """Return the bytes of weights that ranks keep from step to step.

    What is multiplied in 8 bit has copies so, and of their transposes, that stay for a step, or is
    kept so alone with its transpose. Where weights are sharded, or have another format anyhow, or
    the framework keeps none, such copies are made for each layer anew.
    Source: Transformer Engine 2, `get_weight_workspace` (is_first_microbatch), `Float8Tensor`.
    """
    trainer, splits = rules.trainer, rules.stage >= SPLITS_PARAMETERS
    shards = np.where(splits[..., None], group.num_shards, 1)
    num_params = (group.num_params / shards).sum(axis=-1)
    if trainer.trains_master_weights:
        return np.asarray(trainer.master_dtype.num_bytes * num_params)
    narrow = (group.num_narrow / shards).sum(axis=-1)
    stays, copies = ~splits & trainer.caches_weight_copies, _NUM_NARROW_COPIES * narrow
    own = narrow * trainer.keeps_narrow_weights
    width = rules.kept_dtype.num_bytes
    copies = np.where(stays, copies, own) - width * own
    return np.asarray(width * num_params + copies)


def _update(num_params: Floats, num_updated: Floats, most: Floats, rules: StateRules) -> Floats:
    """Return what reduction and update take in addition to the states, one after the other.

    Gradients are laid out in a buffer to reduce them; an optimizer in fp32 makes a copy of its
    share of gradients in another format, unless it reads any format, as it does moments. Moments
    that are converted are all there in fp32 at once, of dense parameters or of experts: these have
    an optimizer each, of which one updates `most`.
    Source: DeepSpeed, `runtime/zero/stage_1_and_2.py` (ipg_buffer, single_grad_partition);
    Megatron-Core, `optimizer/distrib_optimizer.py` (use_precision_aware_optimizer) and
    `optimizer/__init__.py`; Transformer Engine, `pytorch/optimizers/fused_adam.py`.
    """
    trainer, gradient = rules.trainer, rules.gradient_dtype
    flat = np.zeros_like(num_params)
    if trainer.flattens_gradients:
        flat = gradient.num_bytes * np.minimum(num_params, trainer.bucket_elements or inf)
    copies: Floats = np.zeros_like(num_params)
    if gradient is not trainer.master_dtype and not trainer.reads_any_gradients(rules.dtype):
        copies = copies + trainer.master_dtype.num_bytes * num_updated
    if trainer.converts_moments and trainer.moment_dtype is not DType.FP32:
        copies = copies + _NUM_MOMENTS * DType.FP32.num_bytes * most
    return np.maximum(flat, copies)


def weight_bytes(node: OperatorNode) -> int:
    """Return the bytes of one layer's weights of an operator, in the compute format."""
    return int(node.written_dtype.bytes_of(int(node.num_weights) // max(1, node.repeat)))


def _gathered(groups: Sequence[GroupSizes], whole: Floats, rules: StateRules) -> Floats:
    """Return what is whole for a moment of states that are sharded, in the chunk with most.

    Parameters outside of layers are gathered once and stay until the backward pass has ended.
    """
    width = rules.kept_dtype.num_bytes
    # The gradients as computed, and the buffer in which they are reduced.
    both = width + rules.gradient_dtype.num_bytes
    stage, largest = rules.stage[..., None], np.zeros_like(whole)
    for group in groups:
        saved = (width - 1) * rules.trainer.keeps_narrow_weights * group.num_layer_narrow
        layer_bytes = width * group.num_layer_params - saved
        in_layers = np.minimum(_NUM_GATHERED_LAYERS, group.num_layers) * layer_bytes
        num_bytes = both * (stage >= SPLITS_GRADIENTS) * group.num_layer_params
        whole_bytes = (stage >= SPLITS_PARAMETERS) * (in_layers + width * group.num_outside)
        split = np.where(group.num_parts > 1, group.num_parts, 0)
        num_bytes = num_bytes + whole_bytes + split * in_layers
        largest = np.maximum(largest, num_bytes.max(axis=-1))
    return np.where(rules.is_once, both * whole, largest)
