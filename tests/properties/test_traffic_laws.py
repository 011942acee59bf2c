"""Laws of what devices send each other: conserved, and only where a layout lets them."""

import dataclasses

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.models.architecture import find_model
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import CONTEXT_PARALLELS, TrainingScenario
from foretoken.domain.results.training_report import TrafficColumns
from foretoken.simulator.rank import chunk_ranks
from foretoken.simulator.steps.pipelines.schedule import RankOrder, find_schedule
from foretoken.simulator.steps.stage_operators import StepOperators, lower_step
from foretoken.simulator.training.accounting import pass_nodes
from foretoken.simulator.training.rank_traffic import MAX_CELLS, measure_traffic
from foretoken.simulator.training.scenario_checks import check_chunks, check_scenario

_MODELS = [
    dataclasses.replace(find_model(name), num_layers=4)
    for name in ("llama-3-8b", "gpt2-xl", "mixtral-8x7b")
]
_degrees = st.sampled_from((1, 2, 4))
_layouts = st.builds(ParallelLayout, tp=_degrees, cp=_degrees, dp=_degrees, pp=_degrees)


@st.composite
def _scenarios(draw: st.DrawFn) -> TrainingScenario:
    model, layout = draw(st.sampled_from(_MODELS)), draw(_layouts)
    # More of them would share cells.
    assume(layout.num_devices <= MAX_CELLS)
    if model.moe:
        layout = dataclasses.replace(layout, ep=draw(st.sampled_from((1, 2, 4))))
    return TrainingScenario(
        model=model,
        device="a100_sxm_80",
        topology="a100_dgx",
        layout=layout,
        sequence_length=512,
        global_batch_size=32,
        zero_stage=draw(st.integers(0, 3)),
        shard_degree=draw(st.sampled_from((0, 2))),
        sequence_parallel=draw(st.booleans()),
        context_parallel=draw(st.sampled_from(CONTEXT_PARALLELS)),
        weight_parallel=draw(st.sampled_from(("", "", "msp", "fsp", "isp"))),
        recompute=draw(st.sampled_from(("none", "full"))),
    )


def _lower(scenario: TrainingScenario) -> tuple[StepOperators, tuple[RankOrder, ...]]:
    schedule = find_schedule(scenario.pipeline_schedule)
    try:
        check_scenario(scenario)
        ranks = chunk_ranks(scenario)
        check_chunks(ranks, scenario)
    except InvalidRequestError:
        assume(condition=False)
    orders = schedule.orders(scenario.layout.pp, scenario.num_micro_batches, 1)
    return lower_step(scenario, scenario.trainer.resolve(), ranks, orders), orders


def _matrix(traffic: TrafficColumns, axis: str, num_devices: int) -> NDArray[np.float64]:
    matrix = np.zeros((num_devices, num_devices))
    for name, source, target, num_bytes in zip(
        traffic.axis, traffic.source, traffic.target, traffic.bytes, strict=True
    ):
        if name == axis:
            matrix[source, target] += num_bytes
    return matrix


@given(_scenarios())
def test_what_is_sent_is_what_the_timed_operators_move(scenario: TrainingScenario) -> None:
    """All bytes are those of the operators, times the ranks and the micro batches that run them."""
    operators, orders = _lower(scenario)
    traffic = measure_traffic(operators, orders, scenario)
    layout = scenario.layout
    num_ranks = layout.tp * layout.cp * layout.dp
    expected = 0.0
    for rank, order in enumerate(orders):
        chunk = operators.chunks[rank]
        nodes = [
            *(
                node
                for slot in order
                for item in slot
                for node in pass_nodes(chunk, item.kind).nodes
            ),
            *(node for _ in range(scenario.num_micro_batches) for node in chunk.sends),
            *(node for _ in range(scenario.num_micro_batches) for node in chunk.sends_back),
            *(*chunk.states.reduction, *chunk.states.gather, *operators.checks[rank]),
        ]
        expected += num_ranks * sum(
            find_operator(node.operator).moved_bytes(node.dims, 2.0) * node.repeat
            for node in nodes
            if find_operator(node.operator).is_collective
        )
    assert np.isclose(sum(traffic.bytes), expected, rtol=1e-9)


@given(_scenarios())
def test_devices_send_to_those_of_their_groups_alone(scenario: TrainingScenario) -> None:
    """Devices that share an axis differ in its coordinate; each sends as much as it receives."""
    traffic = measure_traffic(*_lower(scenario), scenario)
    layout = scenario.layout
    num_devices = layout.num_devices
    places = np.arange(num_devices)
    coordinates = dict(
        zip(
            ("pp", "dp", "cp", "tp"),
            np.unravel_index(places, (layout.pp, layout.dp, layout.cp, layout.tp)),
            strict=True,
        )
    )
    # Those of `ep`, and the weights of `isp`, lie across the axes of the layout.
    moved = {"tp": {"tp"}, "cp": {"cp"}, "dp": {"dp", "cp"}, "pp": {"pp"}}
    if scenario.weight_parallel == "isp":
        moved = {axis: moved[axis] for axis in ("cp", "pp")}
    if layout.ep > 1:
        del moved["dp"]
    # What all agree on goes round everyone, four bytes of it.
    agreed = 16.0
    for axis, varied in moved.items():
        matrix = _matrix(traffic, axis, num_devices)
        assert np.trace(matrix) == 0
        if axis != "pp":
            assert np.allclose(matrix.sum(axis=0), matrix.sum(axis=1), atol=2 * agreed)
        for name in {"tp", "cp", "dp", "pp"} - varied:
            crossing = coordinates[name][:, None] != coordinates[name][None, :]
            assert matrix[crossing].max(initial=0.0) <= agreed, (axis, name)
