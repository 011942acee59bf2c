"""The usual section of a page: a warning, words, figures, pictures, a table, and a folded listing.

What is written in it are texts; `as_block` makes it a block.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from foretoken.domain.metrics.registry import METRICS
from foretoken.page import block
from foretoken.page.block import Chart, Picture, Text, Tone


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """One number to be seen first; `note` is its interval or what it means."""

    label: str
    value: str
    note: str = ""

    @classmethod
    def of(cls, name: str, record: Any, note: str = "") -> Self:
        """Return a metric of a report or a row by its name; the label has the unit."""
        metric = METRICS[name]
        return cls(label=metric.title, value=metric.words(record), note=note)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A cell of a table that stands out; its text must say why without its colour."""

    text: str
    tone: Tone

    def __str__(self) -> str:
        """Return the text."""
        return self.text


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
        rows = [[_as_cell(cell) for cell in row] for row in self.rows]
        return block.Table(columns=columns, rows=rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One part of a page. `warning` stands out; `listing` is long text that starts folded.

    `blocks` are what else there is, after the pictures: tables of metrics.
    """

    title: str
    intro: str = ""
    warning: str = ""
    facts: Sequence[Fact] = ()
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
            yield block.Figures(
                [
                    block.Value(label=fact.label, value=fact.value, note=fact.note)
                    for fact in self.facts
                ]
            )
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


def _as_cell(cell: str | Cell) -> str | block.Cell:
    return block.Cell(value=cell.text, tone=cell.tone) if isinstance(cell, Cell) else cell
