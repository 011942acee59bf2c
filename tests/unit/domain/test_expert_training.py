"""Experts in training: their backward pass, and where their tokens go."""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.domain.lowering.graph import (
    BatchShape,
    OperatorNode,
    Overlap,
    PrefillShape,
    RankContext,
)
from foretoken.domain.lowering.lower import lower_backward, lower_rank
from foretoken.domain.lowering.options import LoweringOptions, TrainingOptions
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.requests.layout import ParallelLayout

# 8 experts, 2 a token, of width 14336; hidden 4096.
_MIXTRAL = find_model("mixtral-8x7b")
_TOKENS = 4096
_BATCH = BatchShape(
    num_tokens=_TOKENS, num_output_rows=_TOKENS, prefill=PrefillShape(**prefill_dims(1, _TOKENS, 0))
)
_PAIR_BYTES = 4096 * 2


def _options(rules: Mapping[str, Any] = MappingProxyType({}), **how: object) -> LoweringOptions:
    profile = TrainerProfile(name="test", overlaps_expert_exchange=True, **rules)
    training = TrainingOptions(
        trainer=profile,
        micro_batch_size=1,
        sequence_length=_TOKENS,
        **how,  # type: ignore[arg-type]
    )
    return LoweringOptions(dtype=DType.BF16, has_loss=True, training=training)


def _rank(model: ModelArchitecture = _MIXTRAL, **degrees: int) -> RankContext:
    return RankContext(model=model, layout=ParallelLayout(**degrees), devices_per_node=8)


def _lower(rank: RankContext, options: LoweringOptions) -> dict[str, OperatorNode]:
    return {node.role: node for node in lower_rank(_BATCH, options, rank)}


def _backward(rank: RankContext, options: LoweringOptions) -> dict[str, OperatorNode]:
    forward = lower_rank(_BATCH, options, rank)
    return {node.role: node for node in lower_backward(forward, options)}


def test_one_device_sorts_tokens_and_multiplies_in_groups() -> None:
    nodes = _lower(_rank(), _options())
    assert {"num_tokens": _TOKENS, "top_k": 2, "hidden": 4096} == nodes["moe_permute"].dims
    up = {"num_groups": 8, "m": 2 * _TOKENS, "n": 2 * 14336, "k": 4096}
    assert up == nodes["moe_up_proj"].dims
    assert "moe_experts" not in nodes
    assert not any(node.axis for node in nodes.values())


def test_backward_has_both_gradients_of_every_group() -> None:
    nodes = _backward(_rank(), _options())
    expected = {"num_groups": 8, "m": 2 * _TOKENS, "n": 4096, "k": 2 * 14336}
    assert ("grouped_gemm", expected) == (
        nodes["moe_up_proj_dgrad"].operator,
        nodes["moe_up_proj_dgrad"].dims,
    )
    assert "grouped_gemm_wgrad" == nodes["moe_up_proj_wgrad"].operator
    assert 0 == nodes["moe_up_proj_wgrad"].num_weights
    assert {"moe_permute_backward", "moe_unpermute_backward", "moe_activation_backward"} <= set(
        nodes
    )


def test_tokens_go_to_the_ranks_of_their_experts_and_back() -> None:
    nodes = _lower(_rank(dp=4, ep=4), _options())
    assert (2, 2 * _TOKENS) == (
        nodes["moe_up_proj"].dims["num_groups"],
        nodes["moe_up_proj"].dims["m"],
    )
    dispatch, combine = nodes["moe_dispatch_all_to_all"], nodes["moe_combine_all_to_all"]
    expected = {
        "message_bytes": 2 * _TOKENS * _PAIR_BYTES,
        "devices_per_node": 4,
        "num_nodes": 1,
    }
    assert expected == dispatch.dims == combine.dims
    assert (Overlap.CONCURRENT, "attention_prefill") == (dispatch.overlap, dispatch.overlaps_with)
    assert {"ep"} == {node.axis for node in nodes.values() if node.axis}
    backward = _backward(_rank(dp=4, ep=4), _options())
    assert expected == backward["moe_dispatch_all_to_all_backward"].dims
    assert "moe_up_proj_dgrad" == backward["moe_combine_all_to_all_backward"].overlaps_with


