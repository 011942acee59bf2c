"""What is in an HTML page: its tags, ids, text and charts."""

import json
import re
from html.parser import HTMLParser
from typing import Any

from foretoken.page.block import Chart
from foretoken.page.html import asset


class PageStructure(HTMLParser):
    """Collects ids, text and tags that do not close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.ids: list[str] = []
        self.mismatches: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in {"meta", "input"}:
            self.open_tags.append(tag)

    def handle_startendtag(self, _tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attrs if name == "id" and value]

    def handle_endtag(self, tag: str) -> None:
        if not self.open_tags or self.open_tags.pop() != tag:
            self.mismatches.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def parse_page(page: str) -> PageStructure:
    """Return what is in a page."""
    structure = PageStructure()
    structure.feed(page)
    return structure


def without_scripts(page: str) -> str:
    """Return a page without the scripts that all have; the data of its charts stay."""
    for name in ("vega.js", "page.js"):
        page = page.replace(f"<script>{asset(name)}</script>", "")
    return page


def check_self_contained(page: str) -> None:
    """Check that a page fetches nothing, is well formed, and runs no script but ours."""
    own = without_scripts(page)
    assert not re.findall(r"<(?:link|img|iframe|object|embed)|src=|href=|@import|url\(", own)
    assert set(re.findall(r"<script[^>]*>", own)) <= {'<script type="application/json">'}
    structure = parse_page(own)
    assert ([], []) == (structure.open_tags, structure.mismatches)
    assert len(set(structure.ids)) == len(structure.ids)
    assert 1 == own.count("<main>")


def charts_of(page: str) -> dict[str, dict[str, Any]]:
    """Return the data of the charts of a page, by title."""
    found = re.findall(r'<script type="application/json">(.*?)</script>', page, flags=re.DOTALL)
    blocks = [json.loads(text) for text in found]
    return {block["title"]: block for block in blocks if block["kind"] == "chart"}


def marked(chart: Chart) -> list[str]:
    """Return the names of the values that a chart marks on its axes."""
    texts = [layer["encoding"].get("text", {}).get("value") for layer in chart.spec["layer"]]
    return [text for text in texts if text]
