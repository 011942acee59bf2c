"""What answers say of how far others like them were off."""

from pathlib import Path

import pytest

from foretoken.domain.measurements.estimate import DType
from foretoken.domain.results.accuracy import (
    ExpectedError,
    describe_accuracy,
    format_name,
    grounds_of,
    render_page,
)

_PAGE = Path(__file__).parents[3] / "docs" / "reference" / "accuracy.md"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ExpectedError(name="TPOT", mean_ratio=0.125, median_ratio=0.1), "TPOT 12 % (median 10 %)"),
        (ExpectedError(name="latency", mean_ratio=0.052, most_ratio=0.386), "latency 5.2 to 39 %"),
        (
            ExpectedError(name="step", mean_ratio=0.1, median_ratio=0.09, signed_ratio=-0.08),
            "step 10 % (median 9 %, 8 % too short or little on average)",
        ),
        (
            ExpectedError(name="peak", mean_ratio=0.2, signed_ratio=0.2),
            "peak 20 % (20 % too long or much on average)",
        ),
    ],
)
def test_an_error_is_told_with_its_spread(error: ExpectedError, expected: str) -> None:
    assert expected == error.describe()


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ({"measured": 0.2, "interpolated": 0.2, "extrapolated": 0.2, "analytical": 0.4}, "device"),
        ({"measured": 0.4, "transferred": 0.6}, "others"),
        ({}, "others"),
    ],
)
def test_an_answer_is_of_what_most_of_its_time_rests_on(
    shares: dict[str, float], expected: str
) -> None:
    assert expected == grounds_of(shares)


def test_the_line_with_most_that_holds_applies() -> None:
    experts = {"architecture": "hopper", "experts": "yes", "format": "16 bit"}
    dense = {**experts, "experts": "no"}
    told = [describe_accuracy("training", facts) for facts in (experts, dense)]
    assert "experts" in told[0]
    assert "experts" not in told[1]
    assert describe_accuracy("training", {"experts": "no"}) == ""


@pytest.mark.parametrize(
    ("table", "facts", "expected"),
    [
        ("operators", {"group": "gemm", "provenance": "interpolated"}, "latency 5 %: a matrix"),
        ("operators", {"group": "gemm", "provenance": "transferred"}, "latency 5.2 to 41 %: a"),
        ("operators", {"group": "gemm", "provenance": "analytical"}, ""),
        ("operators", {"group": "elementwise", "provenance": "interpolated"}, ""),
        ("serving", {"grounds": "device"}, "TPOT 7.2 % (median 5.7 %), TTFT 20 % (median 13 %): "),
        (
            "serving",
            {"grounds": "device", "architecture": "blackwell"},
            "TPOT 10 % (median 9.3 %), TTFT 26 % (median 25 %): ",
        ),
        ("serving", {"grounds": "others"}, "TPOT (medians) 5 to 23 %: "),
        ("memory", {"format": "8 bit"}, "peak 13 %: "),
    ],
)
def test_each_kind_of_question_has_its_line(
    table: str, facts: dict[str, str], expected: str
) -> None:
    told = describe_accuracy(table, facts)
    assert told.startswith(expected)
    assert bool(told) == bool(expected)


def test_lines_of_training_are_by_the_width_of_products() -> None:
    assert ("8 bit", "16 bit") == (format_name(DType.FP8), format_name(DType.BF16))


def test_the_page_has_every_line() -> None:
    """`make docs` makes it anew."""
    text = _PAGE.read_text(encoding="utf-8")
    assert text == render_page(text)
