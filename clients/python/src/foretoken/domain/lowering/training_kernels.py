"""The kernels that end a training step besides its collectives, by the rules of a framework.

Source: DeepSpeed, `runtime/zero/stage_1_and_2.py` (flatten, overflow check, norm, unscale and clip,
update); Megatron-LM, `optimizer/optimizer.py` (the same on fp32 gradients).
"""

import dataclasses

from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.domain.lowering.graph import OperatorNode, Section
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.operators.spec.operator import find_operator

_NARROW_BYTES = 2
# Bytes that AdamW moves for a parameter, kernel by kernel, in passes that read and write an fp32
# each: decay 8, first moment 8 + 12, second 8 + 12, root 8, division 8, epsilon 8, update 16.
# Source: PyTorch 1.13, `torch/optim/adamw.py`, _single_tensor_adamw.
_ADAM_PASSES = 11

_Nodes = tuple[OperatorNode, ...]


def reduction_kernels(num_params: int, dtype: DType, trainer: TrainerProfile) -> _Nodes:
    """Return what a reduction of a rank's gradients needs around it: in a buffer, divided, spread.

    `num_params` are all of the rank's, or of a bucket.
    """
    if not num_params or not trainer.flattens_gradients:
        return ()
    return tuple(
        dataclasses.replace(
            _flat(role, "buffer_copy", num_params, trainer.gradient_dtype or dtype),
            section=Section.GRADIENT,
            group="gradient_reduction",
        )
        for role in ("gradient_flatten", "gradient_divide", "gradient_spread")
    )


def sum_kernels(num_params: int, num_ranks: int, dtype: DType, trainer: TrainerProfile) -> _Nodes:
    """Return what runs on all of a rank's own gradients, which `num_ranks` ranks add up.

    Source: Megatron-Core, `distributed/param_and_grad_buffer.py` (check_for_nan_in_grad,
    gradient_scaling_factor, reset).
    """
    # Zeros of 16 bit: twice as many where gradients have 32.
    width = max(1, round((trainer.gradient_dtype or dtype).num_bytes / _NARROW_BYTES))
    # A copy moves as much as a product in place with gradients of 16 bit.
    scaling = "unscale" if trainer.gradient_dtype is DType.FP32 else "buffer_copy"
    kernels = (
        ("gradient_zero", "fill", num_params * width, trainer.zeroes_gradients),
        ("gradient_check", "gradient_norm", num_params, trainer.checks_gradients),
        ("gradient_scale", scaling, num_params, trainer.scales_gradients and num_ranks > 1),
    )
    return tuple(
        dataclasses.replace(
            _flat(role, operator, count, dtype),
            section=Section.GRADIENT,
            group="gradient_reduction",
        )
        for role, operator, count, is_run in kernels
        if is_run and num_params
    )


def check_kernels(num_params: int, dtype: DType, trainer: TrainerProfile) -> _Nodes:
    """Return what runs on reduced gradients before it is known whether to update.

    `num_params` are those whose gradients the rank keeps. Gradients in 16 bit are converted first.
    """
    nodes: list[OperatorNode] = []
    for role, is_run in (
        ("overflow_check", scales_loss(dtype, trainer)),
        ("gradient_norm", trainer.clips_gradients),
    ):
        if is_run and num_params:
            if trainer.gradient_dtype is not DType.FP32:
                nodes.append(_flat(f"{role}_cast", "cast", num_params, dtype))
            nodes.append(_flat(role, "gradient_norm", num_params, dtype))
    return tuple(nodes)


def update_kernels(num_params: int, dtype: DType, trainer: TrainerProfile) -> _Nodes:
    """Return the update of `num_params` parameters: their gradients unscaled and clipped, Adam."""
    if not num_params:
        return ()
    nodes: list[OperatorNode] = []
    if trainer.flattens_gradients:
        nodes.append(_flat("update_flatten", "buffer_copy", num_params, dtype))
    if trainer.gradient_dtype is not DType.FP32:
        nodes.append(_flat("gradient_cast", "cast", num_params, dtype))
    unscales = scales_loss(dtype, trainer)
    if unscales and trainer.clips_gradients and trainer.unscales_first:
        nodes.append(_flat("gradient_clip", "unscale", num_params, dtype))
    if unscales or trainer.clips_gradients:
        nodes.append(_flat("gradient_unscale", "unscale", num_params, dtype))
    if trainer.fuses_optimizer:
        nodes.append(_flat("optimizer_update", "adam", num_params, dtype))
    else:
        nodes.append(_flat("optimizer_update", "unscale", _ADAM_PASSES * num_params, dtype))
        nodes.append(_flat("parameter_cast", "cast", num_params, dtype))
    if trainer.fuses_optimizer and trainer.copies_parameters:
        nodes.append(_flat("parameter_cast", "cast", num_params, dtype))
    return tuple(nodes)


def scales_loss(dtype: DType, trainer: TrainerProfile) -> bool:
    """Tell whether the loss is scaled against underflow: other formats than fp16 do not need it."""
    return trainer.scales_loss and dtype is DType.FP16


def _flat(role: str, operator: str, num_params: int, dtype: DType) -> OperatorNode:
    return OperatorNode(
        role=role,
        group=find_operator(operator).group,
        section=Section.OPTIMIZER,
        operator=operator,
        dims={"num_params": num_params},
        dtype=_activation_dtype(dtype),
    )


def _activation_dtype(dtype: DType) -> DType:
    return DType.BF16 if dtype is DType.FP8 else dtype
