import pytest

from foretoken.app.cli.option_text import (
    parse_limit,
    parse_limits,
    parse_ms,
    parse_s,
)
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.search import LatencyLimit


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ttft p99 2s", ("ttft_ms", 99, 2000)),
        ("itl p99.9 200ms", ("itl_ms", 99.9, 200)),
        ("TPOT P50 30MS", ("tpot_ms", 50, 30)),
        ("e2e mean 1.5 min", ("e2e_latency_ms", 0, 90_000)),
        ("e2e_latency_ms p100 <= 20 s", ("e2e_latency_ms", 100, 20_000)),
        ("itl median < .5ms", ("itl_ms", 50, 0.5)),
    ],
)
def test_limits_are_read(text: str, expected: tuple[str, float, float]) -> None:
    """Metric, statistic and time, in any case."""
    metric, percentile, limit_ms = expected
    assert parse_limit(text) == LatencyLimit(
        metric=metric, percentile=percentile, limit_ms=limit_ms
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("ttft 2s", "write METRIC STATISTIC TIME"),
        ("", "write METRIC STATISTIC TIME"),
        ("latency p99 2s", "'latency' is none of ttft, tpot, itl, e2e"),
        ("ttft 99 2s", "'99' is no statistic"),
        ("ttft p101 2s", "'p101' is no statistic"),
        ("ttft p0 2s", "'p0' is no statistic"),
        ("ttft p99 2d", "'2d' is no time"),
        ("ttft p99 2", "--limit: 2 has no unit: 2s or 2ms?"),
        ("ttft p99 0s", "'0s' is no time"),
        ("ttft p99 -2s", "'-2s' is no time"),
    ],
)
def test_what_is_wrong_is_said(text: str, problem: str) -> None:
    """The message quotes what cannot be read."""
    with pytest.raises(InvalidRequestError, match=problem):
        parse_limit(text)


def test_several_limits_keep_their_order() -> None:
    """As they were given."""
    found = parse_limits("--limit", ["itl p99 200ms", "ttft p99 2s"])
    assert [limit.metric for limit in found] == ["itl_ms", "ttft_ms"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2s", 2000), ("30ms", 30), ("250us", 0.25), (" 1.5 MIN", 90_000), ("2h", 7_200_000)],
)
def test_times(text: str, expected: float) -> None:
    """In ms."""
    assert parse_ms(text, "--ttft") == expected
    assert parse_s(text, "--ttft") == expected / 1000


@pytest.mark.parametrize("number", ["2", "0.5", "2000"])
def test_a_number_without_a_unit_is_asked_back(number: str) -> None:
    with pytest.raises(
        InvalidRequestError, match=f"--ttft: {number} has no unit: .*ms\\?"
    ) as found:
        parse_ms(number, "--ttft")
    assert [violation.field for violation in found.value.violations] == ["--ttft"]
