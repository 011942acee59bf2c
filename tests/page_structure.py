"""What is in an HTML page: its tags, ids and text."""

from html.parser import HTMLParser


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
        if tag != "meta":
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
