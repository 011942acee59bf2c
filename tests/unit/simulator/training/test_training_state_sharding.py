"""What ranks with the same parameters exchange, by ZeRO stage, group and framework."""

import dataclasses
from collections.abc import Iterator, Mapping

import pytest

from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.lowering.graph import OperatorNode, Overlap, Section
from foretoken.domain.lowering.lower import lower_rank
from foretoken.domain.lowering.options import Nodes
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import find_model
from foretoken.domain.models.parameters import count_parameters
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.limit import Limit, list_broken
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.rank import chunk_ranks
from foretoken.simulator.steps.legality import shard_limits
from foretoken.simulator.steps.stage_operators import micro_batch_shape, training_options
from foretoken.simulator.steps.state_collectives import StateExchange, exchange_states
from foretoken.simulator.steps.strategies import Strategies

_LLAMA = find_model("llama-2-7b")
# Norms are split by none and lowering leaves biases out, which these models have none of.
_NUM_PARAMS = count_parameters(_LLAMA).total


def _scenario(rules: Mapping[str, str] | None = None, **changes: object) -> TrainingScenario:
    scenario = TrainingScenario(
        model=_LLAMA, device="h100_sxm", topology="h100_dgx", trainer=TrainerSpec(rules=rules or {})
    )
    return dataclasses.replace(scenario, **changes)  # type: ignore[arg-type]


def _shard_limits(**changes: object) -> Iterator[Limit]:
    return shard_limits(Strategies.of_scenario(_scenario(**changes)))


def _exchange(scenario: TrainingScenario, stage: int = 0) -> StateExchange:
    rank = chunk_ranks(scenario)[stage]
    options = training_options(scenario, scenario.trainer.resolve())
    nodes = lower_rank(micro_batch_shape(scenario), options, rank)
    forward = tuple(node for node in nodes if node.section is not Section.BOUNDARY)
    return exchange_states(forward, rank, scenario)


def _collectives(nodes: Nodes) -> list[tuple[str, int, int]]:
    """Return role, bytes of all repetitions, and ranks."""
    return [
        (node.role, node.dims["message_bytes"] * node.repeat, _num_ranks(node))
        for node in nodes
        if node.axis
    ]


def _num_ranks(node: OperatorNode) -> int:
    return int(node.dims["devices_per_node"] * node.dims["num_nodes"])


def test_one_rank_exchanges_nothing() -> None:
    found = _exchange(_scenario(zero_stage=3))
    assert () == (*found.forward, *found.backward_gather, *found.reduction, *found.gather)
    assert _NUM_PARAMS == found.num_updated


def test_gradients_are_summed_over_the_ranks_of_dp_and_cp() -> None:
    found = _exchange(_scenario(layout=ParallelLayout(dp=2, cp=4)))
    assert [("dense_gradient_all_reduce", 4 * _NUM_PARAMS, 8)] == _collectives(found.reduction)
    assert () == found.gather


def test_sharded_optimizers_scatter_gradients_and_gather_parameters() -> None:
    found = _exchange(_scenario(layout=ParallelLayout(dp=8), zero_stage=1))
    assert [("dense_gradient_reduce_scatter", 4 * _NUM_PARAMS, 8)] == _collectives(found.reduction)
    assert [("dense_parameter_all_gather", 2 * _NUM_PARAMS, 8)] == _collectives(found.gather)
    assert _NUM_PARAMS // 8 == found.num_updated


def test_sharded_gradients_are_scattered_for_every_micro_batch() -> None:
    found = _exchange(_scenario(layout=ParallelLayout(dp=8), zero_stage=2))
    scattered = _collectives(found.backward_reduction)
    assert {("dense_gradient_reduce_scatter", 8)} == {(role, n) for role, _, n in scattered}
    assert 4 * _NUM_PARAMS == sum(size for _, size, _ in scattered)
    assert [] == _collectives(found.reduction)
    layers = [n for n in found.backward_reduction if n.section is Section.LAYER]
    assert [(0, 32)] == [(node.first_layer, node.repeat) for node in layers]


def test_sharded_parameters_are_gathered_before_both_passes() -> None:
    found = _exchange(_scenario(layout=ParallelLayout(dp=8), zero_stage=3))
    for gathers in (found.forward, found.backward_gather):
        assert 2 * _NUM_PARAMS == sum(size for _, size, _ in _collectives(gathers))
    assert () == found.gather


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_weights_in_8_bit_are_gathered_by_a_byte_each(zero_stage: int) -> None:
    fields = {"layout": ParallelLayout(dp=8), "zero_stage": zero_stage, "dtype": DType.FP8}
    found = _exchange(_scenario({"keeps_narrow_weights": "true"}, **fields))
    gathers = found.gather if zero_stage == 1 else found.forward
    in_layers = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    assert 2 * _NUM_PARAMS - in_layers == sum(size for _, size, _ in _collectives(gathers))


