"""What tensor, sequence, context, pipeline and weight parallelism make of a training layer."""

import dataclasses

import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.domain.lowering.graph import (
    BatchShape,
    OperatorNode,
    Overlap,
    PrefillShape,
    RankContext,
    Section,
)
from foretoken.domain.lowering.lower import lower_backward, lower_rank
from foretoken.domain.lowering.options import LoweringOptions, TrainingOptions
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.requests.layout import ParallelLayout

_LLAMA = find_model("llama-3-8b")
_LENGTH = 4096
_NOTHING_HIDDEN = TrainerProfile(name="test")
_ALL_HIDDEN = dataclasses.replace(
    _NOTHING_HIDDEN,
    overlaps_tensor_collectives=True,
    overlaps_tensor_gradients=True,
    overlaps_context_exchange=True,
)
_BATCH = BatchShape(
    num_tokens=_LENGTH, num_output_rows=_LENGTH, prefill=PrefillShape(**prefill_dims(1, _LENGTH, 0))
)


def _options(trainer: TrainerProfile = _NOTHING_HIDDEN, **how: object) -> LoweringOptions:
    training = TrainingOptions(
        trainer=trainer,
        micro_batch_size=1,
        sequence_length=_LENGTH,
        **how,  # type: ignore[arg-type]
    )
    return LoweringOptions(dtype=DType.BF16, has_loss=True, training=training)


def _rank(model: ModelArchitecture = _LLAMA, stage: int = 0, **degrees: int) -> RankContext:
    layout = ParallelLayout(**degrees)
    return RankContext(model=model, layout=layout, devices_per_node=8, stage=stage)


def _lower(rank: RankContext, options: LoweringOptions) -> dict[str, OperatorNode]:
    return {node.role: node for node in lower_rank(_BATCH, options, rank)}


def _backward(rank: RankContext, options: LoweringOptions) -> dict[str, OperatorNode]:
    return {node.role: node for node in lower_backward(lower_rank(_BATCH, options, rank), options)}


def _reasons(rank: RankContext, options: LoweringOptions) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        lower_rank(_BATCH, options, rank)
    return caught.value.message


def test_split_tokens_are_gathered_before_columns_and_scattered_after_rows() -> None:
    nodes = _lower(_rank(tp=4), _options(sequence_parallel=True))
    whole = _LENGTH * 4096 * 2
    assert _LENGTH // 4 == nodes["input_norm"].dims["num_tokens"]
    assert _LENGTH // 4 == nodes["mlp_residual"].dims["num_tokens"]
    assert _LENGTH == nodes["attn_qkv_proj"].dims["m"]
    assert whole == nodes["attn_qkv_proj_input_all_gather"].dims["message_bytes"]
    assert whole == nodes["mlp_down_proj_reduce_scatter"].dims["message_bytes"]
    assert whole == nodes["embedding_reduce_scatter"].dims["message_bytes"]
    assert whole == nodes["lm_head_input_all_gather"].dims["message_bytes"]
    assert not any(role.endswith("_proj_all_reduce") for role in nodes)


def test_backward_gathers_the_saved_input_again_and_scatters_its_gradient() -> None:
    nodes = _backward(_rank(tp=4), _options(_ALL_HIDDEN, sequence_parallel=True))
    gather, scatter = (
        nodes["mlp_up_proj_saved_input_all_gather"],
        nodes["mlp_up_proj_dgrad_reduce_scatter"],
    )
    assert ("all_gather", Overlap.CONCURRENT, "mlp_up_proj_dgrad") == (
        gather.operator,
        gather.overlap,
        gather.overlaps_with,
    )
    assert ("reduce_scatter", Overlap.CONCURRENT, "mlp_up_proj_wgrad") == (
        scatter.operator,
        scatter.overlap,
        scatter.overlaps_with,
    )
    assert "all_gather" == nodes["mlp_down_proj_reduce_scatter_backward"].operator


