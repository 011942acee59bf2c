"""One pass of a chunk on two streams: computation, and communication during it."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.domain.lowering.graph import OperatorNode, Overlap, Section
from foretoken.domain.measurements.estimate import DType, Phase
from foretoken.simulator.steps.passes import PassParts, PassTime, time_pass, time_passes
from foretoken.simulator.steps.program import PassNodes, StreamRules, cut_program

_NO_DIMS = {"m": 1, "n": 1, "k": 1}


def _compute(role: str, time_us: float, layers: range | None = None) -> OperatorNode:
    return _node(role, "gemm", time_us, layers)


def _communicate(
    role: str,
    time_us: float,
    layers: range | None = None,
    overlap: Overlap = Overlap.EXPOSED,
    beside: str = "",
) -> OperatorNode:
    node = _node(role, "all_reduce", time_us, layers)
    return dataclasses.replace(
        node, group="collective", axis="tp", overlap=overlap, overlaps_with=beside
    )


def _node(role: str, operator: str, time_us: float, layers: range | None) -> OperatorNode:
    return OperatorNode(
        role=role,
        group="gemm",
        section=Section.HEAD if layers is None else Section.LAYER,
        operator=operator,
        dims={**_NO_DIMS, "time_us": time_us},
        dtype=DType.BF16,
        repeat=1 if layers is None else len(layers),
        first_layer=0 if layers is None else layers.start,
        layer_stride=1 if layers is None else layers.step,
    )


def _time(
    nodes: Sequence[OperatorNode],
    layers: Sequence[int] = (),
    gap_us: float = 0.0,
    slowdown_ratio: float = 1.0,
) -> PassTime:
    rules = StreamRules(gap_us=np.array([gap_us]), slowdown_ratio=slowdown_ratio)
    work = PassNodes(nodes=tuple(nodes), layers=layers)
    return time_pass(work, lambda node: np.array([float(node.dims["time_us"])]), rules)


def test_what_is_waited_for_adds_up() -> None:
    layers = range(3)
    nodes = [_compute("gemm", 5, layers), _communicate("sum", 2, layers), _compute("head", 7)]
    time = _time(nodes, layers, gap_us=1)
    assert 3 * (5 + 2 + 1) + 7 == time.total_us[0]
    assert 3 * (5 + 2 + 1) == time.layers_us[0]
    assert 3 * (5 + 1) + 7 == time.compute_us[0]
    assert {("collective", "tp"): [6.0]} == {k: list(v) for k, v in time.exposed_us.items()}
    assert 0 == time.hidden_us[0]


def test_what_is_outside_of_layers_runs_all_its_repetitions() -> None:
    loss = dataclasses.replace(_communicate("loss_all_reduce", 2), repeat=3)
    assert 6 == _time([loss]).total_us[0]


@pytest.mark.parametrize(("communication_us", "expected_us"), [(4, 10), (10, 10), (12, 12)])
def test_communication_beside_an_operator_ends_with_the_longer(
    communication_us: float, expected_us: float
) -> None:
    layers = range(1)
    gather = _communicate("gather", communication_us, layers, Overlap.CONCURRENT, "gemm")
    time = _time([gather, _compute("gemm", 10, layers)], layers)
    assert expected_us == time.total_us[0]
    assert max(0, communication_us - 10) == time.exposed_us["collective", "tp"][0]


def test_communication_slows_down_what_runs_beside_it() -> None:
    """All of it while communication lasts at least as long, else only as long as that does."""
    layers = range(1)

    def time(communication_us: float) -> PassTime:
        gather = _communicate("gather", communication_us, layers, Overlap.CONCURRENT, "gemm")
        return _time([gather, _compute("gemm", 10, layers)], layers, slowdown_ratio=1.25)

    assert 20 == time(20).total_us[0]
    assert 12.5 == time(12.5).total_us[0]
    assert 11 == time(5).total_us[0]
    assert pytest.approx(1) == time(5).slowdown_us[0]


def test_communication_beside_what_the_layer_has_not_is_exposed() -> None:
    layers = range(2)
    gather = _communicate("gather", 4, layers, Overlap.CONCURRENT, "experts")
    assert 28 == _time([gather, _compute("gemm", 10, layers)], layers).total_us[0]


@pytest.mark.parametrize(("gather_us", "expected_us"), [(4, 4 + 30), (10, 40), (15, 15 * 3 + 10)])
def test_prefetched_parameters_hide_behind_the_layer_before(
    gather_us: float, expected_us: float
) -> None:
    """The first layer's are waited for: nothing comes before it."""
    layers = range(3)
    gather = _communicate("gather", gather_us, layers, Overlap.PREFETCH)
    time = _time([gather, _compute("gemm", 10, layers)], layers)
    assert expected_us == time.total_us[0]


