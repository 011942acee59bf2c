"""What was held out, scored by kind of point, joined over series, and shown on a page."""

import re
from collections.abc import Sequence

import numpy as np
import pytest
from page_structure import charts_of, check_self_contained

from foretoken.domain.results.report import (
    HeldOutCase,
    OperatorTrainingReport,
    PredictorTrainingReport,
)
from foretoken.predictor.report.charts import coverage_by_chance
from foretoken.predictor.report.page import render_page
from foretoken.predictor.scoring import (
    SPLITS,
    HeldOut,
    merge_reports,
    merge_splits,
    pick_worst,
    report_series,
    score_splits,
)

_TRUTH_US = 100.0


def held_out(
    error_ratio: Sequence[float], split: Sequence[str] | str = "inside", width_ratio: float = 0.1
) -> HeldOut:
    """Return points that took 100 µs, estimated with these errors and intervals this wide."""
    errors = np.asarray(error_ratio, dtype=np.float64)
    names = [split] * len(errors) if isinstance(split, str) else list(split)
    estimate_us = _TRUTH_US * (1.0 + errors)
    places = np.arange(len(errors), dtype=np.int64)
    return HeldOut(
        dim_names=("m", "k"),
        split=np.array(names, dtype=np.str_),
        points=np.stack([places + 1, places + 1000], axis=1),
        measured_us=np.full(len(errors), _TRUTH_US),
        estimate_us=estimate_us,
        low_us=estimate_us * (1.0 - width_ratio),
        high_us=estimate_us * (1.0 + width_ratio),
    )


def report_of(
    errors: HeldOut, operator: str = "gemm", num_rows: int = 50, **weights: float
) -> OperatorTrainingReport:
    return report_series(operator, "a30", num_rows, errors, weights)


def trained(*operators: OperatorTrainingReport) -> PredictorTrainingReport:
    return PredictorTrainingReport(
        model_version="v-1",
        num_rows=1234,
        cpu_s=5.25,
        created_at="2026-11-21T21:04:11.120+00:00",
        num_reused=3,
        operators=operators,
    )


def test_a_series_is_scored_over_all_and_by_split() -> None:
    """Errors of 10 % leave their interval of 10 % on the slow side of the truth alone."""
    report = report_of(held_out([0.02, -0.04, 0.3, -0.1], ["beyond", "inside", "beyond", "inside"]))
    assert (4, pytest.approx(0.115), 0.5) == (
        report.num_held_out,
        report.held_out_mape_ratio,
        report.interval_coverage_ratio,
    )
    inside, beyond = report.splits
    assert ("inside", 2, pytest.approx(0.07), pytest.approx(0.094), 0.5) == (
        inside.split,
        inside.num_held_out,
        inside.mape_ratio,
        inside.p90_ratio,
        inside.interval_coverage_ratio,
    )
    assert ("beyond", 2, pytest.approx(0.16)) == (
        beyond.split,
        beyond.num_held_out,
        beyond.mape_ratio,
    )


def test_quantiles_go_from_the_least_error_to_the_greatest() -> None:
    (score,) = score_splits(held_out(np.linspace(-0.5, 0.5, 101).tolist()))
    assert pytest.approx(np.linspace(-0.5, 0.5, 21)) == score.error_quantiles_ratio


def test_splits_keep_the_order_of_the_questions() -> None:
    errors = held_out([0.1] * 4, [*reversed(SPLITS)])
    assert SPLITS == tuple(score.split for score in score_splits(errors))


def test_an_unknown_split_is_a_mistake_of_ours() -> None:
    with pytest.raises(ValueError, match="sideways"):
        score_splits(held_out([0.1], "sideways"))


def test_nothing_held_out_is_a_report_too() -> None:
    report = report_of(held_out([]))
    assert (50, 0, 0.0, 0.0, (), ()) == (
        report.num_rows,
        report.num_held_out,
        report.held_out_p90_ratio,
        report.interval_coverage_ratio,
        report.splits,
        report.worst,
    )


def test_the_worst_are_the_furthest_by_ratio_with_some_of_every_split() -> None:
    """Half the truth is further off than 1.8 times it; the fourth of a split is left out."""
    errors = held_out([-0.5, 0.8, 0.7, 0.6, 0.05], [*["beyond"] * 4, "inside"])
    assert [50.0, 180.0, 170.0, 105.0] == [
        round(case.estimate_us, 9) for case in report_of(errors).worst
    ]
    assert {"m": 1, "k": 1000} == report_of(errors).worst[0].dims


def test_the_worst_are_ten_at_most() -> None:
    errors = held_out([0.1] * 16, [name for name in SPLITS for _ in range(4)])
    assert 10 == len(report_of(errors).worst)


def test_the_worst_of_parts_are_the_worst_of_all() -> None:
    rng = np.random.default_rng(3)
    names = rng.choice(SPLITS, 60).tolist()
    errors = held_out(rng.uniform(-0.6, 1.5, 60).tolist(), names)
    cases: list[HeldOutCase] = [errors.case(place) for place in range(60)]
    halves = (*pick_worst(cases[:30]), *pick_worst(cases[30:]))
    assert pick_worst(cases) == pick_worst(halves)


