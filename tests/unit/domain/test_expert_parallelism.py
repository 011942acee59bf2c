"""Experts spread over the ranks of one engine, or of engines in lock step."""

import dataclasses

import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.lowering.expert_layer import reached_places
from foretoken.domain.lowering.graph import BatchShape, OperatorNode, RankContext
from foretoken.domain.lowering.lower import check_layout, lower_rank
from foretoken.domain.lowering.options import LoweringOptions
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.models.stack import stack_of
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.layout import ParallelLayout

_QWEN = find_model("qwen3-30b-a3b")
_OPTIONS = LoweringOptions(dtype=DType.BF16, has_kv_cache=True, has_sampler=True)
_BATCH = BatchShape(num_tokens=100, num_output_rows=10)


def _rank(model: ModelArchitecture = _QWEN, **degrees: int) -> RankContext:
    return RankContext(model=model, layout=ParallelLayout(**degrees), devices_per_node=8)


def _lower(
    rank: RankContext, shape: BatchShape = _BATCH, options: LoweringOptions = _OPTIONS
) -> dict[str, OperatorNode]:
    return {node.role: node for node in lower_rank(shape, options, rank)}


def _reasons(model: ModelArchitecture, **degrees: int) -> list[str]:
    with pytest.raises(InvalidRequestError) as caught:
        check_layout(_rank(model, **degrees))
    return [f"{item.field}: {item.description}" for item in caught.value.violations]


def test_one_engine_adds_its_experts_up_with_its_ranks() -> None:
    nodes = _lower(_rank(tp=4, ep=4))
    experts = nodes["moe_experts"]
    assert ("moe_local_experts", 128, 32, 768) == (
        experts.operator,
        experts.dims["num_experts"],
        experts.dims["num_local_experts"],
        experts.dims["intermediate"],
    )
    assert (100, 200) == (experts.dims["num_tokens"], experts.dims["num_local_pairs"])
    assert 100 * 2048 * 2 == nodes["moe_experts_all_reduce"].dims["message_bytes"]
    assert not any(node.is_group_wide for node in nodes.values())


def test_engines_in_lock_step_gather_all_tokens_and_scatter_the_sums() -> None:
    nodes = _lower(_rank(dp=2, ep=2))
    assert 200 == nodes["moe_experts"].dims["num_tokens"]
    expected = {"message_bytes": 200 * 2048 * 2, "devices_per_node": 2, "num_nodes": 1}
    assert expected == nodes["moe_experts_all_gather"].dims
    assert expected == nodes["moe_experts_reduce_scatter"].dims
    shared = {role for role, node in nodes.items() if node.is_group_wide}
    assert {"moe_experts", "moe_experts_all_gather", "moe_experts_reduce_scatter"} == shared
    assert 100 == nodes["moe_router"].dims["m"]


def test_what_engines_share_depends_on_the_tokens_of_all_alone() -> None:
    rank = _rank(tp=2, dp=4, ep=8)
    one = dataclasses.replace(_BATCH, num_group_tokens=1000)
    other = dataclasses.replace(one, num_tokens=7, num_output_rows=3)
    first, second = _lower(rank, one), _lower(rank, other)
    for role, node in first.items():
        assert not node.is_group_wide or node.dims == second[role].dims
    assert 1000 == first["moe_experts"].dims["num_tokens"]
    assert 100 * 2048 * 2 == first["moe_experts_all_gather"].dims["message_bytes"]


def test_an_engine_of_several_ranks_gathers_its_own_tokens_at_the_end() -> None:
    nodes = lower_rank(_BATCH, _OPTIONS, _rank(tp=2, dp=2, ep=4))
    gathers = [node for node in nodes if node.role == "moe_experts_all_gather"]
    assert [(True, 4), (False, 2)] == [
        (node.is_group_wide, node.dims["devices_per_node"]) for node in gathers
    ]


def _exchange(
    exchange: str, rank: RankContext, options: LoweringOptions = _OPTIONS
) -> tuple[float, float]:
    """Return how many times a rank of 100 tokens sends 2048 features to experts, and back."""
    nodes = _lower(rank, options=dataclasses.replace(options, expert_exchange=exchange))
    bytes_out = nodes["moe_experts_all_to_all"].dims["message_bytes"]
    bytes_back = nodes["moe_experts_combine"].dims["message_bytes"]
    return bytes_out / 100 / 2048 / 2, bytes_back / 100 / 2048 / 2