def test_the_first_layers_parameters_hide_behind_what_comes_before_it() -> None:
    layers = range(2)
    nodes = [
        _compute("embedding", 6),
        _communicate("gather", 4, layers, Overlap.PREFETCH),
        _compute("gemm", 10, layers),
    ]
    assert 26 == _time(nodes, layers).total_us[0]


def test_deferred_communication_is_left_over() -> None:
    layers = range(3)
    scatter = _communicate("scatter", 12, layers, Overlap.DEFERRED)
    time = _time([_compute("gemm", 10, layers), scatter], layers)
    assert 30 == time.total_us[0]
    assert 10 + 3 * 12 - 30 == time.left_us[0]
    assert 36 == time.hidden_us[0]


@pytest.mark.parametrize(("launch_us", "expected_us"), [(1, 3 * 14), (4, 3 * 14), (6, 3 * 18)])
def test_a_layer_takes_at_least_the_launches_of_its_kernels(
    launch_us: float, expected_us: float
) -> None:
    layers = range(3)
    nodes = [_compute("a", 5, layers), _communicate("sum", 2, layers), _compute("b", 7, layers)]
    rules = StreamRules(gap_us=np.zeros(1), launch_us=launch_us)
    work = PassNodes(nodes=tuple(nodes), layers=layers)
    time = time_pass(work, lambda node: np.array([float(node.dims["time_us"])]), rules)
    assert expected_us == time.total_us[0]


@pytest.mark.parametrize(("dtype", "num_calls"), [(DType.BF16, 8), (DType.FP8, 16)])
def test_experts_are_launched_one_by_one(dtype: DType, num_calls: int) -> None:
    """In 8 bit what they read is converted so, too."""
    layers = range(3)
    experts = dataclasses.replace(
        _node("experts", "grouped_gemm", 5, layers),
        dims={"num_groups": 8, "time_us": 5},
        dtype=dtype,
    )
    work = PassNodes(nodes=(_compute("router", 7, layers), experts), layers=layers)
    rules = StreamRules(gap_us=np.zeros(1), launch_us=4, expert_call_us=2)
    time = time_pass(work, lambda node: np.array([float(node.dims["time_us"])]), rules)
    assert 3 * (2 * 4 + num_calls * 2) == time.total_us[0]


def test_each_gradient_of_an_experts_weight_has_a_hook() -> None:
    """Where experts are launched one by one."""
    rules = StreamRules(gap_us=np.zeros(1), launch_us=4, expert_call_us=2, expert_hook_us=3)
    node = dataclasses.replace(
        _node("experts_wgrad", "grouped_gemm_wgrad", 5, range(2)),
        dims={"num_groups": 8, "time_us": 5},
    )
    inputs = dataclasses.replace(node, role="experts_dgrad", operator="grouped_gemm")
    whole = dataclasses.replace(rules, expert_call_us=0.0)
    found = [rules.submission_us(inputs), rules.submission_us(node), whole.submission_us(node)]
    assert [4 + 8 * 2, 4 + 8 * (2 + 3), 4] == [float(np.ravel(us)[0]) for us in found]


def test_a_module_is_called_once_in_either_pass() -> None:
    """But for the router's product, which has no such module."""
    rules = StreamRules(gap_us=np.zeros(1), launch_us=4, module_call_us=6)
    roles = ("mlp_up_proj", "mlp_up_proj_dgrad", "mlp_up_proj_wgrad", "moe_router")
    found = [rules.submission_us(_compute(role, 1, range(2))) for role in roles]
    assert [10, 10, 4, 4] == found