def test_fsdp2_gathers_and_reduces_once_a_step_in_a_pipeline() -> None:
    layout, trainer = ParallelLayout(pp=2, dp=8), TrainerSpec(profile="torchtitan")
    found = _exchange(_scenario(layout=layout, zero_stage=3, trainer=trainer))
    assert () == (*found.forward, *found.backward_gather, *found.backward_reduction)
    num_params = found.groups[0].num_params
    assert [("dense_parameter_all_gather", 2 * num_params, 8)] == _collectives(found.gather)
    (reduction,) = found.reduction
    assert ("reduce_scatter", Overlap.EXPOSED) == (reduction.operator, reduction.overlap)
    alone = _exchange(_scenario(layout=ParallelLayout(dp=8), zero_stage=3, trainer=trainer))
    assert () == (*alone.gather, *alone.reduction)
    assert alone.forward


def test_replicas_of_shards_sum_their_shares_again() -> None:
    """HSDP: four shards on neighbouring ranks, on two replicas."""
    layout = ParallelLayout(dp=8)
    found = _exchange(_scenario(layout=layout, zero_stage=1, shard_degree=4))
    assert [
        ("dense_gradient_reduce_scatter", 4 * _NUM_PARAMS, 4),
        ("dense_gradient_all_reduce", _NUM_PARAMS, 2),
    ] == _collectives(found.reduction)
    (group,) = found.groups
    assert (4, 2, 4) == (
        *(group.ranks.shards, group.ranks.replicas, group.ranks.of_replicas.stride),
    )


def test_buckets_may_start_before_the_last_backward_pass_ends() -> None:
    rules = {"overlaps_gradient_reduction": "true", "bucket_elements": "1000000000"}
    found = _exchange(_scenario(rules, layout=ParallelLayout(dp=8)))
    sums = [node for node in found.reduction if node.axis]
    assert [6, 1] == [node.repeat for node in sums]
    assert {Overlap.DEFERRED} == {node.overlap for node in sums}
    assert 4 * _NUM_PARAMS == sum(size for _, size, _ in _collectives(found.reduction))


def test_experts_are_reduced_over_the_ranks_that_hold_the_same() -> None:
    """Four groups of experts over eight ranks: two ranks hold each."""
    model = find_model("mixtral-8x7b")
    scenario = _scenario(model=model, layout=ParallelLayout(dp=8, ep=4), zero_stage=1)
    found = _exchange(scenario)
    experts = 32 * 8 * 3 * 4096 * 14336
    dense = count_parameters(model).total - experts
    assert [
        ("dense_gradient_reduce_scatter", 4 * dense, 8),
        ("expert_gradient_reduce_scatter", experts, 2),
    ] == _collectives(found.reduction)
    assert dense // 8 + experts // 4 // 2 == found.num_updated
    expert = found.groups[1]
    assert (4, 3 * 4096 * 14336 * 2) == (expert.ranks.stride, expert.num_layer_params)


def test_expert_layers_after_dense_ones_have_gathers_of_their_own() -> None:
    model = dataclasses.replace(find_model("deepseek-v3"), num_layers=5)
    scenario = _scenario(model=model, layout=ParallelLayout(dp=16, ep=8), zero_stage=3)
    layers = [n for n in _exchange(scenario).forward if n.section is Section.LAYER]
    assert [
        ("dense_parameter_all_gather", 0, 3),
        ("dense_parameter_all_gather", 3, 2),
        ("expert_parameter_all_gather", 3, 2),
    ] == [(node.role, node.first_layer, node.repeat) for node in layers]


def test_a_tied_embedding_is_summed_over_the_first_and_the_last_stage() -> None:
    model = find_model("gpt2-xl")
    scenario = _scenario(model=model, sequence_length=1024, layout=ParallelLayout(pp=4))
    found = [_collectives(_exchange(scenario, stage).reduction) for stage in range(4)]
    expected = [("embedding_gradient_all_reduce", 4 * model.vocab * model.hidden, 2)]
    assert [expected, [], [], expected] == found


def test_gradients_of_split_tokens_are_summed_where_parameters_are_whole() -> None:
    layout = ParallelLayout(tp=4)
    found = _exchange(_scenario(layout=layout, sequence_parallel=True))
    norms = (2 * 32 + 1) * 4096
    assert [("norm_gradient_all_reduce", 4 * norms, 4)] == _collectives(found.reduction)
    assert () == _exchange(_scenario(layout=layout)).reduction
    heads = _exchange(_scenario(layout=layout, model=find_model("qwen3-8b")))
    assert [("norm_gradient_all_reduce", 4 * 36 * 2 * 128, 4)] == _collectives(heads.reduction)


