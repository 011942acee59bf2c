"""Columns of calls, and the small value classes that check themselves."""

from typing import Any

import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import (
    DType,
    OperatorCall,
    OperatorTable,
    Phase,
    table_of_calls,
)
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.workload import WorkloadSpec


def test_calls_of_one_operator_make_one_table() -> None:
    calls = [
        OperatorCall(operator="gemm", dtype=DType.FP16, dims={"m": m, "n": 8, "k": 4})
        for m in (1, 2)
    ]
    expected = OperatorTable(
        operator="gemm",
        dtype=DType.FP16,
        phase=Phase.FORWARD,
        columns={"m": [1, 2], "n": [8, 8], "k": [4, 4]},
    )
    assert expected == table_of_calls(calls)
    assert 2 == expected.num_rows


def test_a_table_without_columns_has_no_rows() -> None:
    assert 0 == OperatorTable(operator="gemm", dtype=DType.FP16, columns={}).num_rows


def test_a_layout_occupies_the_product_of_its_axes_without_experts() -> None:
    layout = ParallelLayout(tp=2, pp=3, dp=4, cp=5, ep=4)
    assert 120 == layout.num_devices
    assert (2, 4) == (layout.degree("tp"), layout.degree("ep"))


def test_a_layout_refuses_a_degree_below_one() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ParallelLayout(tp=0, dp=-1)
    assert ["tp", "dp"] == [v.field for v in caught.value.violations]


@pytest.mark.parametrize(
    "wrong",
    [{"rate_rps": 0.0}, {"num_requests": 0}, {"time_scale": -1.0}, {"max_tokens_per_request": -1}],
)
def test_a_workload_refuses_what_means_nothing(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        WorkloadSpec(**wrong)
    assert list(wrong) == [v.field for v in caught.value.violations]