def test_a_token_goes_once_to_every_rank_that_has_its_experts() -> None:
    # 8 of 128 experts lie on 5.34 of 8 ranks.
    assert (5.34, 5.34) == _exchange("all_to_all", _rank(dp=8, ep=8))
    assert _exchange("all_to_all", _rank(dp=8, ep=8)) == _exchange(
        "deepep_normal", _rank(dp=8, ep=8)
    )


def test_a_token_crosses_the_network_once_for_every_node_or_for_every_expert() -> None:
    wide = _rank(dp=32, ep=32)
    normal, by_rank, low_latency = (
        _exchange(name, wide)[0] for name in ("deepep_normal", "all_to_all", "deepep_low_latency")
    )
    # 8 experts lie on 3.63 of 4 nodes and on 7.36 of 32 ranks.
    assert (3.63, 7.36, 8.0) == (normal, by_rank, low_latency)


@pytest.mark.parametrize(("num_places", "expected"), [(2, 4), (8, 4), (16, 8), (32, 16)])
def test_groups_of_experts_limit_where_a_token_goes(num_places: int, expected: int) -> None:
    """DeepSeek-V3: four of eight groups; others choose among all experts."""
    (grouped,) = stack_of(find_model("deepseek-v3")).experts
    (free,) = stack_of(_QWEN).experts
    assert (expected, 0) == (
        reached_places(grouped, num_places),
        reached_places(free, num_places),
    )


def test_tokens_go_to_experts_in_fp8_blocks_and_come_back_as_they_are() -> None:
    options = dataclasses.replace(_OPTIONS, quantization="fp8_block")
    out, back = _exchange("deepep_low_latency", _rank(dp=8, ep=8), options)
    assert (8 * (1 + 4 / 128) / 2, 8.0) == (out, back)


@pytest.mark.parametrize(
    ("exchange", "expected"),
    [
        ("deepep_low_latency", "exchange=deepep_low_latency;part={}"),
        ("deepep_normal", ""),
        ("all_to_all", ""),
    ],
)
def test_exchanges_that_have_kernels_of_their_own_say_so(exchange: str, expected: str) -> None:
    options = dataclasses.replace(_OPTIONS, expert_exchange=exchange)
    nodes = _lower(_rank(dp=8, ep=8), options=options)
    assert (expected.format("dispatch"), expected.format("combine")) == (
        nodes["moe_experts_all_to_all"].variant,
        nodes["moe_experts_combine"].variant,
    )


def test_kernels_that_few_experts_keep_idle_are_not_what_was_measured() -> None:
    """Mixtral has eight experts."""
    options = dataclasses.replace(_OPTIONS, expert_exchange="deepep_low_latency")
    nodes = _lower(_rank(find_model("mixtral-8x7b"), dp=8, ep=8), options=options)
    assert "" == nodes["moe_experts_all_to_all"].variant == nodes["moe_experts_combine"].variant


def test_the_busiest_rank_gets_and_sends_more() -> None:
    options = dataclasses.replace(_OPTIONS, moe_imbalance_ratio=1.5)
    assert (12.0, 12.0) == _exchange("deepep_low_latency", _rank(dp=8, ep=8), options)


def test_ranks_hold_redundant_experts_and_compute_no_more_pairs() -> None:
    options = dataclasses.replace(_OPTIONS, has_expert_balancing=True, num_redundant_experts=16)
    plain = _lower(_rank(dp=8, ep=8))["moe_experts"]
    copied = _lower(_rank(dp=8, ep=8), options=options)["moe_experts"]
    assert (144, 18) == (copied.dims["num_experts"], copied.dims["num_local_experts"])
    assert plain.dims["num_local_pairs"] == copied.dims["num_local_pairs"]
    assert 18 / 16 * plain.num_weights == copied.num_weights
    find_operator(copied.operator).check_dims(copied.dims)


@pytest.mark.parametrize(("degrees", "count"), [({"tp": 2}, 16), ({"dp": 8, "ep": 8}, 12)])
def test_redundant_experts_must_spread_evenly(degrees: dict[str, int], count: int) -> None:
    options = dataclasses.replace(_OPTIONS, has_expert_balancing=True, num_redundant_experts=count)
    with pytest.raises(InvalidRequestError, match=f"and {count} redundant ones cannot be spread"):
        _lower(_rank(**degrees), options=options)