def test_internevos_msp_keeps_the_gathered_input_and_fsp_does_not() -> None:
    kept = _backward(_rank(tp=4), _options(weight_parallel="msp"))
    again = _backward(_rank(tp=4), _options(weight_parallel="fsp"))
    assert "mlp_up_proj_saved_input_all_gather" not in kept
    assert Overlap.CONCURRENT is kept["mlp_up_proj_dgrad_reduce_scatter"].overlap
    assert Overlap.CONCURRENT is again["mlp_up_proj_saved_input_all_gather"].overlap


def test_branches_that_are_summed_first_are_reduced_once() -> None:
    """GPT-NeoX: one all-reduce forward, two backward, one for the input of each branch."""
    trainer = dataclasses.replace(_NOTHING_HIDDEN, sums_branches_first=True)
    rank = _rank(find_model("gpt-neox-20b"), tp=4)
    forward = [n.role for n in _lower(rank, _options(trainer)).values() if n.axis == "tp"]
    backward = [n.role for n in _backward(rank, _options(trainer)).values() if n.axis == "tp"]
    assert ["embedding_all_reduce", "mlp_down_proj_all_reduce", "loss_all_reduce"] == forward
    assert [
        "lm_head_dgrad_all_reduce",
        "mlp_up_proj_dgrad_all_reduce",
        "attn_qkv_proj_dgrad_all_reduce",
    ] == backward


def test_latent_vectors_are_gathered_and_their_gradients_summed() -> None:
    """The key's part with the position goes with the latent vector of keys and values."""
    model = dataclasses.replace(find_model("deepseek-v3"), num_layers=4)
    split = _lower(_rank(model, tp=2), _options(sequence_parallel=True))
    assert _LENGTH // 2 == split["attn_down_proj"].dims["m"]
    assert _LENGTH * 1536 * 2 == split["attn_q_proj_input_all_gather"].dims["message_bytes"]
    assert _LENGTH * 576 * 2 == split["attn_kv_proj_input_all_gather"].dims["message_bytes"]
    backward = _backward(_rank(model, tp=2), _options())
    assert _LENGTH * 576 * 2 == backward["attn_kv_proj_dgrad_all_reduce"].dims["message_bytes"]
    assert "kv_cache_write" not in split


def test_a_ring_attends_its_own_block_and_the_halves_of_the_others() -> None:
    nodes = _lower(_rank(tp=2, cp=4), _options(_ALL_HIDDEN))
    own, others = _LENGTH // 4, [nodes[f"attention_prefill_ring_{i}"] for i in (1, 2, 3)]
    assert prefill_dims(1, own, 0).items() <= nodes["attention_prefill"].dims.items()
    for node in others:
        assert (own // 2, own, own * own // 2) == (
            node.dims["q_tokens"],
            node.dims["kv_tokens"],
            node.dims["score_pairs"],
        )
    pairs = sum(node.dims["score_pairs"] for node in (nodes["attention_prefill"], *others))
    assert _LENGTH * (_LENGTH + 1) // 2 == 4 * pairs
    sends = [nodes[f"attention_prefill_ring_send_{i}"] for i in (1, 2, 3)]
    # Four of the eight key heads of a rank of tp, as keys and as values.
    assert {own * 4 * 128 * 2 * 2} == {node.dims["message_bytes"] for node in sends}
    assert ["attention_prefill", "attention_prefill_ring_1", "attention_prefill_ring_2"] == [
        node.overlaps_with for node in sends
    ]
    assert own == nodes["mlp_up_proj"].dims["m"]


def test_gradients_of_keys_go_around_the_ring_and_home() -> None:
    nodes = _backward(_rank(cp=4), _options(_ALL_HIDDEN))
    once = _LENGTH // 4 * 8 * 128 * 2 * 2
    sends = [nodes[f"attention_prefill_ring_send_{i}_backward"] for i in (1, 2, 3)]
    assert {2 * once} == {node.dims["message_bytes"] for node in sends}
    assert "attention_prefill_ring_1_backward" == sends[1].overlaps_with
    assert once == nodes["attention_prefill_ring_return_backward"].dims["message_bytes"]


