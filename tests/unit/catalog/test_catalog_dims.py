"""Dimensions are checked row by row and stored in their operator's order."""

import pyarrow as pa
import pytest
from catalog_rows import gemms, row, table

from foretoken.catalog.dims import (
    DIM_COLUMNS,
    columns_to_dims,
    dims_to_places,
    places_to_dims,
    split_by_operator,
)
from foretoken.domain.errors import InvalidRequestError, UnknownOperatorError


def test_rows_are_split_by_operator_with_their_dims_as_columns() -> None:
    norm = row(operator="rms_norm", dims={"num_tokens": 5, "hidden": 6})
    _, groups = split_by_operator(table(row(1), norm, row(2)))
    found = {
        group.spec.name: (
            group.indices.tolist(),
            {name: column.tolist() for name, column in group.columns.items()},
        )
        for group in groups
    }
    expected = {
        "gemm": ([0, 2], {"m": [1, 2], "n": [4096, 4096], "k": [4096, 4096]}),
        "rms_norm": ([1], {"num_tokens": [5], "hidden": [6]}),
    }
    assert expected == found


def test_dims_come_out_in_canonical_order() -> None:
    mixed = table(row(dims={"k": 3, "m": 1, "n": 2}), row(dims={"m": 4, "n": 5, "k": 6}))
    stored, _ = split_by_operator(mixed)
    expected = [[("m", 1), ("n", 2), ("k", 3)], [("m", 4), ("n", 5), ("k", 6)]]
    assert expected == stored.column("dims").to_pylist()


def test_a_slice_of_a_table_is_read_at_its_own_place() -> None:
    stored, groups = split_by_operator(gemms([1, 2, 3, 4]).slice(2))
    assert [3, 4] == groups[0].columns["m"].tolist()
    assert [3, 4] == [dict(dims)["m"] for dims in stored.column("dims").to_pylist()]


def test_a_table_in_several_chunks_is_one() -> None:
    chunked = pa.concat_tables([gemms([1]), gemms([2, 3])])
    _, groups = split_by_operator(chunked)
    assert [1, 2, 3] == groups[0].columns["m"].tolist()


def test_no_rows_are_no_groups() -> None:
    stored, groups = split_by_operator(gemms([]))
    assert (0, ()) == (stored.num_rows, groups)


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({"m": 1, "n": 2}, "row 1: gemm: k: missing"),
        ({"m": 1, "n": 2, "k": 3, "z": 4}, "row 1: gemm: z: gemm has no such dimension"),
        ({"m": 1, "n": 2, "z": 3}, "row 1: .*z: gemm has no such"),
        ({"m": 0, "n": 2, "k": 3}, "row 1: gemm: m: must be at least 1"),
        ({}, "row 1: gemm: m: missing"),
    ],
    ids=["too few", "too many", "another", "too small", "none"],
)
def test_wrong_dims_name_their_row(dims: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        split_by_operator(table(row(), row(dims=dims)))


def test_a_dimension_named_twice_names_its_row() -> None:
    twice = table(row(), row(dims=[("m", 1), ("m", 2), ("k", 3)]))
    with pytest.raises(InvalidRequestError, match="row 1: a dimension is named twice"):
        split_by_operator(twice)


def test_a_dimension_without_value_names_its_row() -> None:
    empty = table(row(), row(dims=[("m", 1), ("n", None), ("k", 3)]))
    with pytest.raises(InvalidRequestError, match="row 1: a dimension has no value"):
        split_by_operator(empty)


def test_an_unknown_operator_is_said() -> None:
    with pytest.raises(UnknownOperatorError, match="gem"):
        split_by_operator(table(row(operator="gem")))


def test_columns_become_dims_of_every_row() -> None:
    dims = columns_to_dims({"m": [1, 2], "n": 7}, 2)
    assert [[("m", 1), ("n", 7)], [("m", 2), ("n", 7)]] == dims.to_pylist()


def test_dims_lie_by_place_and_are_null_beyond_the_operators_last() -> None:
    norm = row(operator="rms_norm", dims={"num_tokens": 5, "hidden": 6})
    _, groups = split_by_operator(table(row(1), norm))
    columns = {name: column.to_pylist() for name, column in dims_to_places(groups, 2).items()}
    filled = {"d0": [1, 5], "d1": [4096, 6], "d2": [4096, None]}
    assert {name: filled.get(name, [None, None]) for name in DIM_COLUMNS} == columns


def test_dims_come_back_from_their_places() -> None:
    norm = row(operator="rms_norm", dims={"num_tokens": 5, "hidden": 6})
    stored, groups = split_by_operator(table(row(1), norm, row(2)))
    places = dims_to_places(groups, 3)
    operators = stored.column("operator").combine_chunks()
    assert stored.column("dims").to_pylist() == places_to_dims(operators, places).to_pylist()