def test_series_of_one_operator_count_by_their_points() -> None:
    rng = np.random.default_rng(7)
    large, small = rng.normal(0.0, 0.05, 4000), rng.normal(0.1, 0.2, 1000).clip(min=-0.9)
    (merged,) = merge_reports(
        [report_of(held_out(large.tolist())), report_of(held_out(small.tolist()))]
    )
    together = report_of(held_out([*large, *small]))
    assert (100, 5000) == (merged.num_rows, merged.num_held_out)
    assert pytest.approx(together.held_out_mape_ratio) == merged.held_out_mape_ratio
    assert pytest.approx(together.interval_coverage_ratio) == merged.interval_coverage_ratio
    # Taken up again from quantiles.
    assert pytest.approx(together.held_out_p90_ratio, rel=0.05) == merged.held_out_p90_ratio
    expected = together.splits[0].error_quantiles_ratio
    assert pytest.approx(expected, abs=0.01) == merged.splits[0].error_quantiles_ratio


def test_a_series_that_held_nothing_out_changes_nothing_but_the_rows() -> None:
    (merged,) = merge_reports([report_of(held_out([])), report_of(held_out([0.2, 0.4]))])
    assert (100, 2) == (merged.num_rows, merged.num_held_out)
    assert pytest.approx(0.3) == merged.held_out_mape_ratio
    assert pytest.approx(0.38) == merged.held_out_p90_ratio


def test_member_weights_count_by_rows() -> None:
    parts = [
        report_of(held_out([0.1]), num_rows=30, trees=1.0),
        report_of(held_out([0.1]), num_rows=10, trees=0.2, curves=0.8),
        report_of(held_out([0.1]), num_rows=1000),
    ]
    (merged,) = merge_reports(parts)
    assert {"curves": pytest.approx(0.2), "trees": pytest.approx(0.8)} == merged.member_weights


def test_operators_stay_apart_and_come_by_name() -> None:
    merged = merge_reports([report_of(held_out([0.1]), "moe"), report_of(held_out([0.1]), "gemm")])
    assert ["gemm", "moe"] == [report.operator for report in merged]


def test_chance_allows_little_to_many_points_and_much_to_few() -> None:
    """Known values of the binomial distribution with 90 %."""
    assert (0.7, 1.0) == coverage_by_chance(10)
    low, high = coverage_by_chance(10_000)
    assert (0.8941, 0.9059) == (pytest.approx(low, abs=1e-3), pytest.approx(high, abs=1e-3))


def _page() -> str:
    rng = np.random.default_rng(1)
    names = [name for name in SPLITS for _ in range(100)]
    gemm = held_out(rng.normal(0.0, 0.03, 400).tolist(), names, width_ratio=0.2)
    moe = held_out(rng.normal(0.0, 0.2, 400).clip(min=-0.9).tolist(), names, width_ratio=0.02)
    return render_page(
        trained(
            report_of(gemm, "gemm", trees=0.7, curves=0.3), report_of(moe, "<b>moe</b>", trees=1.0)
        )
    )


def test_the_page_has_the_figures_and_what_they_mean() -> None:
    page = _page()
    assert "Model v-1, made 2026-11-21 21:04 UTC" in page
    assert "<dt>rows</dt><dd>1,234</dd>" in page
    assert "3 models kept from before" in page
    expected = {
        *("Too fast, or too slow?", "How far off?", "Coverage", "Coverage by operator"),
        *("Mean error by operator", "Members"),
    }
    assert expected == set(charts_of(page))
    assert "foretoken plan" in page


def test_a_coverage_that_chance_does_not_explain_is_marked() -> None:
    """By a sign and by colour: intervals of 2 % miss errors of 20 %, those of 20 % miss none."""
    page = _page()
    alerts = re.findall(
        r'<tr><th scope="row" class="text">&lt;b&gt;moe.*?class="tone-alert">▼ [\d.]+%</td>', page
    )
    calms = re.findall(
        r'<tr><th scope="row" class="text">gemm</th>.*?class="tone-calm">▲ 100.0%</td>', page
    )
    assert (4, 4) == (len(alerts), len(calms))


def test_the_page_stands_alone_and_trusts_no_name() -> None:
    page = _page()
    check_self_contained(page)
    assert "<b>moe" not in page


def test_the_same_report_is_the_same_page() -> None:
    assert _page() == _page()


def test_a_report_with_nothing_held_out_says_so() -> None:
    page = render_page(trained(report_of(held_out([]))))
    assert "nothing is known of errors" in page
    assert {} == charts_of(page)


def test_scores_without_points_do_not_count() -> None:
    (score,) = score_splits(held_out([0.1]))
    assert (score,) == merge_splits([score])
    assert () == merge_splits([])
