"""The backward pass of a forward pass: its operators and its collectives.

The gradient of a gather is a scatter of sums and the other way round, that of an exchange the
exchange back. What tensor parallelism sums in the forward pass needs nothing backward; instead the
input gradient of each column-split GEMM is summed. With sequence parallelism that sum is scattered,
and the input, of which a rank kept its tokens alone, is gathered again for the weight gradient.
Source: Megatron-Core, `tensor_parallel/layers.py` (LinearWithGradAccumulationAndAsyncCommunication)
and `mappings.py`; InternEvo, `linear.py`: `msp` keeps the gathered input, `fsp` gathers it again.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.domain.lowering.communication import overlapped_with
from foretoken.domain.lowering.expert_layer import (
    backward_of_grouped_gemm,
    backward_of_permutation,
    backward_of_router,
)
from foretoken.domain.lowering.graph import OperatorNode, Overlap, Partition, Section
from foretoken.domain.lowering.options import LoweringOptions, TrainingOptions
from foretoken.domain.measurements.estimate import DType, Phase
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.units import Quantity

_MIRRORS = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
    "send_recv": "send_recv",
}
# Sums over copies of the tokens, whose gradients are summed, or gathered, alike.
_ALIKE = ("moe_unpermute_all_reduce", "moe_unpermute_all_gather")
# The gradient of what came back goes out, in the format of what goes out, and the reverse.
_DIRECTIONS = {
    "moe_dispatch_all_to_all": "moe_combine_all_to_all",
    "moe_combine_all_to_all": "moe_dispatch_all_to_all",
}
# What another operator's backward pass brings: see `with_input_collectives`.
_GATHERED_INPUT = "_input_all_gather"
_GATHERED_WEIGHT = "_weight_all_gather"
_COLUMNS = (Partition.COLUMN, Partition.QKV)
_GEMMS = ("gemm", "grouped_gemm")
_PERMUTATIONS = ("moe_permute", "moe_unpermute")
_CHOICE = "moe_router_softmax"


def input_width(gemm: OperatorNode, nodes: Sequence[OperatorNode]) -> Quantity:
    """Return the features of a column-split GEMM's input that the ranks of tp share.

    With the latent vector goes the part of the key that carries the position.
    """
    if gemm.role != "attn_kv_proj":
        return gemm.dims["k"]
    widths = (node.dims.get("qk_rope_head_dim", 0) for node in nodes)
    return gemm.dims["k"] + max(widths)


def is_beside(node: OperatorNode, other: OperatorNode, role: str) -> bool:
    """Tell whether a node has a role and runs in the layers of another, or outside of layers."""
    return (
        node.role == role
        and node.section is other.section
        and (other.section is not Section.LAYER or node.first_layer in other.layers)
    )


def keeps_gathered_input(training: TrainingOptions | TrainingScenario) -> bool:
    """Tell whether the gathered input of a column-split GEMM is kept for the backward pass."""
    return training.weight_parallel == "msp"


def with_input_collectives(
    dgrad: OperatorNode,
    gemm: OperatorNode,
    nodes: Sequence[OperatorNode],
    options: LoweringOptions | None,
) -> Iterator[OperatorNode]:
    """Yield the input gradient of one of a rank's GEMMs, with its collectives around it."""
    if gemm.operator != "gemm" or gemm.partition not in _COLUMNS:
        yield dgrad
        return
    training = options.training if options else None
    is_hidden = training is not None and _hides_gradients(training)
    gather_role = gemm.role + _GATHERED_INPUT
    gather = next((node for node in nodes if is_beside(node, gemm, gather_role)), None)
    if gather is not None and not (training and keeps_gathered_input(training)):
        again = _exposed(gather, f"{gemm.role}_saved_input_all_gather")
        yield overlapped_with(again, dgrad.role, is_hidden=is_hidden)
    yield dgrad
    reduction = _input_reduction(gemm, gather, nodes)
    if reduction is not None:
        yield overlapped_with(reduction, f"{gemm.role}_wgrad", is_hidden=is_hidden)


def _input_reduction(
    gemm: OperatorNode, gather: OperatorNode | None, nodes: Sequence[OperatorNode]
) -> OperatorNode | None:
    if gather is not None:
        node = _exposed(gather, f"{gemm.role}_dgrad_reduce_scatter")
        return dataclasses.replace(node, operator="reduce_scatter")
    # The group is that of any sum of tensor parallelism.
    sums = (node for node in nodes if node.axis == "tp" and node.operator == "all_reduce")
    known = next(sums, None)
    if known is None:
        return None
    message_bytes = gemm.written_dtype.bytes_of(gemm.dims["m"] * input_width(gemm, nodes))
    return dataclasses.replace(
        _exposed(known, f"{gemm.role}_dgrad_all_reduce"),
        section=gemm.section,
        dims={**known.dims, "message_bytes": message_bytes},
        dtype=gemm.written_dtype,
        **gemm.placement,
    )


