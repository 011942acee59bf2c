"""The mixture-of-experts MLP of a layer, as one rank that holds every expert runs it.

Engines run all experts as one operator. Training frameworks sort tokens by expert, multiply in
groups and put the results back, each with a backward pass of its own.
Source: Megatron-Core, `transformer/moe` (`token_dispatcher.py`, `experts.py`).
"""

import dataclasses
from collections.abc import Iterator

from foretoken.domain.lowering.expert_load import ExpertRouting, expert_load
from foretoken.domain.lowering.graph import OperatorNode, Partition, Section
from foretoken.domain.lowering.node_builder import NodeBuilder
from foretoken.domain.lowering.training_layer import training_projection
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import MoeSpec
from foretoken.domain.units import Quantity

_EXPERT_ROLES = (
    "moe_permute",
    "moe_up_proj_quantize",
    "moe_up_proj",
    "moe_activation",
    "moe_down_proj_quantize",
    "moe_down_proj",
    "moe_unpermute",
)


def is_expert_node(node: OperatorNode) -> bool:
    """Return whether an operator works on tokens sorted by expert, in training."""
    return node.role in _EXPERT_ROLES


def lower_experts(builder: NodeBuilder, moe: MoeSpec) -> Iterator[OperatorNode]:
    """Yield norm, router, experts and shared experts of a layer.

    Choosing experts, in groups or not, is part of the router; its kernels are not measured apart.
    """
    model, tokens = builder.model, builder.shape.num_tokens
    yield builder.norm("post_attention_norm", Section.LAYER, tokens)
    dims = {"m": tokens, "n": moe.num_experts, "k": model.hidden}
    yield builder.layer("moe_router", "gemm", dims)
    if builder.options.training is None:
        yield _served_experts(builder, moe)
    else:
        yield from _trained_experts(builder, moe)
    if moe.num_shared_experts:
        yield from _shared_experts(builder, moe)
    if not builder.options.fuses_add_norm:
        yield builder.residual("mlp_residual")


def _shared_experts(builder: NodeBuilder, moe: MoeSpec) -> Iterator[OperatorNode]:
    tokens, hidden = builder.shape.num_tokens, builder.model.hidden
    width = moe.num_shared_experts * moe.expert_intermediate
    dims = {"m": tokens, "n": 2 * width, "k": hidden}
    yield from _projection(builder, "shared_up_proj", dims, Partition.COLUMN)
    dims = {"num_tokens": tokens, "intermediate": width}
    yield builder.layer("shared_activation", "silu_mul", dims, Partition.WIDTH)
    # In an engine its sum over ranks is the experts': one reduction serves both.
    dims = {"m": tokens, "n": hidden, "k": width}
    yield from _projection(builder, "shared_down_proj", dims, Partition.ROW)
    if builder.options.training is not None:
        yield builder.residual("shared_residual")


def _projection(
    builder: NodeBuilder, role: str, dims: dict[str, Quantity], partition: Partition
) -> Iterator[OperatorNode]:
    if builder.options.training is None:
        yield builder.projection(role, dims, partition)
    else:
        yield from training_projection(builder, role, dims, partition)


def _served_experts(builder: NodeBuilder, moe: MoeSpec) -> OperatorNode:
    tokens, name = builder.shape.num_tokens, builder.options.moe_routing
    routing = ExpertRouting(top_k=moe.top_k, num_experts=moe.num_experts, name=name)
    dims = {
        "num_tokens": tokens,
        "top_k": moe.top_k,
        "num_experts": moe.num_experts,
        "num_active_experts": expert_load(tokens, routing).num_active,
        "hidden": builder.model.hidden,
        "intermediate": moe.expert_intermediate,
    }
    node = builder.layer("moe_experts", "moe_experts", dims, Partition.WIDTH)
    return builder.stored(node, builder.quantization.experts, routing=name)


def _trained_experts(builder: NodeBuilder, moe: MoeSpec) -> Iterator[OperatorNode]:
    tokens, hidden, width = builder.shape.num_tokens, builder.model.hidden, moe.expert_intermediate
    rows = tokens * moe.top_k
    dims = {"num_rows": tokens, "width": moe.num_experts}
    yield builder.layer("moe_router_softmax", "softmax", dims)
    routed = {"num_tokens": tokens, "top_k": moe.top_k, "hidden": hidden}
    yield builder.layer("moe_permute", "moe_permute", routed)
    groups = {"num_groups": moe.num_experts, "m": rows}
    dims = {**groups, "n": 2 * width, "k": hidden}
    yield from _grouped_gemm(builder, "moe_up_proj", dims, Partition.COLUMN)
    dims = {"num_tokens": rows, "intermediate": width}
    yield builder.layer("moe_activation", "silu_mul", dims, Partition.WIDTH)
    dims = {**groups, "n": hidden, "k": width}
    yield from _grouped_gemm(builder, "moe_down_proj", dims, Partition.ROW)
    yield builder.layer("moe_unpermute", "moe_unpermute", routed)


def _grouped_gemm(
    builder: NodeBuilder, role: str, dims: dict[str, Quantity], partition: Partition
) -> Iterator[OperatorNode]:
    """Yield the products of all experts, in 8 bit after their input has been converted."""
    node = builder.layer(role, "grouped_gemm", dims, partition)
    if builder.options.dtype is DType.FP8:
        conversion = {"num_tokens": dims["m"], "hidden": dims["k"]}
        yield builder.layer(f"{role}_quantize", "quantize", conversion)
        node = dataclasses.replace(
            node, dtype=DType.FP8, output_dtype=builder.activation_dtype, weight_bits=16.0
        )
    yield node


def backward_of_grouped_gemm(node: OperatorNode) -> Iterator[OperatorNode]:
    """Yield the gradients of a grouped GEMM: of its input, and of every group's weight."""
    n, k = node.dims["n"], node.dims["k"]
    dims = {**node.dims, "n": k, "k": n}
    yield dataclasses.replace(node, role=f"{node.role}_dgrad", dims=dims)
    yield dataclasses.replace(node, role=f"{node.role}_wgrad", operator="grouped_gemm_wgrad")
