"""Chart primitives: numbers as people read them, text that reads on its colour."""

import dataclasses

import pytest

from foretoken.domain.metrics.number_text import format_number
from foretoken.simulator.report.palette import colors_of_loads, text_color_on
from foretoken.simulator.report.plots import Panel, Series, draw_panels, draw_ranked


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, "0"), (0.01234, "0.0123"), (9.99, "9.99"), (99.96, "100"), (1234567.8, "1,234,568")],
)
def test_numbers_have_three_digits_that_matter(value: float, expected: str) -> None:
    assert expected == format_number(value)


def test_text_is_dark_on_light_and_light_on_dark() -> None:
    assert "#ffffff" == text_color_on("#0072b2")
    assert "#16191d" == text_color_on("#e69f00")


def test_loads_have_distinct_colours_up_to_eight() -> None:
    for num_loads in range(1, 9):
        assert num_loads == len(set(colors_of_loads(num_loads)))


def test_ranked_bars_say_value_unit_and_share() -> None:
    svg = draw_ranked("x", "title", "ms", {"a": 30.0, "b": 10.0}, {"a": "#0072b2"})
    assert "30 ms   75.0%" in svg
    assert svg.index(">a<") < svg.index(">b<")


def test_only_panels_that_allow_it_become_logarithmic() -> None:
    """A goodput that falls to nothing must stay visible on an axis from zero."""
    panel = Panel(
        title="t",
        x_label="x",
        y_label="y",
        x=(1.0, 2.0, 3.0),
        series=[Series(label="s", values=(1000.0, 1.0, 0.0))],
    )
    assert ">0<" in draw_panels("x", [panel]).split("matplotlib.axis_2")[1]
    logarithmic = dataclasses.replace(panel, may_be_log=True)
    assert ">0<" not in draw_panels("x", [logarithmic]).split("matplotlib.axis_2")[1]
