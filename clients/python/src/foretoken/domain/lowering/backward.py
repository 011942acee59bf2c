"""The backward operators of a forward operator, as a framework runs them."""

import dataclasses
from collections.abc import Iterator, Sequence

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.domain.lowering.backward_collectives import mirror_collective, with_input_collectives
from foretoken.domain.lowering.expert_layer import backward_of_grouped_gemm
from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.lowering.options import LoweringOptions
from foretoken.domain.measurements.estimate import DType, Phase
from foretoken.domain.operators.spec.operator import find_operator

# Adds to the sum of gradients apart even where products do it themselves; norms do too, a little.
# Source: Megatron-Core, distributed/distributed_data_parallel.py (`param.main_grad.add_`).
_ADDED_APART = "embedding"
# Roles whose backward pass only looks at the tensor in another way.
_VIEWS_BACKWARD = ("attn_context_copy",)


def backward_of(
    node: OperatorNode, nodes: Sequence[OperatorNode], options: LoweringOptions | None
) -> Iterator[OperatorNode]:
    """Yield the backward operators of one of a rank's forward operators.

    Raises:
        InvalidRequestError: an operator with weights has no backward pass yet.

    """
    spec, trainer = find_operator(node.operator), _trainer_of(options)
    if spec.is_collective:
        yield from mirror_collective(node, nodes)
    elif node.operator == "gemm":
        if trainer.has_copy_kernels and node.role == "attn_qkv_proj":
            # The gradients of queries, keys and values are put together.
            yield _elementwise(node, "attn_qkv_concat", "copy", Phase.FORWARD)
        dgrad, *others = _gemm_backward(node, trainer)
        yield from with_input_collectives(dgrad, node, nodes, options)
        yield from others
    elif node.role not in _VIEWS_BACKWARD:
        yield from _kernel_backward(node, trainer)


def _kernel_backward(node: OperatorNode, trainer: TrainerProfile) -> Iterator[OperatorNode]:
    spec = find_operator(node.operator)
    has_weights = bool(spec.num_weights(node.dims))
    if node.operator == "grouped_gemm":
        yield from backward_of_grouped_gemm(node)
    elif spec.backward_work_ratio > 0:
        yield dataclasses.replace(node, role=f"{node.role}_backward", phase=Phase.BACKWARD)
    elif has_weights:
        raise InvalidRequestError.of_field("model", f"{node.operator} cannot be trained yet")
    if has_weights:
        yield from _accumulation(node, trainer)


def _trainer_of(options: LoweringOptions | None) -> TrainerProfile:
    training = options.training if options else None
    return training.trainer if training else TrainerProfile(name="")


def _gemm_backward(node: OperatorNode, trainer: TrainerProfile) -> Iterator[OperatorNode]:
    """Yield the gradients of input and weight: halves of one backward call, as it is measured."""
    half = dataclasses.replace(
        node, phase=Phase.BACKWARD, share=node.share / 2, has_bias=False, weight_bits=0.0
    )
    yield dataclasses.replace(half, role=f"{node.role}_dgrad")
    yield dataclasses.replace(half, role=f"{node.role}_wgrad")
    if node.has_bias:
        yield _elementwise(node, f"{node.role}_bias_wgrad", "bias_add", Phase.BACKWARD)
    yield from _accumulation(node, trainer)


def _elementwise(node: OperatorNode, role: str, operator: str, phase: Phase) -> OperatorNode:
    """Return an operator over the output of a GEMM."""
    return dataclasses.replace(
        node,
        role=role,
        group=find_operator(operator).group,
        operator=operator,
        dims={"num_tokens": node.dims["m"], "hidden": node.dims["n"]},
        dtype=node.written_dtype,
        phase=phase,
        output_dtype=None,
        has_bias=False,
        weight_bits=0.0,
    )


def _accumulation(node: OperatorNode, trainer: TrainerProfile) -> Iterator[OperatorNode]:
    """Yield the addition of a micro batch's weight gradient to the sum of those before."""
    is_fused = trainer.gradient_accumulation == "fused"
    if is_fused and node.operator != _ADDED_APART:
        return
    num_params = find_operator(node.operator).num_weights(node.dims)
    is_converted = trainer.gradient_accumulation == "converted"
    # Zeros of 16 bit before, then gradient and sum read and the sum written: where that is fp32, as
    # many bytes as twice as many values take here.
    is_doubled = is_converted or (is_fused and trainer.gradient_dtype is DType.FP32)
    addition = dataclasses.replace(
        node,
        role=f"{node.role}_accumulate",
        group="gradient_accumulation",
        operator="gradient_accumulation",
        # A sum in fp32 moves as much as one of twice as many values of 16 bit.
        dims={"num_params": num_params * (2 if is_doubled else 1)},
        dtype=node.written_dtype,
        phase=Phase.FORWARD,
        output_dtype=None,
        has_bias=False,
        weight_bits=0.0,
    )
    if is_converted:
        yield dataclasses.replace(
            addition,
            role=f"{node.role}_cast_accumulate",
            operator="cast",
            dims={"num_params": num_params},
        )
    yield addition