def test_tokens_sent_once_go_to_each_rank_of_a_node_and_to_each_other_node() -> None:
    """Of 8 experts 2: 2 (1 - C(4, 2) / C(8, 2)) = 11/7 of two nodes, 12/7 of four ranks."""
    options = _options({"sends_tokens_once": True})
    for places, group in ((4 * (1 - 15 / 28), (4, 1)), (2 * (1 - 6 / 28), (2, 2))):
        rank = dataclasses.replace(_rank(dp=4, ep=4), devices_per_node=group[0])
        nodes = _lower(rank, options)
        dims = nodes["moe_dispatch_all_to_all"].dims
        assert group == (dims["devices_per_node"], dims["num_nodes"])
        num_own = nodes["moe_router"].dims["m"]
        assert round(num_own * places) * _PAIR_BYTES == dims["message_bytes"]
        assert {"moe_permute", "moe_unpermute"}.isdisjoint(nodes)


def test_tokens_sent_once_wait_for_what_a_device_passes_on_inside_its_node() -> None:
    """Of 128 experts 8: 6.5 of 16 ranks pass a token on that came to half of two nodes."""
    model = find_model("qwen3-30b-a3b")
    rank = _rank(model, dp=16, ep=16)
    rules = {"sends_tokens_once": True, "forward_ratio": 3.0}
    slow = _lower(rank, _options(rules))["moe_dispatch_all_to_all"]
    assert (8, 2) == (slow.dims["devices_per_node"], slow.dims["num_nodes"])
    ranks = 16 * (1 - math.comb(120, 8) / math.comb(128, 8))
    nodes = 2 * (1 - math.comb(64, 8) / math.comb(128, 8))
    assert pytest.approx(ranks / (3 * nodes / 2)) == slow.share
    # A limit of nodes limits ranks, ports that carry more or one node wait for nothing else.
    limited = _lower(rank, _options({**rules, "nodes_per_token": 1}))["moe_dispatch_all_to_all"]
    fewer = 8 * (1 - math.comb(56, 8) / math.comb(64, 8))
    assert pytest.approx(fewer / (3 * 1 / 2)) == limited.share
    for free, dp in (
        (rules | {"forward_ratio": 0.0}, 16),
        ({"forward_ratio": 3.0}, 16),
        (rules, 8),
    ):
        every = _lower(_rank(model, dp=dp, ep=dp), _options(free))
        assert 1.0 == every["moe_dispatch_all_to_all"].share


def test_tokens_sent_once_are_copied_for_each_expert_where_they_arrive() -> None:
    """Even where a rank has one expert alone."""
    every, once = (
        _lower(_rank(dp=8, ep=8), _options({"sends_tokens_once": is_once}))
        for is_once in (False, True)
    )
    assert {"moe_sort", "moe_unsort"} == once.keys() - every.keys()
    assert 2 * _TOKENS == once["moe_sort"].dims["num_tokens"]


@pytest.mark.parametrize("ep", [1, 4])
def test_rows_of_experts_are_padded_in_8_bit_alone_where_a_trainer_does(ep: int) -> None:
    """A copy before the products and one after, and both ways again in the backward pass."""
    rank = _rank(dp=ep, ep=ep)
    plain, padded = (
        dataclasses.replace(_options({"pads_experts": pads}), dtype=DType.FP8)
        for pads in (False, True)
    )
    nodes, back = _lower(rank, padded), _backward(rank, padded)
    assert {"moe_pad", "moe_unpad"} == nodes.keys() - _lower(rank, plain).keys()
    copies = [nodes["moe_pad"], nodes["moe_unpad"]]
    assert [{"num_tokens": 2 * _TOKENS, "hidden": 4096}] * 2 == [node.dims for node in copies]
    assert {"moe_pad_backward", "moe_unpad_backward"} <= back.keys()
    roles = list(nodes)
    assert roles.index("moe_pad") < roles.index("moe_up_proj_quantize")
    assert roles.index("moe_down_proj") < roles.index("moe_unpad") < roles.index("moe_unpermute")
    half = dataclasses.replace(padded, dtype=DType.BF16)
    assert "moe_pad" not in _lower(rank, half)


def test_the_routers_weights_follow_tokens_in_both_passes() -> None:
    """Unless tokens are sent once: then they come with them."""
    role, rules = "moe_scores_all_to_all", {"sends_scores": True}
    nodes = _lower(_rank(dp=4, ep=4), _options(rules))
    back = _backward(_rank(dp=4, ep=4), _options(rules))
    found = [nodes[role].dims["message_bytes"], back[f"{role}_backward"].dims["message_bytes"]]
    assert [2 * _TOKENS * 4] * 2 == found
    once = _lower(_rank(dp=4, ep=4), _options({**rules, "sends_tokens_once": True}))
    assert role not in once