def test_shares_of_weights_are_reduced_over_their_replicas() -> None:
    """InternEvo's isp: eight ranks share the weights, two such sets see other samples."""
    scenario = _scenario(layout=ParallelLayout(tp=4, dp=4), weight_parallel="isp", weight_degree=8)
    (group,) = _exchange(scenario).groups
    norms = (2 * 32 + 1) * 4096
    assert ((_NUM_PARAMS - norms) // 8 + norms, 8, 2) == (
        group.num_params,
        group.ranks.stride,
        group.ranks.replicas,
    )


def test_norms_that_are_no_shares_of_weights_are_not_summed_over_tp_again() -> None:
    """Under isp every rank has gradients of whole norms: its replicas sum them with the rest."""
    layout = ParallelLayout(tp=4)
    whole = _scenario(layout=layout, sequence_parallel=True, weight_parallel="isp", weight_degree=4)
    roles = [role for role, *_ in _collectives(_exchange(whole).reduction)]
    assert "norm_gradient_all_reduce" not in roles


def test_gradients_are_reduced_in_the_frameworks_format() -> None:
    scenario = _scenario({"gradient_dtype": "null"}, layout=ParallelLayout(dp=2))
    (node,) = _exchange(scenario).reduction
    assert (DType.BF16, 2 * _NUM_PARAMS) == (node.dtype, node.dims["message_bytes"])


def test_a_degree_of_weights_that_cuts_no_ranks_is_said_elsewhere_alone() -> None:
    """What does not divide the tp x cp x dp ranks says nothing of replicas."""
    layout = ParallelLayout(tp=2, dp=4)
    isp = {"layout": layout, "weight_parallel": "isp", "shard_degree": 3, "zero_stage": 1}
    assert [] == list(list_broken(_shard_limits(weight_degree=3, **isp)))
    assert 1 == len(list(list_broken(_shard_limits(weight_degree=8, **isp))))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"shard_degree": 3, "zero_stage": 1},
            ["3 does not divide the 8 ranks that hold the same"],
        ),
        ({"shard_degree": 4, "zero_stage": 1}, []),
        ({"shard_degree": 4}, ["needs zero_stage 1, 2 or 3"]),
    ],
)
def test_sharding_that_cannot_be_says_why(changes: dict[str, int], expected: list[str]) -> None:
    limits = _shard_limits(layout=ParallelLayout(dp=8), **changes)
    assert expected == [violation.description for violation in list_broken(limits)]


def test_owners_broadcast_their_parameters_one_after_the_other() -> None:
    """Every tensor has one owner at most; where the gate is a kernel, its weight is a tensor."""
    whole_gate = {"broadcasts_parameters": "true"}
    split_gate = {**whole_gate, "fuses_gate": "false"}
    cases = (
        (8, whole_gate, 8),
        (512, whole_gate, _NUM_TENSORS),
        (512, split_gate, _NUM_TENSORS + _LLAMA.num_layers),
    )
    for dp, rules, num_owners in cases:
        changes = {"layout": ParallelLayout(dp=dp), "zero_stage": 1, "global_batch_size": dp}
        at_once, one_by_one = (
            _exchange(_scenario(chosen, **changes)).gather for chosen in ({}, rules)
        )
        assert [1, num_owners] == [at_once[0].repeat, one_by_one[0].repeat]
        whole = at_once[0].dims["message_bytes"]
        assert whole == pytest.approx(one_by_one[0].dims["message_bytes"] * num_owners, rel=1e-6)


# Of each layer two norms and four products, of the rest embedding, norm and head.
_NUM_TENSORS = 6 * _LLAMA.num_layers + 3


def test_lists_cost_the_host_time_for_each_weight_and_rank() -> None:
    rules = {"list_rank_us": "2", "gathers_again": "true"}
    changes = {"layout": ParallelLayout(dp=8), "zero_stage": 3, "global_batch_size": 8}
    kept = _exchange(_scenario(rules, **changes))
    # Four products in a layer, over eight ranks.
    assert (64.0, 128.0) == (kept.forward_host_us, kept.backward_host_us)
    again = _exchange(_scenario(rules, **changes, recompute="full"))
    assert (64.0, 192.0) == (again.forward_host_us, again.backward_host_us)
    assert 2 * len(again.forward) == len(again.backward_gather)
    plain = _exchange(_scenario({}, **changes))
    (at_once,) = (node for node in plain.forward if node.section is Section.LAYER)
    one_by_one = [
        node.dims["message_bytes"]
        for node in kept.forward
        if node.section is Section.LAYER and node.operator == "all_gather"
    ]
    assert 4 == len(one_by_one)
    assert at_once.dims["message_bytes"] == sum(one_by_one)
