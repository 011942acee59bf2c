"""The usual section of a page: a warning, words, figures, pictures, a table, and a folded listing.

`as_block` makes it a block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from foretoken.page import block
from foretoken.page.block import Chart, Table, Text, Value


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One part of a page. `warning` stands out; `listing` is long text that starts folded.

    `about` stands at the top of its page: the question, and what the answer rests on.
    """

    title: str
    intro: str = ""
    warning: str = ""
    facts: Sequence[Value] = ()
    pictures: Sequence[Chart] = ()
    table: Table | None = None
    listing: str = ""
    about: Sequence[tuple[str, str]] = ()

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
        if self.table:
            yield self.table
        if self.listing:
            yield block.Section("In full", [Text(self.listing, "code")], open=False)
