"""What holds for every operator, whatever its dimensions."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.hardware.device import all_devices
from foretoken.domain.hardware.roofline import RooflineTerms, collective_terms, compute_terms
from foretoken.domain.hardware.topology import all_topologies
from foretoken.domain.measurements.estimate import DType, Phase
from foretoken.domain.operators.spec.operator import OperatorSpec, all_operators, find_operator

_OPERATORS = sorted(all_operators())
_COLLECTIVES = [name for name in _OPERATORS if find_operator(name).is_collective]
_COMPUTE = [name for name in _OPERATORS if name not in _COLLECTIVES]
_SIZE_MAX = 1 << 16
# Of the tokens that share a key more make fewer keys.
_DIVIDES_WORK = "index_pool"
_ELEMENT_BYTES = st.sampled_from([0.5, 1.0, 2.0, 4.0])
_DTYPES = st.sampled_from(list(DType))
_DEVICES = st.sampled_from(list(all_devices().values()))
_TOPOLOGIES = st.sampled_from(list(all_topologies().values()))


@st.composite
def _calls(draw: st.DrawFn, spec: OperatorSpec) -> dict[str, int]:
    return {
        dim.name: draw(st.integers(min_value=dim.minimum, max_value=_SIZE_MAX), label=dim.name)
        for dim in spec.dims
    }


@st.composite
def _calls_and_larger(draw: st.DrawFn, spec: OperatorSpec) -> tuple[dict[str, int], dict[str, int]]:
    """Draw a call, and the same with one dimension grown."""
    dims = draw(_calls(spec))
    names = [name for name in spec.dim_names if name != _DIVIDES_WORK]
    grown = draw(st.sampled_from(names), label="grown")
    return dims, {**dims, grown: dims[grown] + draw(st.integers(1, _SIZE_MAX), label="by")}


def _largest(terms: RooflineTerms) -> float:
    return float(max(terms.compute_us, terms.memory_us))


@pytest.mark.parametrize("name", _OPERATORS)
@given(data=st.data(), element_bytes=_ELEMENT_BYTES)
def test_work_never_falls_when_a_dimension_grows(
    name: str, data: st.DataObject, element_bytes: float
) -> None:
    spec = find_operator(name)
    small, large = data.draw(_calls_and_larger(spec))
    formulas: list[Callable[[dict[str, int]], Any]] = [
        lambda d: spec.flops(d, element_bytes),
        lambda d: spec.moved_bytes(d, element_bytes),
        spec.num_weights,
        spec.saved_elements,
    ]
    for formula in formulas:
        # Collectives divide by the number of ranks, so the last bit may differ.
        assert formula(large) >= formula(small) * (1 - 1e-12)


@pytest.mark.parametrize("name", _COMPUTE)
@given(data=st.data(), device=_DEVICES, dtype=_DTYPES)
def test_a_roofline_is_positive_and_never_falls_when_a_dimension_grows(
    name: str, data: st.DataObject, device: Any, dtype: DType
) -> None:
    spec = find_operator(name)
    small, large = data.draw(_calls_and_larger(spec))
    before = _largest(compute_terms(spec, small, dtype, Phase.FORWARD, device))
    after = _largest(compute_terms(spec, large, dtype, Phase.FORWARD, device))
    assert 0 < before <= after


@pytest.mark.parametrize("name", _COMPUTE)
@given(data=st.data(), dtype=_DTYPES)
def test_a_pass_without_backward_work_costs_nothing_and_others_in_proportion(
    name: str, data: st.DataObject, dtype: DType
) -> None:
    spec, device = find_operator(name), all_devices()["a30"]
    dims = data.draw(_calls(spec))
    forward = _largest(compute_terms(spec, dims, dtype, Phase.FORWARD, device))
    backward = _largest(compute_terms(spec, dims, dtype, Phase.BACKWARD, device))
    assert pytest.approx(forward * spec.backward_work_ratio) == backward


@pytest.mark.parametrize("name", _COLLECTIVES)
@given(
    topology=_TOPOLOGIES,
    message_bytes=st.integers(1, 1 << 40),
    per_node=st.integers(1, 64),
    num_nodes=st.integers(1, 64),
)
def test_a_collective_over_several_ranks_takes_time_and_more_for_more_bytes(
    name: str, topology: Any, message_bytes: int, per_node: int, num_nodes: int
) -> None:
    if per_node * num_nodes == 1:
        return
    dims = {
        "message_bytes": message_bytes,
        "devices_per_node": per_node,
        "num_nodes": num_nodes,
    }
    spec = find_operator(name)
    once = collective_terms(spec, dims, num_nodes, topology)
    twice = collective_terms(
        spec, {**dims, "message_bytes": 2 * message_bytes}, num_nodes, topology
    )
    assert 0 < once.memory_us < twice.memory_us
    assert 0 == once.compute_us
    assert 0 < once.floor_us


@pytest.mark.parametrize("name", _COLLECTIVES)
@given(topology=_TOPOLOGIES, per_node=st.integers(1, 16), num_nodes=st.integers(2, 16))
def test_as_many_ranks_on_one_node_are_never_slower(
    name: str, topology: Any, per_node: int, num_nodes: int
) -> None:
    spec, ranks = find_operator(name), per_node * num_nodes
    inside = {"message_bytes": 1 << 20, "devices_per_node": ranks, "num_nodes": 1}
    across = {"message_bytes": 1 << 20, "devices_per_node": per_node, "num_nodes": num_nodes}
    best = collective_terms(spec, inside, 1, topology)
    spread = collective_terms(spec, across, num_nodes, topology)
    assert best.memory_us <= spread.memory_us * (1 + 1e-12)
    assert best.floor_us <= spread.floor_us