def test_rows_that_are_added_up_by_index_take_ten_times_as_long() -> None:
    """Those of experts' outputs, and backward those of the gradients of a token's copies."""
    for is_fused, slow in ((True, 1.0), (False, 10.0)):
        options = _options({"fuses_permutation": is_fused})
        nodes = _lower(_rank(dp=4, ep=4), options) | _backward(_rank(dp=4, ep=4), options)
        shares = [nodes[f"moe_{name}"].share for name in ("unpermute", "permute_backward")]
        assert [slow] * 2 == shares
        gathers = [nodes[f"moe_{name}"].share for name in ("permute", "unpermute_backward")]
        assert [1.0] * 2 == gathers


@pytest.mark.parametrize(
    ("model", "router", "kernels"),
    [
        (_MIXTRAL, "fused", [(1, 1), (16, 1)]),
        (_MIXTRAL, "captured", [(1, 1), (1, 1)]),
        (_MIXTRAL, "unfused", [(22, 14), (16, 1)]),
        (find_model("deepseek-v3"), "unfused", [(43, 30), (16, 1)]),
    ],
)
def test_a_router_that_nothing_fuses_is_a_chain_of_kernels(
    model: ModelArchitecture, router: str, kernels: list[tuple[int, int]]
) -> None:
    """Longer where it chooses groups first; a graph has the counts of tokens in it, too."""
    rank, options = _rank(model, dp=4, ep=4), _options({"router": router, "waits_for_counts": True})
    nodes, backward = _lower(rank, options), _backward(rank, options)
    roles = ("moe_router_softmax", "moe_permute")
    assert kernels == [nodes[role].num_kernels for role in roles]
    chain = (nodes[roles[0]].share, backward[f"{roles[0]}_backward"].share)
    assert kernels[0] == chain
    # What moves rows on is no part of the chain.
    assert (1, 1) == nodes["moe_sort"].num_kernels


def test_latent_attention_is_turned_by_a_chain_where_nothing_fuses_it() -> None:
    rank = _rank(find_model("deepseek-v3"))
    for is_fused, variant, kernels in ((True, "", (1, 1)), (False, "form=eager", (28, 30))):
        node = _lower(rank, _options({"fuses_rope": is_fused}))["attn_rope"]
        assert (variant, kernels) == (node.variant, node.num_kernels)


def test_a_token_goes_to_no_more_nodes_than_its_router_lets_it() -> None:
    """To at most four of eight nodes, 32 experts each: 4 (1 - C(96, 8) / C(128, 8)) = 3.63."""
    model = dataclasses.replace(find_model("deepseek-v3"), num_layers=5)
    rank = _rank(model, dp=64, ep=64)
    limited = _lower(rank, _options({"sends_tokens_once": True, "nodes_per_token": 4}))
    places = 4 * (1 - math.comb(96, 8) / math.comb(128, 8))
    expected = round(_TOKENS * places) * 7168 * 2
    assert expected == limited["moe_dispatch_all_to_all"].dims["message_bytes"]
    # The model's own groups of experts, eight of which four, say as much.
    grouped = _lower(rank, _options({"sends_tokens_once": True}))
    assert expected == grouped["moe_dispatch_all_to_all"].dims["message_bytes"]
    every = _lower(rank, _options({"nodes_per_token": 4}))
    assert 8 * _TOKENS * 7168 * 2 == every["moe_dispatch_all_to_all"].dims["message_bytes"]


def test_what_goes_out_has_the_format_of_dispatch_in_both_passes() -> None:
    """Tokens forward, and the gradients of what came back; the rest stays in 16 bit."""
    options = _options({"dispatch_dtype": DType.FP8})
    rank = _rank(dp=4, ep=4)
    nodes = _lower(rank, options) | _backward(rank, options)
    out = ("moe_dispatch_all_to_all", "moe_combine_all_to_all_backward")
    back = ("moe_combine_all_to_all", "moe_dispatch_all_to_all_backward")
    assert [2 * _TOKENS * 4096] * 2 == [nodes[role].dims["message_bytes"] for role in out]
    assert [2 * _TOKENS * 4096 * 2] * 2 == [nodes[role].dims["message_bytes"] for role in back]


def test_ranks_that_split_an_expert_gather_its_tokens_and_scatter_the_sums() -> None:
    options = _options(sequence_parallel=True, expert_tp=2)
    nodes = _lower(_rank(tp=2, dp=4, ep=4), options)
    # Two ranks of tp have half of the tokens each, and both work on those of both.
    assert _TOKENS // 2 == nodes["moe_permute"].dims["num_tokens"]
    assert (2 * _TOKENS, 14336) == (
        nodes["moe_up_proj"].dims["m"],
        nodes["moe_up_proj"].dims["n"],
    )
    gather = nodes["moe_dispatch_all_gather"]
    assert (2 * _TOKENS * _PAIR_BYTES, 2) == (
        gather.dims["message_bytes"],
        gather.dims["devices_per_node"],
    )
    assert "reduce_scatter" == nodes["moe_combine_reduce_scatter"].operator
    backward = _backward(_rank(tp=2, dp=4, ep=4), options)
    assert "reduce_scatter" == backward["moe_dispatch_all_gather_backward"].operator


