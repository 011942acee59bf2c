"""Reports count outcomes and compare points that were timed twice; durations are learned."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiler_fakes import CPU, FAST

from foretoken.domain.measurements.estimate import DType, OperatorCall
from foretoken.profiler.planning.coverage import point_of_call
from foretoken.profiler.planning.durations import CaseDurations, RemainingTime
from foretoken.profiler.planning.plan import ProfilePlan, outline_plan
from foretoken.profiler.recording.batches import RowBuilder
from foretoken.profiler.report import ReportBuilder, repeat_differences
from foretoken.profiler.timing.timer import summarize

ROWS = RowBuilder("cpu", "torch", "9.9")


def silu(num_tokens: int) -> OperatorCall:
    dims = {"num_tokens": num_tokens, "intermediate": 64}
    return OperatorCall(operator="silu", dtype=DType.FP32, dims=dims)


def row(latency_us: float, **columns: Any) -> Any:
    return ROWS.measured(silu(1), "torch", summarize([latency_us]), **columns)


def test_operators_are_told_apart_with_their_seconds_and_intervals() -> None:
    report = ReportBuilder()
    report.add(silu(1), row(10.0), 0.5, 0.01)
    report.add(silu(2), row(10.0, flags=["drift: 9 %"]), 0.25, 0.03)
    report.add(silu(3), ROWS.failed(silu(3), "torch", "no"), 0.25, None)
    built = report.build(device="cpu")
    (silus,) = built.operators
    assert (silus.num_measured, silus.num_failed, silus.num_flagged) == (2, 1, 1)
    assert (silus.wall_s, silus.interval_ratio) == (1.0, 0.02)
    assert (built.num_measured, built.num_failed, built.num_flagged) == (2, 1, 1)
    assert built.device == "cpu"


def test_the_most_frequent_reasons_of_failures_are_told_and_the_others_counted() -> None:
    report = ReportBuilder()
    for reason, count in {"a": 1, "b": 3, "c": 2, "d": 2, "e": 2, "f": 2}.items():
        for _ in range(count):
            report.add(silu(1), ROWS.failed(silu(1), "torch", reason), 0.1, None)
    expected = ("3 failed: silu: b", *(f"2 failed: silu: {reason}" for reason in "cdef"))
    assert expected == report.failures[:-1]
    assert "1 failed for other reasons" in report.failures[-1]


def test_repeats_are_compared_with_what_was_measured_before() -> None:
    """The first half of a profile may have been another process's."""
    report = ReportBuilder({point_of_call(silu(1)): [9.0]})
    report.add(silu(1), row(11.0), 0.1, 0.01)
    built = report.build()
    assert built.num_repeats == 1
    assert built.repeat_median_ratio == pytest.approx(0.2)


@given(st.lists(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=3), max_size=20))
def test_difference_is_of_pairs_and_does_not_depend_on_their_order(
    medians_us: list[list[float]],
) -> None:
    found = repeat_differences(medians_us)
    swapped = repeat_differences([[*values[:2][::-1], *values[2:]] for values in medians_us])
    assert found == swapped
    assert len(found) == sum(len(values) > 1 for values in medians_us)
    assert all(0.0 <= ratio <= 2.0 for ratio in found)


def test_cases_that_take_longer_than_the_rules_say_correct_the_estimate() -> None:
    durations = CaseDurations(CPU, FAST)
    before_s = durations.estimate_s(silu(4))
    for _ in range(200):
        durations.learn(silu(1), 10 * durations.rule_s(silu(1)))
    assert 5 * before_s < durations.estimate_s(silu(4)) <= 10 * before_s
    # Of what was never timed, the others tell.
    other = OperatorCall(operator="gelu", dtype=DType.FP32, dims=silu(4).dims)
    assert durations.estimate_s(other) > 5 * durations.rule_s(other)


def test_what_was_learned_outlives_the_process(tmp_path: Path) -> None:
    path = tmp_path / "durations" / "cpu.json"
    durations = CaseDurations(CPU, FAST)
    durations.learn(silu(1), 3.0)
    durations.save(path)
    again = CaseDurations(CPU, FAST)
    again.load(path)
    assert again.estimate_s(silu(4)) == durations.estimate_s(silu(4))
    path.write_text("{", encoding="utf-8")
    unread = CaseDurations(CPU, FAST)
    unread.load(path)
    assert unread.estimate_s(silu(4)) == CaseDurations(CPU, FAST).estimate_s(silu(4))


def test_nothing_is_left_when_all_calls_are_taken() -> None:
    durations = CaseDurations(CPU, FAST)
    calls = [silu(n) for n in (1, 2, 3)]
    remaining = RemainingTime(durations, calls)
    assert remaining.seconds == pytest.approx(durations.total_s(calls))
    for call in calls:
        remaining.take(call, 0.5)
    assert remaining.seconds == pytest.approx(0.0, abs=1e-9)


def test_outline_counts_calls_and_those_that_will_not_fit() -> None:
    plan = ProfilePlan(calls=(silu(1), silu(2), silu(2**40)), num_too_long=4)
    plan.covered["gemm"] = 5
    plan.left_out["rope: no kernel runs it here"] = 6
    outline = outline_plan("mine", "cpu", plan, CaseDurations(CPU, FAST), 1e9)
    assert [(o.operator, o.num_calls, o.num_covered) for o in outline.operators] == [
        ("gemm", 0, 5),
        ("silu", 3, 0),
    ]
    assert (outline.num_calls, outline.num_covered) == (3, 5)
    assert (outline.num_too_long, outline.num_failing, outline.num_unsupported) == (4, 1, 6)
    assert outline.notes == ("6 left out: rope: no kernel runs it here",)
    assert outline.estimated_s == sum(o.estimated_s for o in outline.operators) > 0.0