def test_ranks_exchange_tokens_for_heads_with_four_all_to_alls() -> None:
    """With fewer key heads than ranks each is sent to several."""
    nodes = _lower(_rank(tp=2, cp=8), _options(context_parallel="all_to_all"))
    own = _LENGTH // 8
    sizes = {
        content: nodes[f"attention_prefill_{content}_all_to_all"].dims["message_bytes"]
        for content in ("query", "key", "value", "output")
    }
    expected = {"query": 16, "key": 8, "value": 8, "output": 16}
    assert {name: own * heads * 128 * 2 for name, heads in expected.items()} == sizes
    attention = nodes["attention_prefill"].dims
    assert (2, 1, _LENGTH) == (
        attention["num_heads"],
        attention["num_kv_heads"],
        attention["q_tokens"],
    )


def test_hierarchical_ranks_exchange_heads_on_a_node_and_send_keys_around_nodes() -> None:
    """Of 8 ranks 4 are on a node next to 2 of tp: pairs of nodes send what 4 have gathered."""
    nodes = _lower(_rank(tp=2, cp=8), _options(_ALL_HIDDEN, context_parallel="hierarchical"))
    inner = {"devices_per_node": 4, "num_nodes": 1}
    query, send = (
        nodes[f"attention_prefill_{name}"] for name in ("query_all_to_all", "ring_send_1")
    )
    assert {"message_bytes": _LENGTH // 8 * 16 * 128 * 2, **inner} == query.dims
    # A key head is left of four: of it a rank has the tokens of its node, keys and values.
    outer = {"devices_per_node": 1, "num_nodes": 2}
    send = nodes["attention_prefill_ring_send_1"]
    assert {"message_bytes": _LENGTH // 2 * 128 * 2 * 2, **outer} == send.dims
    assert "attention_prefill_ring_send_2" not in nodes
    attention = nodes["attention_prefill"].dims
    assert (4, 1, _LENGTH // 2) == tuple(
        attention[name] for name in ("num_heads", "num_kv_heads", "q_tokens")
    )


@pytest.mark.parametrize(("tp", "cp", "same"), [(2, 4, "all_to_all"), (8, 4, "ring")])
def test_hierarchical_is_one_exchange_where_a_node_holds_all_ranks_or_one(
    tp: int, cp: int, same: str
) -> None:
    rank = _rank(tp=tp, cp=cp)
    for lower in (_lower, _backward):
        both = [lower(rank, _options(context_parallel=name)) for name in (same, "hierarchical")]
        assert both[0] == both[1]


def test_isp_gathers_weights_ahead_and_scatters_their_gradients() -> None:
    options = _options(weight_parallel="isp", weight_degree=8)
    rank = _rank(tp=4, dp=2)
    nodes, backward = _lower(rank, options), _backward(rank, options)
    gather = nodes["mlp_down_proj_weight_all_gather"]
    expected = {"message_bytes": 4096 * 14336 * 2, "devices_per_node": 8, "num_nodes": 1}
    assert (expected, Overlap.PREFETCH, 32) == (gather.dims, gather.overlap, gather.repeat)
    scatter = backward["mlp_down_proj_weight_gradient_reduce_scatter"]
    assert ("reduce_scatter", Overlap.DEFERRED) == (scatter.operator, scatter.overlap)
    assert Overlap.PREFETCH is backward["mlp_down_proj_weight_all_gather_backward"].overlap
    assert (_LENGTH // 4, 14336) == (
        nodes["mlp_down_proj"].dims["m"],
        nodes["mlp_down_proj"].dims["k"],
    )
    assert _LENGTH == nodes["attention_prefill"].dims["q_tokens"]
    assert "input_norm_weight_all_gather" not in nodes


def test_chunks_of_layers_wrap_around_the_pipeline() -> None:
    """Eight devices of tp fill a node, so every neighbour is on another one."""
    rank = dataclasses.replace(_rank(tp=4, pp=2), layers_by_stage=(10, 9, 0, 13))
    stages = [
        _lower(dataclasses.replace(rank, stage=stage), _options(sequence_parallel=True))
        for stage in range(4)
    ]
    assert [10, 9, None, 13] == [
        stage["mlp_up_proj"].repeat if "mlp_up_proj" in stage else None for stage in stages
    ]
    sends = [stage.get("stage_send") for stage in stages]
    assert [True, True, True, False] == [send is not None for send in sends]
    assert {_LENGTH // 4 * 4096 * 2} == {s.dims["message_bytes"] for s in sends if s is not None}


def test_a_stage_sends_to_its_real_neighbour() -> None:
    """Two stages on a node: the first pair is inside, the second across."""
    sends = [_lower(_rank(tp=4, pp=4, stage=stage), _options())["stage_send"] for stage in range(3)]
    assert [1, 2, 1] == [send.dims["num_nodes"] for send in sends]


def test_scattered_transfers_are_gathered_on_arrival() -> None:
    trainer = dataclasses.replace(
        _NOTHING_HIDDEN, scatters_stage_transfers=True, sends_attention_mask=True
    )
    forward = _lower(_rank(tp=4, pp=2), _options(trainer))
    boundary = {
        role: node.dims["message_bytes"]
        for role, node in forward.items()
        if node.section is Section.BOUNDARY
    }
    assert {
        "stage_send": _LENGTH * 4096 * 2 // 4,
        "stage_receive_all_gather": _LENGTH * 4096 * 2,
        "stage_send_mask": _LENGTH**2 * 2,
    } == boundary


def test_groups_share_the_network_ports_of_a_node() -> None:
    """Four ports for eight devices: eight rings of one device a node go through them at once."""
    rank = dataclasses.replace(_rank(tp=8, cp=2), ports_per_node=4)
    send = _lower(rank, _options())["attention_prefill_ring_send_1"]
    assert (2, 2) == (send.num_sharing, send.dims["num_nodes"])
    plenty = dataclasses.replace(rank, ports_per_node=0)
    assert 1 == _lower(plenty, _options())["attention_prefill_ring_send_1"].num_sharing


def test_layouts_that_cannot_be_say_why() -> None:
    assert "cut into 6 pieces" in _reasons(_rank(cp=3), _options())
    ulysses = _options(context_parallel="all_to_all")
    assert "64 ranks cannot share the 32 heads" in _reasons(_rank(tp=8, cp=8), ulysses)
    assert "must be one of ring, all_to_all, hierarchical" in _reasons(
        _rank(cp=2), _options(context_parallel="")
    )
    unfused = dataclasses.replace(_NOTHING_HIDDEN, attention="unfused")
    assert "whole rows of scores" in _reasons(_rank(cp=2), _options(unfused))
    isp = _options(weight_parallel="isp", weight_degree=3)
    assert "weight_degree 3 does not divide the 8 ranks" in _reasons(_rank(tp=8), isp)
    rows = _options(unfused, weight_parallel="isp")
    assert "whole rows of scores; set tp 1" in _reasons(_rank(tp=2), rows)
    assert "isp splits no experts" in _reasons(
        _rank(find_model("mixtral-8x7b")), _options(weight_parallel="isp")
    )
    assert "must be msp, fsp, isp or empty" in _reasons(_rank(), _options(weight_parallel="x"))
    uneven = dataclasses.replace(_rank(pp=2), layers_by_stage=(16, 15))
    assert "the stages have 31 layers and llama-3-8b has 32" in _reasons(uneven, _options())
    three = dataclasses.replace(_rank(pp=2), layers_by_stage=(16, 15, 1))
    assert "3 stages do not divide over the 2 ranks" in _reasons(three, _options())
    phi = dataclasses.replace(find_model("phi-2"), num_heads=20, num_kv_heads=20)
    split = _options(sequence_parallel=True)
    assert "5 does not divide the 4096 tokens" in _reasons(_rank(phi, tp=5), split)
