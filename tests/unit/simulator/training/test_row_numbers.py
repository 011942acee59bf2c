"""Numbers of rows that are alike."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foretoken.simulator.steps.row_numbers import number_rows

_tables = st.integers(1, 4).flatmap(
    lambda width: st.lists(
        st.lists(
            st.one_of(st.integers(0, 3), st.integers(0, 10**9)), min_size=width, max_size=width
        ),
        min_size=1,
        max_size=40,
    )
)


@given(_tables)
def test_rows_have_the_number_of_their_combination_in_order(rows: list[list[int]]) -> None:
    """As sorting the combinations says, whether numbers are looked up or sorted."""
    combinations = sorted({tuple(row) for row in rows})
    first, number = number_rows(list(np.array(rows, dtype=np.int64).T))
    assert [combinations.index(tuple(row)) for row in rows] == number.tolist()
    assert [rows.index(list(each)) for each in combinations] == first.tolist()


def test_flags_are_numbered_as_integers() -> None:
    """A column of flags far from others is not taken for a mask."""
    first, number = number_rows(
        [np.array([10**9, 0, 10**9, 0]), np.array([True, False, False, False])]
    )
    assert ([1, 2, 0], [2, 0, 1, 0]) == (first.tolist(), number.tolist())


def test_no_rows_have_no_numbers() -> None:
    first, number = number_rows([np.zeros(0, dtype=np.int64)])
    assert (0, 0) == (len(first), len(number))