def test_without_expert_parallelism_ranks_split_experts_as_they_split_all_else() -> None:
    nodes = _lower(_rank(tp=4), _options())
    assert (8, 2 * _TOKENS, 2 * 14336 // 4) == (
        nodes["moe_up_proj"].dims["num_groups"],
        nodes["moe_up_proj"].dims["m"],
        nodes["moe_up_proj"].dims["n"],
    )
    assert _TOKENS * _PAIR_BYTES == nodes["moe_unpermute_all_reduce"].dims["message_bytes"]
    backward = _backward(_rank(tp=4), _options())
    assert "all_reduce" == backward["moe_unpermute_all_reduce_backward"].operator


def test_ranks_with_the_same_tokens_route_a_share_each() -> None:
    nodes = _lower(_rank(tp=2, dp=2, ep=4), _options())
    assert _TOKENS // 2 == nodes["moe_permute"].dims["num_tokens"]
    assert _TOKENS == nodes["moe_router"].dims["m"]
    assert _TOKENS * _PAIR_BYTES == nodes["moe_unpermute_all_gather"].dims["message_bytes"]


def test_experts_multiply_in_8_bit_what_came_in_16() -> None:
    options = dataclasses.replace(_options(expert_tp=2), dtype=DType.FP8)
    nodes = _lower(_rank(dp=4, ep=2), options)
    assert DType.FP8 is nodes["moe_down_proj"].dtype
    assert {"num_tokens": 2 * 2 * _TOKENS, "hidden": 14336 // 2} == nodes[
        "moe_down_proj_quantize"
    ].dims
    for role in ("moe_dispatch_all_to_all", "moe_combine_all_to_all"):
        assert 2 * _TOKENS * _PAIR_BYTES == nodes[role].dims["message_bytes"]


def test_the_busiest_rank_decides() -> None:
    rank = _rank(dp=4, ep=4)
    busy = dataclasses.replace(_options(), moe_imbalance_ratio=1.5)
    assert 3 * _TOKENS == _lower(rank, busy)["moe_up_proj"].dims["m"]
    expected = 3 * _TOKENS * _PAIR_BYTES
    assert expected == _lower(rank, busy)["moe_dispatch_all_to_all"].dims["message_bytes"]


def test_experts_drop_what_is_beyond_their_capacity() -> None:
    """The busiest rank's eight pairs of an expert and a rank have 1.5 times 1,024 tokens each."""
    rank, busy = _rank(dp=4, ep=4), dataclasses.replace(_options(), moe_imbalance_ratio=1.5)
    full = dataclasses.replace(busy, moe_capacity_factor=1.25)
    nodes = _lower(rank, full)
    assert 8 * 1280 == nodes["moe_up_proj"].dims["m"]
    assert 8 * 1280 == nodes["moe_activation"].dims["num_tokens"]
    for role in ("moe_dispatch_all_to_all", "moe_combine_all_to_all"):
        assert 8 * 1280 * _PAIR_BYTES == nodes[role].dims["message_bytes"]
    assert _lower(rank, busy) == _lower(rank, dataclasses.replace(busy, moe_capacity_factor=8.0))


def test_shared_experts_have_sums_of_their_own_and_dense_layers_come_first() -> None:
    model = dataclasses.replace(find_model("deepseek-v3"), num_layers=5)
    forward = lower_rank(_BATCH, _options(), _rank(model, tp=2, dp=4, ep=8))
    ranges = {node.role: (node.first_layer, node.repeat) for node in forward}
    assert (0, 3) == ranges["mlp_down_proj_all_reduce"]
    assert (3, 2) == ranges["shared_down_proj_all_reduce"] == ranges["moe_dispatch_all_to_all"]
    assert (0, 5) == ranges["mla_prefill"]


def test_experts_that_cannot_be_spread_say_why() -> None:
    cases = {
        "3 does not divide the 8 experts": _rank(dp=3, ep=3),
        "do not divide the 4 ranks": _rank(dp=4, ep=8),
        "has no experts to spread": _rank(find_model("llama-3-8b"), dp=2, ep=2),
    }
    for reason, rank in cases.items():
        with pytest.raises(InvalidRequestError, match=reason):
            lower_rank(_BATCH, _options(), rank)
