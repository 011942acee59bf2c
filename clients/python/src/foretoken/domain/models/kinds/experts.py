"""Experts: each token goes to a few of many feed-forward networks, and to those that all share."""

from collections.abc import Iterator, Mapping

from foretoken.domain.lowering.expert_layer import lower_experts
from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.lowering.node_builder import NodeBuilder
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.spec.kind import Dims, KindDim, KindSpec, Place, Placed, Weights


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    matrices = 2 + d["is_gated"]
    inside = d["latent"] or model.hidden
    expert = matrices * inside * d["intermediate"]
    bias = d["has_bias"] * ((1 + d["is_gated"]) * d["intermediate"] + inside)
    num_choices = d["num_experts"] + d["num_null_experts"]
    # Of the places that a token is sent to, null experts take their share.
    num_active = d["top_k"] * d["num_experts"] // num_choices
    yield Weights(total=d["num_experts"] * expert, part="experts", active=num_active * expert)
    yield Weights(total=d["num_experts"] * bias, active=num_active * bias)
    shared = matrices * model.hidden * d["shared_intermediate"]
    yield Weights(total=shared, part="shared_experts")
    num_shared = -(-d["shared_intermediate"] // d["intermediate"])
    others = model.hidden * (num_choices + d["has_shared_gate"] + 2 * d["latent"])
    others += d["has_bias"] * (
        (1 + d["is_gated"]) * d["shared_intermediate"] + num_shared * model.hidden
    )
    yield Weights(total=others)


def _check(d: Dims) -> Mapping[str, tuple[bool, str]]:
    return {
        "top_k": (
            d["top_k"] <= d["num_experts"],
            f"{d['top_k']} is more than the {d['num_experts']} experts",
        ),
        "top_k_groups": (
            d["top_k_groups"] <= d["num_groups"],
            f"{d['top_k_groups']} is more than the {d['num_groups']} groups",
        ),
    }


def _lower(builder: NodeBuilder, parts: Placed) -> Iterator[OperatorNode]:
    return lower_experts(builder, next(iter(parts)))


KIND = KindSpec(
    name="experts",
    place=Place.FEED_FORWARD,
    summary="feed-forward networks of which a router picks a few for every token",
    source="DeepSeek-V3, 2024, section 2.1.2 (shared experts); Qwen2 (their gate); Nemotron 3, 2026"
    " (experts between latent projections); LongCat-Flash, 2025 (null experts); Gemma 4's modelling"
    " file in transformers 5 (a dense network next to them); vLLM 0.19, `models/minimax_m2.py`,"
    " `minimax_text_01.py`, `step3p5.py` and `ernie45_moe.py` (routers in fp32)",
    dims=(
        KindDim("num_experts", "routed experts", minimum=1),
        KindDim("top_k", "of which each token visits so many", minimum=1),
        KindDim("intermediate", "features between the products of an expert", minimum=1),
        KindDim("shared_intermediate", "the same of all shared experts together", 0),
        KindDim("num_null_experts", "experts that return their input", 0),
        KindDim("is_gated", "1: a gate next to the up projection", 1),
        KindDim("has_bias", "1: projections have a bias", 0),
        KindDim("has_shared_gate", "1: shared experts have a gate from the router", 0),
        KindDim("latent", "features that routed experts work in; 0: those of the model", 0),
        KindDim("num_groups", "groups of experts that a router chooses among first; 0: none", 0),
        KindDim("top_k_groups", "of which a token's experts lie in so many", 0),
        KindDim("has_fp32_router", "1: engines multiply the router's weights in fp32", 0),
    ),
    weights=_weights,
    check=_check,
    lower=_lower,
    approximated="experts without a gate run as gated ones of two thirds of their width, which have"
    " as many weights; the gate of shared experts takes no time of its own in training",
    backward="Megatron-Core, `transformer/moe`: grouped products, two for each, and rows put back",
    matrices={
        "experts": ("mlp.experts.0.up_proj", "mlp.experts.0.down_proj"),
        "shared_experts": ("mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"),
    },
)