def test_a_chain_is_launched_kernel_by_kernel() -> None:
    """In proportion to what the operators launch that `launch_us` is of: 103 kernels of 56."""
    rules = StreamRules(gap_us=np.zeros(1), launch_us=5.6)
    forward = dataclasses.replace(_compute("norm", 1, range(2)), num_kernels=(103, 1))
    backward = dataclasses.replace(forward, phase=Phase.BACKWARD)
    found = [rules.submission_us(node) for node in (forward, backward)]
    assert pytest.approx([56 * 5.6, 5.6]) == found


@pytest.mark.parametrize(("waits", "expected_us"), [(True, 3 * 37), (False, 3 * 28)])
def test_the_host_has_nothing_launched_ahead_where_it_waits(
    waits: bool, expected_us: float
) -> None:
    """From the exchange on: launched at 4, 8, 12 and 16, the device ends at 6, 9, 18 and 37.

    Where nothing is waited for, a layer takes what the device does.
    """
    layers = range(3)
    nodes = (
        _compute("attention", 19, layers),
        _communicate("moe_dispatch_all_to_all", 2, layers),
        _compute("experts", 1, layers),
        _compute("sum", 6, layers),
    )
    work = PassNodes(nodes=nodes, layers=layers)
    rules = StreamRules(gap_us=np.zeros(1), launch_us=4, waits_for_counts=waits)
    time = time_pass(work, lambda node: np.array([float(node.dims["time_us"])]), rules)
    assert expected_us == time.total_us[0]


@pytest.mark.parametrize(("axis", "expected_us"), [("tp", 16 + 8 + 10), ("dp", 20)])
def test_collectives_queue_for_those_of_their_own_axis(axis: str, expected_us: float) -> None:
    layers = range(1)
    scatter = _communicate("scatter", 16, layers, Overlap.DEFERRED)
    nodes = [
        dataclasses.replace(scatter, axis=axis),
        _communicate("gather", 8, layers, Overlap.CONCURRENT, "gemm"),
        _compute("gemm", 10, layers),
        _compute("head", 10, layers),
    ]
    assert expected_us == _time(nodes, layers).total_us[0]


def test_a_collective_that_takes_no_time_is_not_waited_for() -> None:
    """Of cases timed together one has no gather, so nothing queues behind its scatter."""
    layers = range(1)
    nodes = (
        _communicate("scatter", 16, layers, Overlap.DEFERRED),
        _communicate("gather", 8, layers, Overlap.CONCURRENT, "gemm"),
        _compute("gemm", 10, layers),
        _compute("head", 10, layers),
    )
    gather_us = np.array([0, 0.5, 8])
    rules = StreamRules(gap_us=np.zeros(3))

    def duration(node: OperatorNode) -> np.ndarray:
        is_gather = node.role == "gather"
        return gather_us if is_gather else np.full(3, float(node.dims["time_us"]))

    time = time_pass(PassNodes(nodes=nodes, layers=layers), duration, rules)
    assert [20, 16.5 + 10, 16 + 8 + 10] == time.total_us.tolist()
    assert [0, 16.5 - 10, 16 + 8 - 10] == time.exposed_us["collective", "tp"].tolist()


def test_layers_of_two_kinds_are_each_run_with_their_own() -> None:
    nodes = [
        _compute("attention", 1, range(6)),
        _compute("mlp", 10, range(2)),
        _compute("experts", 100, range(2, 6, 2)),
    ]
    assert 6 + 20 + 200 == _time(nodes, range(6)).total_us[0]


_times = st.floats(0.5, 50)


@st.composite
def _layer_nodes(draw: st.DrawFn, num_layers: int) -> list[OperatorNode]:
    layers = range(num_layers)
    nodes = []
    for index in range(draw(st.integers(1, 5))):
        nodes.append(_compute(f"gemm{index}", draw(_times), layers))
        overlap = draw(st.sampled_from(list(Overlap)))
        beside = f"gemm{draw(st.integers(0, index))}"
        node = _communicate(f"c{index}", draw(_times), layers, overlap, beside)
        nodes.append(dataclasses.replace(node, axis=draw(st.sampled_from(("tp", "dp")))))
    return nodes


