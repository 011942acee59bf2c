"""The mixture-of-experts MLP of a layer, as one rank that holds every expert runs it."""

from collections.abc import Iterator

from foretoken.domain.expert_load import ExpertRouting, expert_load
from foretoken.domain.graph import OperatorNode, Partition, Section
from foretoken.domain.models.architecture import MoeSpec
from foretoken.domain.node_builder import NodeBuilder


def lower_experts(builder: NodeBuilder, moe: MoeSpec) -> Iterator[OperatorNode]:
    """Yield norm, router, experts and shared experts of a layer.

    Choosing experts, in groups or not, is part of the router; its kernels are not measured apart.
    """
    model, tokens = builder.model, builder.shape.num_tokens
    yield builder.norm("post_attention_norm", Section.LAYER, tokens)
    dims = {"m": tokens, "n": moe.num_experts, "k": model.hidden}
    yield builder.layer("moe_router", "gemm", dims)
    name = builder.options.moe_routing
    routing = ExpertRouting(top_k=moe.top_k, num_experts=moe.num_experts, name=name)
    dims = {
        "num_tokens": tokens,
        "top_k": moe.top_k,
        "num_experts": moe.num_experts,
        "num_active_experts": expert_load(tokens, routing).num_active,
        "hidden": model.hidden,
        "intermediate": moe.expert_intermediate,
    }
    node = builder.layer("moe_experts", "moe_experts", dims, Partition.WIDTH)
    yield builder.stored(node, builder.quantization.experts, routing=name)
    if moe.num_shared_experts:
        width = moe.num_shared_experts * moe.expert_intermediate
        dims = {"m": tokens, "n": 2 * width, "k": model.hidden}
        yield builder.projection("shared_up_proj", dims, Partition.COLUMN)
        dims = {"num_tokens": tokens, "intermediate": width}
        yield builder.layer("shared_activation", "silu_mul", dims, Partition.WIDTH)
        # Its sum over ranks is the experts': one reduction serves both.
        dims = {"m": tokens, "n": model.hidden, "k": width}
        yield builder.projection("shared_down_proj", dims, Partition.ROW)
    if not builder.options.fuses_add_norm:
        yield builder.residual("mlp_residual")
