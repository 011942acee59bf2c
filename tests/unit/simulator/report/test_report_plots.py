"""Numbers as people read them, and colours that tell loads apart."""

import pytest

from foretoken.domain.metrics.number_text import format_number
from foretoken.simulator.report.palette import colors_of_loads


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, "0"), (0.01234, "0.0123"), (9.99, "9.99"), (99.96, "100"), (1234567.8, "1,234,568")],
)
def test_numbers_have_three_digits_that_matter(value: float, expected: str) -> None:
    assert expected == format_number(value)


def test_loads_have_distinct_colours_up_to_eight() -> None:
    for num_loads in range(1, 9):
        assert num_loads == len(set(colors_of_loads(num_loads)))
