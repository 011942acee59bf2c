"""What runs concurrent with a call is in its variant, and can be had back from it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType, OperatorCall
from foretoken.domain.operators.spec.collective import bandwidth_of, variant_of_group
from foretoken.domain.operators.spec.overlap import (
    call_alone,
    call_during,
    find_companion,
    group_of_call,
    is_timed_during,
    plain_call,
)

SIZES = st.integers(1, 2**40)
COLLECTIVES = st.sampled_from(["all_reduce", "all_gather", "broadcast", "send_recv"])
VARIANTS = st.sampled_from(["", "layout=nn", "graph=true"])


@st.composite
def products(draw: st.DrawFn) -> OperatorCall:
    dims = {"m": draw(SIZES), "n": draw(SIZES), "k": draw(SIZES)}
    return OperatorCall(operator="gemm", dtype=DType.BF16, dims=dims, variant=draw(VARIANTS))


@st.composite
def exchanges(draw: st.DrawFn) -> OperatorCall:
    dims = {"message_bytes": draw(SIZES), "devices_per_node": draw(SIZES), "num_nodes": draw(SIZES)}
    operator = draw(COLLECTIVES)
    variant = variant_of_group(operator, dims["devices_per_node"] * dims["num_nodes"])
    return OperatorCall(operator=operator, dtype=DType.BF16, dims=dims, variant=variant)


@given(product=products(), exchange=exchanges())
def test_both_calls_come_back_from_a_variant(product: OperatorCall, exchange: OperatorCall) -> None:
    beside = call_during(product, exchange)
    assert (product, exchange) == (plain_call(beside), find_companion(beside))
    assert (exchange.dims["devices_per_node"], exchange.dims["num_nodes"]) == group_of_call(beside)
    reverse = call_during(exchange, product)
    assert group_of_call(beside) == group_of_call(reverse)


@given(product=products(), devices=SIZES, nodes=SIZES)
def test_a_call_alone_keeps_its_group(product: OperatorCall, devices: int, nodes: int) -> None:
    alone = call_alone(product, devices, nodes)
    assert is_timed_during(alone)
    assert not is_timed_during(product)
    assert find_companion(alone) is None
    assert (devices, nodes) == group_of_call(alone)
    assert product == plain_call(alone)


@pytest.mark.parametrize("dims", ["", "2", "2x", "2x1x1", "-2x1"])
def test_a_variant_without_its_sizes_is_refused(dims: str) -> None:
    variant = f"beside=nothing;beside_dims={dims}" if dims else "beside=nothing"
    call = OperatorCall(operator="gemm", dtype=DType.BF16, dims={}, variant=variant)
    with pytest.raises(InvalidRequestError, match="sizes joined by x"):
        group_of_call(call)


@given(first=exchanges(), second=exchanges())
def test_two_collectives_are_not_timed_beside_each_other(
    first: OperatorCall, second: OperatorCall
) -> None:
    with pytest.raises(InvalidRequestError, match="both calls communicate"):
        group_of_call(call_during(first, second))


def test_two_computations_have_no_group() -> None:
    dims = {"m": 1, "n": 1, "k": 1}
    product = OperatorCall(operator="gemm", dtype=DType.BF16, dims=dims)
    with pytest.raises(InvalidRequestError, match="neither call communicates"):
        group_of_call(call_during(product, product))


@pytest.mark.parametrize(
    ("operator", "bus_gb"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("broadcast", 1.0),
        ("send_recv", 1.0),
    ],
)
def test_bus_bandwidth_has_the_factors_of_nccl_tests(operator: str, bus_gb: float) -> None:
    """1 GB in 1 s between four ranks."""
    dims = {"message_bytes": 10**9, "devices_per_node": 2, "num_nodes": 2}
    found = bandwidth_of(operator, dims, 1e6)
    assert (1e9, bus_gb * 1e9) == (found.algorithm_bytes_per_s, found.bus_bytes_per_s)
