"""Calls that come again in a table are estimated once, and answered where they stand."""

from collections.abc import Callable

import numpy as np
import pytest
from predictor_fakes import Rows, all_reduce_rows, gemm_rows

from foretoken.domain.measurements.estimate import DType, LatencyQuery, OperatorTable
from foretoken.domain.results.report import PredictorTrainingReport
from foretoken.predictor.repeated_calls import find_repeated
from foretoken.predictor.service import PredictorService

_NUM_CALLS = 400


def _draw(num_values: int, num_columns: int = 3) -> dict[str, np.ndarray]:
    source = np.random.default_rng(0)
    return {
        f"column {place}": source.integers(1, num_values + 1, _NUM_CALLS)
        for place in range(num_columns)
    }


def test_calls_that_differ_are_found_with_the_place_of_each() -> None:
    columns = _draw(3)
    found = find_repeated(columns)
    assert found is not None
    rows = {tuple(row) for row in np.stack(list(columns.values()), axis=1).tolist()}
    differing = np.stack(list(found.columns.values()), axis=1).tolist()
    assert sorted(rows) == sorted(tuple(row) for row in differing)
    assert {name: column.tolist() for name, column in columns.items()} == {
        name: column[found.rows].tolist() for name, column in found.columns.items()
    }


def test_a_table_in_which_few_calls_come_again_stays_as_it_is() -> None:
    assert find_repeated(_draw(10**9)) is None


def test_columns_that_swap_their_values_are_other_calls() -> None:
    one, two = np.repeat([1, 2], _NUM_CALLS // 2), np.repeat([2, 1], _NUM_CALLS // 2)
    found = find_repeated({"m": one, "n": two})
    assert found is not None
    assert 2 == len(found.columns["m"])


@pytest.mark.parametrize(
    ("operator", "place", "rows", "values"),
    [
        (
            "gemm",
            ("a30", ""),
            gemm_rows(),
            {"m": (1, 600, 65536), "n": (4096,), "k": (4096, 2048)},
        ),
        (
            "all_reduce",
            ("a100_sxm_80", "a100_dgx"),
            all_reduce_rows(),
            {"message_bytes": (1 << 10, 3 << 20), "devices_per_node": (2, 4), "num_nodes": (1, 2)},
        ),
    ],
)
def test_estimates_are_those_of_the_calls_alone(
    operator: str,
    place: tuple[str, str],
    rows: Rows,
    values: dict[str, tuple[int, ...]],
    make_predictor: Callable[[Rows], PredictorService],
    train: Callable[..., PredictorTrainingReport],
) -> None:
    service = make_predictor(rows)
    train(service)
    source = np.random.default_rng(1)
    columns = {name: source.choice(given, _NUM_CALLS) for name, given in values.items()}

    def ask(wanted: dict[str, np.ndarray]) -> list[tuple[object, ...]]:
        table = OperatorTable(operator=operator, dtype=DType.FP16, columns=wanted)
        query = LatencyQuery(device=place[0], topology=place[1], tables=(table,))
        found = service.predict(query).tables[0]
        shown = (found.latency_us, found.low_us, found.high_us, found.provenance)
        nearest = (*found.nearest.values(), found.nearest_us, found.nearest_octaves)
        return list(
            zip(*(np.asarray(column).tolist() for column in (*shown, *nearest)), strict=True)
        )

    whole = ask(columns)
    assert _NUM_CALLS == len(whole)
    for row in range(0, _NUM_CALLS, 23):
        alone = {name: column[row : row + 1] for name, column in columns.items()}
        assert ask(alone)[0] == pytest.approx(whole[row], rel=1e-12)
