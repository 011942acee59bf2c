"""What a page says of a whole run."""

from dataclasses import replace

from page_structure import charts_of
from training_run_examples import RUN_REPORT

from foretoken.domain.requests.training_run import TrainingRunReport
from foretoken.domain.results.report import Feasibility
from foretoken.simulator.report.page import render_page
from foretoken.simulator.report.training_run_sections import training_run_sections


def _titles(report: TrainingRunReport) -> list[str]:
    return [section.title for section in training_run_sections(report)]


def test_a_page_has_the_answer_its_parts_and_what_it_rests_on() -> None:
    page = render_page("a run", training_run_sections(RUN_REPORT))
    for text in ("46.5", "94.9%", "35,712", "devices for 50 days", "a note", "94 GB every 60 min"):
        assert text in page
    expected = {
        *("The expected days", "What is lost", "Goodput by the interval of checkpoints"),
        *("Days by devices", "Cost by devices"),
    }
    assert expected == set(charts_of(page))


def test_sections_without_figures_are_left_out() -> None:
    """Nothing fails, and no other size was tried."""
    report = replace(RUN_REPORT, num_failures=0, sizes=(), notes=())
    assert _titles(report) == ["The run", "Where the days go", "Configuration"]


def test_a_run_that_cannot_be_says_why() -> None:
    infeasible = Feasibility(is_feasible=False, reason="it fails too often")
    report = replace(RUN_REPORT, feasibility=infeasible, days=0, num_failures=0, sizes=())
    assert _titles(report) == ["The run", "Remarks", "Configuration"]
    assert "it fails too often" in training_run_sections(report)[0].warning
