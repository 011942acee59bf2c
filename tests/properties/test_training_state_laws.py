"""Laws of what ranks exchange of training states, whatever is sharded over which of them."""

import dataclasses
from collections.abc import Iterable

from hypothesis import assume, given
from hypothesis import strategies as st

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.lowering.graph import OperatorNode, Section
from foretoken.domain.lowering.lower import lower_rank
from foretoken.domain.lowering.options import Nodes
from foretoken.domain.models.architecture import find_model
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.limit import list_broken
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.units import ceil_divide
from foretoken.simulator.rank import chunk_ranks
from foretoken.simulator.steps.legality import shard_limits
from foretoken.simulator.steps.stage_operators import micro_batch_shape, training_options
from foretoken.simulator.steps.state_collectives import StateExchange, exchange_states
from foretoken.simulator.steps.strategies import Strategies

_MODELS = [
    dataclasses.replace(find_model(name), num_layers=4)
    for name in ("llama-2-7b", "mixtral-8x7b", "deepseek-v3")
]
# Gradients in the weights' format, so that a gather is as large as a scatter.
_RULES = {"gradient_dtype": "null"}
_degrees = st.sampled_from((1, 2, 4))


@st.composite
def _scenarios(draw: st.DrawFn) -> TrainingScenario:
    model = draw(st.sampled_from(_MODELS))
    layout = ParallelLayout(
        tp=draw(_degrees),
        cp=draw(_degrees),
        dp=draw(_degrees),
        pp=draw(st.sampled_from((1, 2))),
        ep=draw(_degrees) if model.moe else 1,
    )
    bucket = draw(st.sampled_from((0, 10**6, 10**9)))
    scenario = TrainingScenario(
        model=model,
        device="h100_sxm",
        topology="h100_dgx",
        layout=layout,
        sequence_length=512,
        zero_stage=draw(st.sampled_from((0, 1, 2, 3))),
        shard_degree=draw(st.sampled_from((0, 2, 4))),
        weight_parallel=draw(st.sampled_from(("", "", "isp"))),
        trainer=TrainerSpec(rules={**_RULES, "bucket_elements": str(bucket)}),
    )
    assume(not list(list_broken(shard_limits(Strategies.of_scenario(scenario)))))
    return scenario


def _exchange(scenario: TrainingScenario, stage: int) -> StateExchange:
    rank = chunk_ranks(scenario)[stage]
    options = training_options(scenario, scenario.trainer.resolve())
    try:
        nodes = lower_rank(micro_batch_shape(scenario), options, rank)
    except InvalidRequestError:
        assume(False)
        raise
    forward: Nodes = tuple(node for node in nodes if node.section is not Section.BOUNDARY)
    return exchange_states(forward, rank, scenario)


def _moved_bytes(nodes: Iterable[OperatorNode]) -> float:
    return sum(
        float(find_operator(node.operator).moved_bytes(node.dims, 2.0)) * node.repeat
        for node in nodes
        if node.axis == "dp"
    )


@given(_scenarios(), st.sampled_from((0, 1)))
def test_shards_and_replicas_are_all_the_ranks(scenario: TrainingScenario, stage: int) -> None:
    """Every rank of tp, cp and dp is in one group of each kind."""
    layout = scenario.layout
    assume(stage < layout.pp)
    for group in _exchange(scenario, stage).groups:
        num_ranks = group.ranks.num_ranks * group.ranks.stride
        assert layout.tp * layout.cp * layout.dp == num_ranks
        assert sum(group.layer_params) <= group.num_params


@given(_scenarios(), st.sampled_from((0, 1)))
def test_sharding_moves_what_an_all_reduce_does(scenario: TrainingScenario, stage: int) -> None:
    """Scatter and gather are an all-reduce; sharded parameters are gathered once more."""
    assume(stage < scenario.layout.pp)
    whole = dataclasses.replace(scenario, zero_stage=0, shard_degree=0)
    expected = _moved_bytes(_exchange(whole, stage).reduction)
    split = dataclasses.replace(scenario, shard_degree=0)
    found = _exchange(split, stage)
    gathered = _moved_bytes(found.gather) + _moved_bytes(found.forward)
    scattered = _moved_bytes(found.reduction) + _moved_bytes(found.backward_reduction)
    assert abs(gathered + scattered - expected) <= 1e-6 * expected + 4096
    assert _moved_bytes(found.forward) == _moved_bytes(found.backward_gather)


@given(_scenarios(), st.sampled_from((0, 1)))
def test_every_parameter_is_updated_by_some_rank(scenario: TrainingScenario, stage: int) -> None:
    assume(stage < scenario.layout.pp)
    found = _exchange(scenario, stage)
    shares = [ceil_divide(group.num_params, group.ranks.shards) for group in found.groups]
    assert sum(shares) == found.num_updated
    if scenario.zero_stage == 0:
        assert sum(group.num_params for group in found.groups) == found.num_updated
