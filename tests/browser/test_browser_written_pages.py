"""Pages that are written to files, in a real browser: what they draw, and what answers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from many_points import NUM_MANY, render_many
from search_reports import build_capacity, build_search
from training_search_reports import build_training_search

from foretoken.page.block import Column, Page, Table
from foretoken.page.html import render
from foretoken.simulator.report.page import render_page, result_sections

pytestmark = pytest.mark.slow

_HOSTILE = "<img src=x onerror=alert(1)>"

_PAGES: dict[str, Callable[[], str]] = {
    "capacity": lambda: render_page(_HOSTILE, result_sections(build_capacity())),
    "search": lambda: render_page(_HOSTILE, result_sections(build_search(_HOSTILE))),
    "training": lambda: render_page("strategies", result_sections(build_training_search(_HOSTILE))),
}


@pytest.fixture
def visit(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Open a page from its file; an error of a script or a request fails the test."""
    contexts: list[Any] = []
    problems: list[str] = []

    def open_page(
        html: str, width: int = 1280, scheme: str = "light", *, is_open: bool = False
    ) -> Any:
        path = tmp_path / "page.html"
        path.write_text(html, encoding="utf-8")
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=is_open
        )
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: problems.append(line.text))
        page.on("request", lambda request: _note(problems, request.url))
        page.goto(path.as_uri())
        page.wait_for_function(
            "[...document.querySelectorAll('figure.chart')].every((chart) => chart.view)"
        )
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [] == problems


def _note(problems: list[str], url: str) -> None:
    if not url.startswith(("file:", "data:")):
        problems.append(f"requests {url}")


@pytest.mark.parametrize("name", list(_PAGES))
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_written_page_draws_all_its_charts(
    visit: Callable[..., Any], name: str, width: int, scheme: str
) -> None:
    page = visit(_PAGES[name](), width, scheme)
    charts = page.locator("figure.chart").count()
    assert 0 < charts == page.locator(".plot svg, .plot canvas").count()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert 0 == page.locator("img").count()


@pytest.mark.parametrize("name", list(_PAGES))
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_written_page_is_free_of_serious_findings(
    visit: Callable[..., Any], name: str, width: int, scheme: str
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not there")
    # The policy of a page stops the script that looks at it.
    page = visit(_PAGES[name](), width, scheme, is_open=True)
    found = axe.Axe().run(page).response["violations"]
    assert [] == [item["id"] for item in found if item["impact"] in {"serious", "critical"}]


def test_of_many_points_few_are_drawn_and_every_row_is_found(visit: Callable[..., Any]) -> None:
    page = visit(render_many())
    count = "document.querySelector('figure.chart').view.data('table').length"
    box = page.locator(".plot").bounding_box()
    rows = page.locator(".table:not(figure *)")
    page.mouse.move(box["x"] + 400, box["y"] + 150)
    before = page.evaluate(count)
    assert 1_000 < before < NUM_MANY / 4
    page.keyboard.down("Shift")
    page.mouse.wheel(0, -800)
    page.wait_for_timeout(500)
    page.keyboard.up("Shift")
    # Zoomed in, points are drawn that hid behind others.
    visible = page.evaluate("document.querySelector('figure.chart').view.signal('zoom').x")
    share = (visible[1] - visible[0]) ** 2
    assert page.evaluate(count) > before * share
    rows.locator("input").fill("row 99999")
    page.wait_for_timeout(500)
    assert "1 of 1 rows" == rows.locator(".count").inner_text()


def test_a_table_sorts_by_numbers_and_not_by_their_letters(visit: Callable[..., Any]) -> None:
    columns = [Column.words("name"), Column(title="ms")]
    table = Table(columns=columns, rows=[("a", 1000.0), ("b", 9.5), ("c", None), ("d", 200.0)])
    page = visit(render(Page(title="t", blocks=[table])))
    header = page.locator("thead button").nth(1)
    header.click()
    assert ["b", "d", "a", "c"] == page.locator("tbody th").all_inner_texts()
    header.click()
    assert "descending" == page.locator("thead th").nth(1).get_attribute("aria-sort")
