"""Pages: self-contained, well-formed, and with every number's interval and provenance."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest
from report_examples import build_serving
from training_examples import build_training, infeasible_training

from foretoken.domain.measurements.estimate import Provenance
from foretoken.page.section import Fact, Section
from foretoken.simulator.report.page import render_page, serving_sections, training_sections
from foretoken.simulator.report.palette import OF_PROVENANCE

_VOID = {"meta", "br", "hr", "img", "link"}


class _Structure(HTMLParser):
    """Collects ids and checks that tags close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.ids: list[str] = []
        self.mismatches: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in _VOID:
            self.open_tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open_tags.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open_tags or self.open_tags.pop() != tag:
            self.mismatches.append(tag)


def _parse(html: str) -> _Structure:
    structure = _Structure()
    structure.feed(html)
    return structure


@pytest.fixture(scope="module")
def serving_page() -> str:
    reports = [build_serving(rate) for rate in (4.0, 1.0, 2.0)]
    return render_page("llama-3-8b on a30", serving_sections(reports))


@pytest.fixture(scope="module")
def training_page() -> str:
    return render_page("llama-2-7b on 2 a100", training_sections(build_training()))


@pytest.mark.parametrize("name", ["serving_page", "training_page"])
def test_a_page_fetches_nothing_and_is_well_formed(
    name: str, request: pytest.FixtureRequest
) -> None:
    page = request.getfixturevalue(name)
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    assert "http" not in without_namespaces
    for fetching in ("<script", "<link", "<img", "src=", "@import", "url('"):
        assert fetching not in page
    structure = _parse(page)
    assert ([], []) == (structure.open_tags, structure.mismatches)
    assert len(set(structure.ids)) == len(structure.ids)


@pytest.mark.parametrize("name", ["serving_page", "training_page"])
def test_every_reference_inside_a_figure_resolves(
    name: str, request: pytest.FixtureRequest
) -> None:
    page = request.getfixturevalue(name)
    ids = set(_parse(page).ids)
    references = re.findall(r'(?:url\(|href=")#([^)"]+)', page)
    assert references
    assert set() == set(references) - ids


def test_figures_take_the_colour_of_the_text(training_page: str) -> None:
    figures = re.findall(r"<svg.*?</svg>", training_page, flags=re.DOTALL)
    assert 7 == len(figures)
    for figure in figures:
        ET.fromstring(figure)  # noqa: S314  our own output
        assert "currentColor" in figure


def test_a_serving_page_shows_loads_in_order_with_what_they_rest_on(serving_page: str) -> None:
    titles = re.findall(r"<h2>(.*?)</h2>", serving_page)
    expected = [
        "Serving",
        "Latency against load",
        "Throughput and goodput",
        "Numbers",
        "Distributions",
        "Where the time goes",
        "Percentiles",
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
    titles = [section.title for section in serving_sections([build_serving(1.0)])]
    assert "Latency against load" not in titles
    assert "Distributions" in titles


def test_what_cannot_run_says_why_and_nothing_else() -> None:
    sections = training_sections(infeasible_training())
    assert ["Training step", "Configuration"] == [section.title for section in sections]
    assert "3 does not divide the 32 heads" in sections[0].warning


def test_no_reports_make_an_empty_page() -> None:
    assert "Serving" in render_page("nothing", serving_sections([]))


def test_text_is_escaped() -> None:
    section = Section(title="<b>", facts=(Fact(label="a & b", value="<script>"),))
    page = render_page("<i>", [section])
    assert "<script>" not in page
    assert "a &amp; b" in page


def test_the_same_report_gives_the_same_page(training_page: str) -> None:
    again = render_page("llama-2-7b on 2 a100", training_sections(build_training()))
    assert training_page == again


def test_every_provenance_has_its_colour() -> None:
    """What has none is left out of the picture."""
    assert [member.name.lower() for member in Provenance] == list(OF_PROVENANCE)
