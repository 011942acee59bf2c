"""How errors of operators add up to that of a step: families, their parts, and bounds."""

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    OperatorTable,
    Provenance,
)
from foretoken.simulator.grid import Floats
from foretoken.simulator.steps.call_prices import PricedTable, price_host
from foretoken.simulator.steps.error_parts import (
    ERROR_FAMILIES,
    NUM_CASES,
    NUM_PARTS,
    bound_cases,
    families_of,
    price_cases,
)

_PRODUCTS = ERROR_FAMILIES.index("matrix products")
_IN_NODE = ERROR_FAMILIES.index("collectives in a node")


@pytest.mark.parametrize(
    ("operator", "columns", "family"),
    [
        ("gemm", {"m": [1], "n": [1], "k": [1]}, "matrix products"),
        ("rms_norm", {"num_tokens": [1], "hidden_size": [1]}, "norms"),
        ("silu_mul", {"num_tokens": [1]}, "activations"),
        ("quantize", {"num_tokens": [1]}, "conversions to 8 bit"),
        ("moe_permute", {"num_tokens": [1]}, "rows of experts"),
        ("adam", {"num_elements": [1]}, "the optimizer"),
        ("rope", {"num_tokens": [1]}, "other memory-bound operators"),
        ("attention_prefill", {"batch_size": [1]}, "attention"),
        ("grouped_gemm", {"m": [1]}, "matrix products"),
        ("all_reduce", {"num_nodes": [1]}, "collectives in a node"),
        ("all_reduce", {"num_nodes": [2]}, "collectives between nodes"),
        ("send_recv", {"num_nodes": [2]}, "point to point"),
    ],
)
def test_operators_belong_to_families(
    operator: str, columns: Mapping[str, list[int]], family: str
) -> None:
    table = OperatorTable(operator=operator, dtype=DType.BF16, columns=columns)
    assert [family] == [ERROR_FAMILIES[place] for place in families_of(table)]


def test_one_table_has_collectives_of_both_families() -> None:
    table = OperatorTable(
        operator="all_gather", dtype=DType.BF16, columns={"num_nodes": np.array([1, 4])}
    )
    assert [_IN_NODE, _IN_NODE + 1] == families_of(table).tolist()


def _price(operator: str, columns: Mapping[str, list[int]], provenance: Provenance) -> Floats:
    """Return the cases of a call of 10 µs that takes 6 to 20: (case, call)."""
    table = OperatorTable(
        operator=operator,
        dtype=DType.BF16,
        columns={name: np.array(values) for name, values in columns.items()},
    )
    times_us = (np.full(table.num_rows, time_us) for time_us in (10.0, 6.0, 20.0))
    rests_on = np.full(table.num_rows, provenance.value)
    latency_us, low_us, high_us = times_us
    answer = LatencyColumns(
        latency_us=latency_us, low_us=low_us, high_us=high_us, provenance=rests_on
    )
    return np.stack(price_cases(PricedTable(table=table, answer=answer, device="", topology="")))


def test_a_call_is_at_its_bounds_where_its_part_is() -> None:
    columns = {"m": [1], "n": [1], "k": [1]}
    for provenance, part in (
        (Provenance.MEASURED, _PRODUCTS),
        (Provenance.ANALYTICAL, _PRODUCTS + len(ERROR_FAMILIES)),
    ):
        cases_us = _price("gemm", columns, provenance)[:, 0]
        assert 10.0 == cases_us[0]
        assert {1 + part: 6.0, 1 + NUM_PARTS + part: 20.0} == {
            case: cases_us[case] for case in range(NUM_CASES) if cases_us[case] != 10.0
        }


def test_the_host_is_a_part_of_its_own() -> None:
    cases_us = np.concatenate(price_cases(price_host()))
    part = ERROR_FAMILIES.index("the host")
    assert {1 + part: 34 / 50, 1 + NUM_PARTS + part: 50 / 34} == pytest.approx(
        {case: cases_us[case] for case in range(NUM_CASES) if cases_us[case] != 1.0}
    )
    assert 1.0 == cases_us[0]


def test_errors_are_summed_in_a_part_and_as_squares_between_parts() -> None:
    """Of 4 µs down and 10 up each: twice that together, the root of two times it apart."""
    columns = {"m": [1, 2], "n": [1, 1], "k": [1, 1]}
    together_us = _price("gemm", columns, Provenance.MEASURED).sum(axis=1)
    assert (20.0 - 2 * 4.0, 20.0 + 2 * 10.0) == bound_cases(together_us)
    one = {name: values[:1] for name, values in columns.items()}
    apart_us = sum(_price("gemm", one, item)[:, 0] for item in (Provenance.MEASURED, _ELSEWHERE))
    assert (20.0 - 4 * 2**0.5, 20.0 + 10 * 2**0.5) == pytest.approx(bound_cases(apart_us))


_ELSEWHERE = Provenance.TRANSFERRED
_SHARES = arrays.arrays(np.float64, NUM_PARTS, elements=st.floats(0, 1))


@given(latency_us=arrays.arrays(np.float64, NUM_PARTS, elements=st.floats(1, 1e6)), down=_SHARES)
def test_bounds_lie_between_those_of_one_part_and_of_all_at_once(
    latency_us: Floats, down: Floats
) -> None:
    """Of a sum of times, each of another part, that may be `down` shorter or twice that longer."""
    total_us, error_us = latency_us.sum(), latency_us * down
    low_us, high_us = bound_cases(
        np.concatenate(([total_us], total_us - error_us, total_us + 2 * error_us))
    )
    slack_us = 1e-9 * total_us
    assert error_us.max() - slack_us <= total_us - low_us <= error_us.sum() + slack_us
    assert 2 * error_us.max() - slack_us <= high_us - total_us <= 2 * error_us.sum() + slack_us
