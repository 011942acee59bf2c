"""The usual section of a page: a warning, words, figures, pictures, a table, and a folded listing.

What is written in it are texts; `as_block` makes it a block.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from foretoken.page import block
from foretoken.page.block import Cell, Chart, Picture, Text, Value


@dataclass(frozen=True, kw_only=True, slots=True)
class DataTable:
    """A table whose first column names the rows.

    `text_columns` are the places of the other columns with words; the rest have numbers.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    text_columns: Collection[int] = ()

    def as_block(self) -> block.Table:
        """Return the table with its cells as texts."""
        seen: Counter[str] = Counter()
        columns = []
        for place, header in enumerate(self.headers):
            is_text = place == 0 or place in self.text_columns
            column = block.Column(title=header, is_text=is_text)
            seen[column.name] += 1
            if seen[column.name] > 1:
                name = f"{column.name}_{seen[column.name]}"
                column = block.Column(title=header, name=name, is_text=is_text)
            columns.append(column)
        return block.Table(columns=columns, rows=self.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One part of a page. `warning` stands out; `listing` is long text that starts folded.

    `blocks` are what else there is, after the pictures: tables of metrics.
    """

    title: str
    intro: str = ""
    warning: str = ""
    facts: Sequence[Value] = ()
    pictures: Sequence[Chart | Picture] = ()
    blocks: Sequence[block.Block] = ()
    table: DataTable | None = None
    listing: str = ""

    def as_block(self) -> block.Section:
        """Return the section with what there is of its parts."""
        return block.Section(self.title, list(self._blocks()))

    def _blocks(self) -> Iterator[block.Block]:
        if self.warning:
            yield Text(self.warning, "alert")
        if self.intro:
            yield Text(self.intro)
        if self.facts:
            yield block.Figures(self.facts)
        yield from self.pictures
        yield from self.blocks
        if self.table:
            yield self.table.as_block()
        if self.listing:
            yield block.Section("In full", [Text(self.listing, "code")], open=False)


class About(Section):
    """What a page says at its top: the question, and what the answer rests on; its table has it."""


def page_of(title: str, subtitle: str, sections: Sequence[Section]) -> block.Page:
    """Return sections as a page, with the lines of those that are `About` at its top."""
    lines = [
        (str(name), str(text))
        for section in sections
        if isinstance(section, About) and section.table
        for name, text in section.table.rows
    ]
    return block.Page(
        title=title,
        subtitle=subtitle,
        about=lines,
        blocks=[section.as_block() for section in sections if not isinstance(section, About)],
    )