def mirror_collective(node: OperatorNode, nodes: Sequence[OperatorNode]) -> Iterator[OperatorNode]:
    """Yield what a forward collective of a rank becomes in the backward pass."""
    if node.role == "stage_send_mask" or node.role.endswith(_GATHERED_INPUT):
        return
    if node.role.endswith(_GATHERED_WEIGHT):
        yield from _gather_and_scatter(node)
        return
    role = f"{node.role}_backward"
    if node.section is Section.BOUNDARY or node.role in _ALIKE:
        yield dataclasses.replace(node, role=role)
    elif node.operator in _MIRRORS:
        mirror = dataclasses.replace(
            node,
            role=role,
            operator=_MIRRORS[node.operator],
            dims=_dims_back(node, nodes),
            overlaps_with=_backward_role(node.overlaps_with, nodes),
        )
        yield from _ring(mirror) if node.operator == "send_recv" else (mirror,)


def _dims_back(node: OperatorNode, nodes: Sequence[OperatorNode]) -> Mapping[str, Quantity]:
    way_back = _DIRECTIONS.get(node.role, "")
    return next((other.dims for other in nodes if is_beside(other, node, way_back)), node.dims)


def _ring(send: OperatorNode) -> Iterator[OperatorNode]:
    """Yield what goes around backward: keys and values, together with their gradients.

    The gradients go one step further, back to where the keys are from.
    """
    once = send.dims["message_bytes"]
    yield dataclasses.replace(send, dims={**send.dims, "message_bytes": 2 * once})
    if send.role.endswith("_ring_send_1_backward"):
        yield _exposed(send, send.role.replace("_ring_send_1_", "_ring_return_"))


def _gather_and_scatter(gather: OperatorNode) -> Iterator[OperatorNode]:
    yield dataclasses.replace(gather, role=f"{gather.role}_backward")
    role = gather.role.replace(_GATHERED_WEIGHT, "_weight_gradient_reduce_scatter")
    yield dataclasses.replace(
        gather, role=role, operator="reduce_scatter", overlap=Overlap.DEFERRED
    )


def _hides_gradients(training: TrainingOptions) -> bool:
    trainer = training.trainer
    is_hidden = trainer.overlaps_tensor_gradients or trainer.overlaps_tensor_collectives
    return is_hidden or training.weight_parallel in ("msp", "fsp")


def _exposed(node: OperatorNode, role: str) -> OperatorNode:
    return dataclasses.replace(node, role=role, overlap=Overlap.EXPOSED, overlaps_with="")


def _backward_role(role: str, nodes: Sequence[OperatorNode]) -> str:
    if not role:
        return ""
    is_gemm = any(node.role == role and node.operator in _GEMMS for node in nodes)
    return f"{role}_dgrad" if is_gemm else f"{role}_backward"


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
    elif node.operator == "quantize":
        yield _quantize_backward(node, nodes)
    elif node.role not in _VIEWS_BACKWARD:
        yield from _kernel_backward(node, trainer)


def _quantize_backward(node: OperatorNode, nodes: Sequence[OperatorNode]) -> OperatorNode:
    """Return the conversion of the gradient of what a product in 8 bit wrote.

    Source: NVIDIA Transformer Engine, `pytorch/module/base.py` (grad_output_preprocess).
    """
    role = node.role.removesuffix("_quantize")
    product = next(other for other in nodes if is_beside(other, node, role))
    dims = {"num_tokens": product.dims["m"], "hidden": product.dims["n"]}
    return dataclasses.replace(
        node, role=f"{node.role}_backward", phase=Phase.BACKWARD, dims=dims, share=1.0
    )


def _kernel_backward(node: OperatorNode, trainer: TrainerProfile) -> Iterator[OperatorNode]:
    spec = find_operator(node.operator)
    has_weights = bool(spec.num_weights(node.dims))
    if node.operator == "grouped_gemm":
        yield from backward_of_grouped_gemm(node)
    elif node.operator in _PERMUTATIONS:
        yield backward_of_permutation(node, trainer)
    elif node.role == _CHOICE:
        yield backward_of_router(node)
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
