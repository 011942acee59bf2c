"""Pages of comparisons: self-contained, well-formed, with the pictures of their kind."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from compare_examples import keep, serving_of, training_of
from page_structure import charts_of, check_self_contained, parse_page, without_scripts
from search_reports import build_capacity, build_no_capacity, build_search
from training_run_examples import RUN_REPORT
from training_search_reports import build_training_search

from foretoken.domain.requests.search import CandidateColumns
from foretoken.domain.requests.training_search import StrategyColumns
from foretoken.domain.results.report import ServingReport
from foretoken.domain.results.result import AnyReport
from foretoken.simulator.comparison import name_runs
from foretoken.simulator.report.page import compare_sections, render_page
from foretoken.simulator.report.serving_timeline import resample

_HOSTILE = ' <b>&"$x$'
# Pictures of each kind by their titles, and of what their sections are called.
_EXPECTED = {
    "training": (
        *("Step time with its interval", "Critical stage, one step", "Peak memory of one device"),
        *("Communication of the critical stage", "The critical stages"),
        *("Every stage, one step", "Allocated memory over the step", "What the times rest on"),
    ),
    "training-run": (
        *("Expected days with their interval", "The expected days", "What is lost"),
        *("More or fewer devices", "Cost by devices"),
    ),
    "serving": (
        *("TTFT", "ITL", "end-to-end latency"),
        *("output tokens/s", "All steps of all engines", "Over time"),
        *("Mean serving step", "What the times rest on", "arrived requests/s"),
    ),
    "capacity": ("Highest rate that meets the targets", "TTFT p99", "Load and latency"),
    "search": (
        *("Throughput of a GPU against speed for a user", "Cost against latency"),
        *("Best candidates", "rank in B", "Steps of all engines", "Simulated request by request"),
    ),
    "training-search": (
        *("Throughput against free memory", "Throughput of the cluster against cost"),
        *("Best candidates", "rank in B", "Critical stage, one step", "Fullest device of each"),
    ),
}


def _page(reports: Sequence[AnyReport], title: str = "") -> str:
    kept = [keep(report, f"job-{place}", title) for place, report in enumerate(reports)]
    return without_scripts(render_page("comparison", compare_sections(name_runs(kept))))


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    faster = replace(
        build_capacity(), capacity_rps=20.0, high_rps=22.0, scenario_json='{"seed": 8}'
    )
    return {
        "training": _page([training_of(pp=1, name=_HOSTILE), training_of(pp=2, name=_HOSTILE)]),
        "training-run": _page([RUN_REPORT, replace(RUN_REPORT, days=60.0)], _HOSTILE),
        "serving": _page([serving_of(1.0, rate=1, name="a"), serving_of(2.0, rate=_HOSTILE)]),
        "capacity": _page([build_capacity(), faster]),
        "search": _page([build_search(), build_search()], _HOSTILE),
        "training-search": _page([build_training_search(_HOSTILE), build_training_search()]),
    }


@pytest.mark.parametrize("kind", list(_EXPECTED))
def test_a_page_fetches_nothing_and_is_well_formed(pages: dict[str, str], kind: str) -> None:
    check_self_contained(pages[kind])


@pytest.mark.parametrize("kind", [kind for kind in _EXPECTED if kind != "training-search"])
def test_a_page_has_the_pictures_of_its_kind(pages: dict[str, str], kind: str) -> None:
    text = " ".join(parse_page(pages[kind]).text.split())
    assert [] == [title for title in _EXPECTED[kind] if title not in text]


def test_the_page_of_training_searches_has_fronts_and_ranks() -> None:
    text = parse_page(_page([build_training_search(), build_training_search()])).text
    assert [] == [title for title in _EXPECTED["training-search"] if title not in text]


def test_runs_differences_and_ratios_are_told(pages: dict[str, str]) -> None:
    text = parse_page(pages["capacity"]).text
    expected = ("A: seed 7", "B: seed 8", "headline of job-1", "B / A", "2x, better")
    assert [] == [words for words in expected if words not in text]


def test_runs_that_cannot_be_are_still_set_side_by_side() -> None:
    """Without pictures of times; the reason stands out."""
    empty = replace(training_of(pp=4), step_time_ms=0.0, memory=())
    text = parse_page(_page([empty, empty])).text
    assert "What differs" in text
    assert "Critical stage" not in text


def test_capacities_that_are_none_are_set_beside_others() -> None:
    """The reason is stated, and the one that is has its picture."""
    none = build_no_capacity()
    structure = parse_page(_page([build_capacity(), none]))
    assert none.feasibility.reason in structure.text
    assert "Highest rate that meets the targets" in structure.text
    assert "Highest rate that meets the targets" not in parse_page(_page([none, none])).text


def test_searches_that_found_nothing_have_no_fronts() -> None:
    serving = replace(build_search(), candidates=CandidateColumns(), best="")
    training = replace(build_training_search(), candidates=StrategyColumns())
    for report in (serving, training):
        text = parse_page(_page([report, report])).text
        assert "Best candidates" in text
        assert "against speed" not in text
        assert "against free memory" not in text


def test_searches_that_simulated_nothing_have_no_such_section() -> None:
    report = replace(build_training_search(), finalists=())
    assert "Simulated event by event" not in parse_page(_page([report, report])).text


def test_a_deployment_that_served_nothing_is_set_beside_others() -> None:
    """Its figures are dashes, and the pictures are of the other."""
    page = _page([serving_of(1.0, rate=1), ServingReport(num_requests=3)])
    assert "TTFT" in parse_page(page).text


def test_all_critical_stages_have_one_scale_of_time() -> None:
    """They are rows of one chart, each with its own times."""
    longer, shorter = training_of(pp=1), training_of(pp=2)
    half = replace(
        shorter.spans,
        start_ms=np.asarray(shorter.spans.start_ms) / 2,
        end_ms=np.asarray(shorter.spans.end_ms) / 2,
    )
    page = _page([longer, replace(shorter, spans=half)])
    rows = charts_of(page)["The critical stages"]["table"]["rows"]
    ends = {letter: max(row[2] for row in rows if row[0].startswith(letter)) for letter in "AB"}
    assert ends["A"] == pytest.approx(2 * ends["B"])


def test_what_differs_most_comes_first() -> None:
    """A figure that is twice as large stands above those that are the same."""
    more = replace(build_capacity(), capacity_rps=20.0, scenario_json='{"seed": 8}')
    kept = [keep(report, f"job-{n}", "") for n, report in enumerate((build_capacity(), more))]
    sections = {section.title: section for section in compare_sections(name_runs(kept))}
    table = sections["Figures"].table
    assert table is not None
    assert ("capacity (requests/s)", "2x, better") == (table.rows[0][0], table.rows[0][-1])
    assert "same" == table.rows[-1][-1]


def test_series_are_drawn_in_common_intervals() -> None:
    """Counts are added, what stands is averaged, and there is nothing after a run's end."""
    run = serving_of(1.0)
    edges = np.array([0.0, 2.0, 4.0, 6.0])
    completed = resample(run, "num_completions", edges)
    running = resample(run, "running_mean", edges)
    np.testing.assert_array_equal(completed, [3.0, 2.0, np.nan])
    np.testing.assert_array_equal(running, [1.5, 1.0, np.nan])
