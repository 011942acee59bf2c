"""Words of `foretoken profile collectives` become calls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.app.cli.collective_calls import (
    CollectiveChoice,
    bandwidth_calls,
    format_size,
    gemm_of_text,
    overlap_calls,
    parse_sizes,
)
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.operators.spec.overlap import find_companion, group_of_call, plain_call


def choice_of(ranks: tuple[int, ...], nodes: tuple[int, ...], *operators: str) -> CollectiveChoice:
    return CollectiveChoice(
        operators=operators, dtype=DType.FP32, ranks=ranks, nodes=nodes, sizes=(1024, 2048)
    )


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("512", (512,)),
        ("1KiB:8KiB", (1024, 2048, 4096, 8192)),
        ("1MiB,64KiB", (65536, 2**20)),
        ("1KiB:3KiB,1GiB", (1024, 2048, 2**30)),
    ],
)
def test_sizes_are_said_one_by_one_or_doubling(text: str, sizes: tuple[int, ...]) -> None:
    assert sizes == parse_sizes(text)


@pytest.mark.parametrize("text", ["", "0", "1kb", "8KiB:1KiB", "1:2:3", "-1", "KiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="sizes"):
        parse_sizes(text)


@given(size=st.integers(1, 2**45))
def test_a_size_is_read_as_it_is_written(size: int) -> None:
    assert (size,) == parse_sizes(format_size(size).replace(" ", ""))


def test_groups_are_all_of_two_ranks_and_more() -> None:
    choice = choice_of((1, 2, 4), (1, 2), "all_reduce")
    assert [(1, 2), (2, 1), (2, 2), (4, 1), (4, 2)] == sorted(choice.groups())
    with pytest.raises(InvalidRequestError, match="at least two ranks"):
        bandwidth_calls(choice_of((1,), (1,), "all_reduce"))


def test_only_transfers_of_more_than_a_pair_go_in_a_ring() -> None:
    calls = bandwidth_calls(choice_of((2, 4), (1,), "send_recv", "broadcast"))
    assert {("send_recv", 4)} == {
        (call.operator, call.dims["devices_per_node"]) for call in calls if call.variant
    }
    for call in calls:
        find_operator(call.operator).check_dims(call.dims)


def test_every_product_beside_a_collective_has_all_it_is_compared_with() -> None:
    calls = overlap_calls(choice_of((2,), (1, 2), "all_reduce", "broadcast"), gemm_of_text("1x2x3"))
    assert len(calls) == len(set(map(str, calls))) == 2 * (1 + 3 * 4)
    for call in calls:
        companion = find_companion(call)
        if companion is not None and call.operator == "gemm":
            assert {"m": 1, "n": 2, "k": 3} == plain_call(call).dims
            assert companion in calls
            assert group_of_call(companion) == group_of_call(call)


@pytest.mark.parametrize("text", ["", "512", "1x2", "1x2x3x4", "axbxc", "-1x2x3"])
def test_what_is_no_product_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="MxNxK"):
        gemm_of_text(text)