def test_engines_without_expert_parallelism_split_every_expert_they_share() -> None:
    nodes = _lower(_rank(dp=4, attention_dp=True))
    experts = nodes["moe_experts"]
    assert ("moe_experts", True, 400, 128, 768 // 4) == (
        experts.operator,
        experts.is_group_wide,
        experts.dims["num_tokens"],
        experts.dims["num_experts"],
        experts.dims["intermediate"],
    )
    gathered = {"message_bytes": 400 * 2048 * 2, "devices_per_node": 4, "num_nodes": 1}
    assert gathered == nodes["moe_experts_all_gather"].dims
    assert gathered == nodes["moe_experts_reduce_scatter"].dims
    assert 100 == nodes["moe_router"].dims["m"]


def test_engines_that_share_experts_split_their_attention_by_tp_alone() -> None:
    shared, alone = (
        _lower(_rank(tp=2, dp=dp, attention_dp=dp > 1))["attn_qkv_proj"] for dp in (4, 1)
    )
    assert shared == alone


def test_without_experts_nothing_is_shared() -> None:
    assert [
        "layout.ep: attention_dp is for engines that serve a model with experts; leave it out"
    ] == _reasons(find_model("llama-3-8b"), dp=2, attention_dp=True)
    assert "do not divide its width 768" in _reasons(_QWEN, dp=5, attention_dp=True)[0]


def test_ranks_left_over_split_each_expert() -> None:
    experts = _lower(_rank(tp=4, ep=2))["moe_experts"]
    assert (64, 384) == (experts.dims["num_local_experts"], experts.dims["intermediate"])


def test_the_busiest_rank_has_more_pairs() -> None:
    options = dataclasses.replace(_OPTIONS, moe_imbalance_ratio=1.5)
    even = _lower(_rank(tp=4, ep=4))["moe_experts"].dims
    busy = _lower(_rank(tp=4, ep=4), options=options)["moe_experts"].dims
    assert 1.5 * even["num_local_pairs"] == busy["num_local_pairs"]
    assert even["num_active_experts"] <= busy["num_active_experts"] <= 32


def test_a_rank_gets_no_token_more_often_than_it_has_experts() -> None:
    options = dataclasses.replace(_OPTIONS, moe_imbalance_ratio=100.0)
    experts = _lower(_rank(tp=4, ep=4), options=options)["moe_experts"]
    assert 100 * 8 == experts.dims["num_local_pairs"]
    find_operator(experts.operator).check_dims(experts.dims)


def test_shared_experts_and_dense_layers_stay_split_by_tensor_parallelism() -> None:
    options = dataclasses.replace(_OPTIONS, mla_form="operators")
    nodes = _lower(_rank(find_model("deepseek-v3"), tp=8, ep=8), options=options)
    assert 2 * 2048 // 8 == nodes["shared_up_proj"].dims["n"]
    assert (2 * 18432 // 8, 3) == (nodes["mlp_up_proj"].dims["n"], nodes["mlp_up_proj"].repeat)
    assert (58, 3) == (nodes["moe_experts"].repeat, nodes["moe_experts"].first_layer)
    assert "shared_down_proj_all_reduce" not in nodes
    total = nodes["shared_sum"]
    assert ("residual_add", 58, 7168) == (total.operator, total.repeat, total.dims["hidden"])


def test_engines_compute_the_gate_of_shared_experts_whole_on_every_rank() -> None:
    """A product of one feature, and one that stretches the shared experts' output by it."""
    nodes = _lower(_rank(find_model("qwen3.5-397b-a17b"), tp=8, ep=8))
    gate, product = nodes["shared_gate_proj"], nodes["shared_gate_product"]
    assert (gate.dims["n"], gate.dims["k"], gate.repeat) == (1, 4096, 60)
    assert (product.dims["intermediate"], product.repeat) == (4096, 60)
    assert "shared_gate_proj" not in _lower(_rank(find_model("deepseek-v3"), tp=8, ep=8))


def test_layouts_that_cannot_be_say_why() -> None:
    assert ["layout.ep: llama-3-8b has no experts to spread; leave it at 1"] == _reasons(
        find_model("llama-3-8b"), tp=2, ep=2
    )
    assert "does not divide the 128 experts" in _reasons(_QWEN, dp=3, ep=3)[0]
    assert "does not divide the 2 ranks of tp and dp" in _reasons(_QWEN, tp=2, ep=4)[0]
    assert "cannot have pipeline stages" in _reasons(_QWEN, dp=2, ep=2, pp=2)[0]
    assert _QWEN.moe is not None
    narrow = dataclasses.replace(_QWEN, moe=dataclasses.replace(_QWEN.moe, expert_intermediate=767))
    assert "do not divide its width 767" in _reasons(narrow, tp=4, ep=2)[0]