_cases = st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), _layer_nodes(n)))


def _one_by_one(nodes: Sequence[OperatorNode]) -> list[OperatorNode]:
    """Return the same layers distinguished, so that no two of them are alike."""
    return [
        dataclasses.replace(node, first_layer=layer, repeat=1)
        for layer in range(nodes[0].repeat)
        for node in nodes
    ]


@settings(max_examples=40)
@given(_cases, st.floats(0, 5), st.floats(1, 2))
def test_counting_alike_layers_is_running_them(
    case: tuple[int, list[OperatorNode]], gap_us: float, slowdown_ratio: float
) -> None:
    num_layers, nodes = case
    counted = _time(nodes, range(num_layers), gap_us, slowdown_ratio)
    run = _time(_one_by_one(nodes), range(num_layers), gap_us, slowdown_ratio)
    for name in ("total_us", "compute_us", "slowdown_us", "hidden_us", "left_us"):
        assert pytest.approx(getattr(run, name)[0], abs=1e-6) == getattr(counted, name)[0]


@settings(max_examples=40)
@given(_cases, st.floats(0, 5), st.floats(1, 2))
def test_a_pass_is_computation_slowdown_and_what_it_waits_for(
    case: tuple[int, list[OperatorNode]], gap_us: float, slowdown_ratio: float
) -> None:
    num_layers, nodes = case
    time = _time(nodes, range(num_layers), gap_us, slowdown_ratio)
    exposed_us = sum(column[0] for column in time.exposed_us.values())
    parts_us = time.compute_us[0] + time.slowdown_us[0] + exposed_us
    assert pytest.approx(time.total_us[0]) == parts_us
    all_us = sum(node.dims["time_us"] for node in nodes if node.operator == "all_reduce")
    assert pytest.approx(num_layers * all_us) == time.communication_us[0]


@settings(max_examples=40)
@given(_cases)
def test_hiding_communication_never_costs_time(case: tuple[int, list[OperatorNode]]) -> None:
    """Without a slowdown."""
    num_layers, nodes = case
    exposed = [dataclasses.replace(node, overlap=Overlap.EXPOSED) for node in nodes]
    shown = _time(exposed, range(num_layers))
    assert _time(nodes, range(num_layers)).total_us[0] <= shown.total_us[0] + 1e-6


@settings(max_examples=40)
@given(
    _layer_nodes(1),
    st.lists(st.tuples(st.integers(1, 20), st.floats(0.1, 3.0)), min_size=1, max_size=4),
    st.floats(0, 5),
    st.floats(1, 2),
)
def test_columns_with_other_numbers_of_layers_are_timed_together(
    nodes: list[OperatorNode],
    columns: list[tuple[int, float]],
    gap_us: float,
    slowdown_ratio: float,
) -> None:
    """As each alone: communication takes another time in each column, so streams fall behind."""
    scales = np.array([[scale for _, scale in columns]])
    rules = StreamRules(gap_us=np.full_like(scales, gap_us), slowdown_ratio=slowdown_ratio)

    def duration(node: OperatorNode) -> np.ndarray:
        return node.dims["time_us"] * (scales if node.operator == "all_reduce" else np.ones((1, 1)))

    program = cut_program(tuple(nodes), duration, rules)
    parts = [PassParts(head=(), runs=((program, count),), tail=()) for count, _ in columns]
    ((_, together),) = time_passes(parts, slowdown_ratio)
    for index, (count, scale) in enumerate(columns):
        alone = _time(
            [
                dataclasses.replace(
                    node,
                    repeat=count,
                    dims={**node.dims, "time_us": node.dims["time_us"] * scale}
                    if node.operator == "all_reduce"
                    else node.dims,
                )
                for node in nodes
            ],
            range(count),
            gap_us,
            slowdown_ratio,
        )
        for name in ("total_us", "all_exposed_us", "hidden_us", "left_us", "compute_us"):
            expected = getattr(alone, name)[0]
            assert pytest.approx(expected, abs=1e-6) == getattr(together, name)[index, index]
