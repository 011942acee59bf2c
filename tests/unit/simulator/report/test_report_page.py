"""Pages: self-contained, well-formed, and with every number's interval and provenance."""

import json
import re

import pytest
from page_structure import charts_of, check_self_contained, without_scripts
from report_examples import build_serving
from training_examples import build_training, infeasible_training

from foretoken.domain.measurements.estimate import Provenance
from foretoken.page.block import Value
from foretoken.page.section import Section
from foretoken.simulator.report.page import render_page, result_sections
from foretoken.simulator.report.palette import OF_PROVENANCE
from foretoken.simulator.report.serving_sections import serving_sections


@pytest.fixture(scope="module")
def serving_page() -> str:
    reports = [build_serving(rate) for rate in (4.0, 1.0, 2.0)]
    return render_page("llama-3-8b on a30", result_sections(*reports))


@pytest.fixture(scope="module")
def training_page() -> str:
    return render_page("llama-2-7b on 2 a100", result_sections(build_training()))


@pytest.mark.parametrize("name", ["serving_page", "training_page"])
def test_a_page_fetches_nothing_and_is_well_formed(
    name: str, request: pytest.FixtureRequest
) -> None:
    check_self_contained(request.getfixturevalue(name))


@pytest.mark.parametrize("name", ["serving_page", "training_page"])
def test_every_chart_has_its_table_and_says_what_it_shows(
    name: str, request: pytest.FixtureRequest
) -> None:
    page = request.getfixturevalue(name)
    charts = charts_of(page)
    assert charts
    assert len(charts) == page.count('class="plot" role="img" aria-label="')
    for chart in charts.values():
        names = {column["name"] for column in chart["table"]["columns"]}
        used = set(re.findall(r'"field": "([^"]+)"', json.dumps(chart["spec"])))
        assert set() == used - names - {"_row"}
        assert chart["table"]["rows"]


def test_a_serving_page_shows_loads_in_order_with_what_they_rest_on(serving_page: str) -> None:
    titles = re.findall(r"<h2>(.*?)</h2>", without_scripts(serving_page))
    expected = [
        "Serving",
        "Latency against load",
        "Throughput and goodput",
        "Numbers",
        "Distributions",
        "Where the time goes",
        "Percentiles",
        "Single requests",
        "Configuration",
    ]
    assert expected == titles
    assert "75% interpolated, 25% measured" in serving_page
    assert "0.93 to 1.08 x" in serving_page
    assert "-7% to +8%" in serving_page
    loads = re.findall(r'<th scope="col">([\d.]+/s)</th>', serving_page)
    assert ["1/s", "2/s", "4/s"] == loads
    assert "2 requests, not shown" in serving_page


def test_one_load_has_no_curve_against_load() -> None:
    titles = [section.title for section in result_sections(build_serving(1.0))]
    assert "Latency against load" not in titles
    assert "Distributions" in titles


def test_what_cannot_run_says_why_and_nothing_else() -> None:
    sections = result_sections(infeasible_training())
    assert ["Training step", "Configuration"] == [section.title for section in sections]
    assert "3 does not divide the 32 heads" in sections[0].warning


def test_no_reports_make_an_empty_page() -> None:
    assert "Serving" in render_page("nothing", serving_sections([]))


def test_text_is_escaped() -> None:
    section = Section(title="<b>", facts=(Value(label="a & b", value="<script>"),))
    page = render_page("<i>", [section])
    assert "<script>" not in without_scripts(page)
    assert "a &amp; b" in page


def test_the_same_report_gives_the_same_page(training_page: str) -> None:
    again = render_page("llama-2-7b on 2 a100", result_sections(build_training()))
    assert training_page == again


def test_every_provenance_has_its_colour() -> None:
    """What has none is left out of the picture."""
    assert [member.name.lower() for member in Provenance] == list(OF_PROVENANCE)
