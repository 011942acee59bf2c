"""What the ties of a search mean for the choice, in words."""

import json
from dataclasses import replace

import pytest
from training_search_reports import build_training_search

from foretoken.domain.requests.training_search import StrategySensitivity
from foretoken.simulator.report.training_search_rows import (
    describe_same,
    describe_ties,
    figure_bounds,
    find_best,
    list_tie_commands,
    other_ties,
    ranked_figure,
    report_rows,
)
from foretoken.simulator.report.what_if import describe_best_then, describe_change


def test_nothing_is_said_without_ties() -> None:
    report = replace(build_training_search(), ties=(), tie_calls=())
    assert [] == describe_ties(report, report_rows(report))
    assert [] == list_tie_commands(report)


def test_ties_are_counted_and_other_reasons_to_choose_are_told() -> None:
    """All that fit tie: the simplest is plain, the roomiest has the most free memory."""
    report = build_training_search()
    rows = report_rows(report)
    report = replace(report, ties=tuple(row["name"] for row in rows))
    best = find_best(report, rows)
    count, simplest, roomiest = describe_ties(report, rows)
    assert count.startswith(f"{len(rows) - 1} other strategies tie with {best['name']}")
    assert len(rows) - 1 == len(other_ties(report, best))
    fewest = min(len(row["name"].split()) for row in rows)
    assert simplest == f"simplest of them: {best['name']} itself"
    assert fewest == len(best["name"].split())
    most = max(rows, key=lambda row: row["margin_bytes"])
    slower = most["tokens_per_s_per_gpu"] / best["tokens_per_s_per_gpu"] - 1
    assert roomiest.startswith(f"most free memory: {most['name']} ({slower:+.2%} throughput)")


def test_ties_by_cost_are_told_by_cost() -> None:
    """What ranks is what a tie is a tie of: dearer is more, with the bounds of the step."""
    report = build_training_search()
    request = {**json.loads(report.request_json), "objective": "cost"}
    report = replace(report, request_json=json.dumps(request))
    row = {
        "usd_per_billion_tokens": 30.0,
        "tokens_per_s_per_gpu": 7.0,
        "step_time_ms": 100.0,
        "step_time_low_ms": 90.0,
        "step_time_high_ms": 120.0,
    }
    assert ranked_figure(report) == ("usd_per_billion_tokens", "cost")
    assert figure_bounds(row, "usd_per_billion_tokens") == pytest.approx((27.0, 36.0))


def test_what_to_measure_is_a_command() -> None:
    expected = (
        "foretoken plan all_reduce message_bytes=1048576 devices_per_node=4 num_nodes=1"
        " --device a100_sxm_80 --topology a100_dgx"
    )
    assert [(expected, "2.34% of the step")] == list_tie_commands(build_training_search())


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (
            StrategySensitivity(
                change="c", best="b", throughput_ratio=1.05, same_throughput_ratio=1.05
            ),
            ("+5.0%", "the same", "the same"),
        ),
        (
            StrategySensitivity(
                change="c",
                best="b",
                throughput_ratio=1.05,
                same_throughput_ratio=0.99999,
                is_same_best=False,
            ),
            ("+5.0%", "+0.0%", "b"),
        ),
        (
            StrategySensitivity(change="c", best="b", throughput_ratio=0.9, is_same_best=False),
            ("-10.0%", "cannot", "b"),
        ),
        (
            StrategySensitivity(change="c", best="", throughput_ratio=0.0, is_same_best=False),
            ("", "cannot", "nothing fits"),
        ),
    ],
)
def test_a_change_is_told_beside_what_today_s_best_makes_of_it(
    item: StrategySensitivity, words: tuple[str, str, str]
) -> None:
    assert words == (describe_change(item), describe_same(item), describe_best_then(item))
