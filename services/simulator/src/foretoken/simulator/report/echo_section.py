"""What a page says of its question and of what the answer rests on."""

from collections.abc import Sequence

from foretoken.domain.results.echo import Echo
from foretoken.page.section import About, DataTable, Section


def with_echo(sections: Sequence[Section], *echoes: Echo) -> list[Section]:
    """Return sections with the echoes of their answers after the first, which is the answer."""
    return with_lines(sections, [line for echo in echoes for line in echo.lines()])


def with_lines(sections: Sequence[Section], lines: Sequence[str]) -> list[Section]:
    """Return sections with lines of echoes after the first; what several say stands once."""
    parts = (line.partition(": ") for line in lines)
    rows = dict.fromkeys((name, text) for name, _, text in parts)
    if not rows:
        return list(sections)
    table = DataTable(headers=("", "as it was understood"), rows=list(rows), text_columns={1})
    section = About(title="The question, and what the answer rests on", table=table)
    return [*sections[:1], section, *sections[1:]]
