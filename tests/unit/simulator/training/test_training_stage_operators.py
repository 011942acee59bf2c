"""The operators of each pass of each chunk, and of the end of a step."""

from collections import Counter
from typing import Any

import pytest
from training_fakes import build_scenario

from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.lowering.graph import Section
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.simulator.rank import chunk_ranks
from foretoken.simulator.steps.pipelines.schedule import find_schedule
from foretoken.simulator.steps.stage_operators import StepOperators, lower_step


def _lower(layout: ParallelLayout, **changes: Any) -> StepOperators:
    scenario = build_scenario(layout, global_batch_size=16, **changes)
    schedule = find_schedule(scenario.pipeline_schedule)
    orders = schedule.orders(layout.pp, 16 // layout.dp, scenario.virtual_stages)
    return lower_step(scenario, scenario.trainer.resolve(), chunk_ranks(scenario), orders)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (ParallelLayout(pp=2), {}),
        (ParallelLayout(dp=8), {"zero_stage": 3}),
        (ParallelLayout(tp=2, pp=2), {"recompute": "full"}),
        (ParallelLayout(dp=8, ep=8), {"model": find_model("mixtral-8x7b"), "zero_stage": 2}),
    ],
)
def test_the_halves_of_a_backward_pass_are_the_whole(
    layout: ParallelLayout, changes: dict[str, Any]
) -> None:
    for chunk in _lower(layout, **changes).chunks:
        both, inputs, weights = (
            Counter((node.role, node.repeat) for node in chunk.backward_pass(half).nodes)
            for half in ("both", "input", "weight")
        )
        assert both == inputs + weights
        assert any(role.endswith("_wgrad") for role, _ in weights)
        assert not any(role.endswith("_wgrad") for role, _ in inputs)


def test_a_layer_is_gathered_recomputed_differentiated_and_reduced_in_that_order() -> None:
    (chunk,) = _lower(ParallelLayout(dp=8), zero_stage=3, recompute="full").chunks
    nodes = [node for node in chunk.backward_pass().nodes if node.section is Section.LAYER]
    parts = [
        "gather"
        if node.group == "parameter_gather"
        else "reduce"
        if node.group == "gradient_reduction"
        else "recompute"
        if node.group == "recompute"
        else "backward"
        for node in nodes
    ]
    assert ["gather", "recompute", "backward", "reduce"] == list(dict.fromkeys(parts))
    assert sorted(parts, key=["gather", "recompute", "backward", "reduce"].index) == parts


def test_the_head_is_differentiated_before_the_layers_and_the_embedding_after() -> None:
    (chunk,) = _lower(ParallelLayout()).chunks
    sections = [node.section for node in chunk.backward_pass().nodes]
    assert [Section.HEAD, Section.LAYER, Section.EMBEDDING] == list(dict.fromkeys(sections))
    assert list(range(31, -1, -1)) == list(chunk.backward_pass().layers)


def test_scattered_transfers_are_gathered_by_the_receiver() -> None:
    trainer = TrainerSpec(profile="gpt-neox")
    first, last = _lower(ParallelLayout(tp=2, pp=2), trainer=trainer, dtype=DType.FP16).chunks
    role = "stage_receive_all_gather"
    assert {"send_recv"} == {node.operator for node in first.sends}
    assert role not in {node.role for node in first.forward_pass.nodes}
    assert role == last.forward_pass.nodes[0].role
    assert role == first.backward_pass().nodes[0].role
    assert role not in {node.role for node in last.backward_pass().nodes}


def test_gradients_come_back_without_the_attention_mask() -> None:
    trainer = TrainerSpec(profile="gpt-neox")
    first, _ = _lower(ParallelLayout(pp=2), trainer=trainer, dtype=DType.FP16).chunks
    assert ["stage_send", "stage_send_mask"] == [node.role for node in first.sends]
    (back,) = first.sends_back
    assert ("stage_send_backward", first.sends[0].dims) == (back.role, back.dims)


def test_transfers_cross_the_links_between_the_ranks_of_their_chunks() -> None:
    """Two ranks of the pipeline on each node, three of whose four links are within one."""
    folded = _lower(ParallelLayout(tp=4, pp=4), pipeline_schedule="zero_bubble_v", virtual_stages=2)
    num_nodes = [[node.dims["num_nodes"] for node in chunk.sends] for chunk in folded.chunks]
    assert [[1], [2], [1], [], [1], [2], [1], []] == num_nodes
    mirrored = _lower(ParallelLayout(tp=4, pp=4), pipeline_schedule="dualpipe")
    num_nodes = [[node.dims["num_nodes"] for node in chunk.sends] for chunk in mirrored.chunks]
    assert [[1], [2], [1], []] == num_nodes


def test_chunks_that_fold_back_share_a_tied_embedding() -> None:
    model = find_model("gpt2-xl")
    changes: dict[str, Any] = {"model": model, "sequence_length": 1024}
    straight = _lower(ParallelLayout(pp=4), **changes)
    folded = _lower(
        ParallelLayout(pp=4), **changes, pipeline_schedule="zero_bubble_v", virtual_stages=2
    )
    role = "embedding_gradient_all_reduce"
    assert role in {node.role for node in straight.chunks[0].states.reduction}
    assert role not in {node.role for node in folded.all_nodes}
    assert 0 == folded.rank_of_chunk(0) == folded.rank_of_chunk(7)
    num_updated = [sum(c.states.num_updated for c in each.chunks) for each in (straight, folded)]
    assert model.vocab * model.hidden == num_updated[0] - num_updated[1]


def test_chunks_on_two_ranks_sum_their_gradients_over_both() -> None:
    operators = _lower(ParallelLayout(tp=2, pp=4), pipeline_schedule="dualpipe")
    assert ((0, 3), (1, 2), (1, 2), (0, 3)) == operators.chunks_of_rank
    for chunk in operators.chunks:
        (node,) = chunk.states.reduction
        assert "mirrored_gradient_all_reduce" == node.role
        num_params = sum(group.num_params for group in chunk.states.groups)
        assert 4 * num_params == node.dims["message_bytes"]
    apart = _lower(ParallelLayout(tp=4, pp=4), pipeline_schedule="dualpipe")
    sums = [node for chunk in apart.chunks for node in chunk.states.reduction]
    assert [2] * 4 == [node.dims["num_nodes"] for node in sums]


def test_all_ranks_agree_on_a_norm_before_they_update() -> None:
    operators = _lower(ParallelLayout(tp=2, pp=2, dp=2), zero_stage=1)
    for checks, updates in zip(operators.checks, operators.updates, strict=True):
        (agreement,) = [node for node in checks if node.operator == "all_reduce"]
        assert (8, 1) == (agreement.dims["devices_per_node"], agreement.dims["num_nodes"])
        assert "optimizer_update" in {node.role for node in updates}


def test_an_agreement_goes_over_the_nodes_of_its_ranks() -> None:
    """Without shards the ranks of dp have the same gradients; the stages are nodes apart."""
    operators = _lower(ParallelLayout(tp=2, pp=2, dp=8))
    (agreement,) = [node for node in operators.checks[0] if node.operator == "all_reduce"]
    assert (2, 2) == (agreement.dims["devices_per_node"], agreement.dims["num_nodes"])
