"""What a page is made of."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """One number to be seen first; `note` is its interval or what it means."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """An SVG element with a text that says what it shows."""

    svg: str
    caption: str
    title: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A cell of a table that stands out; its text must say why without its colour."""

    text: str
    tone: Literal["alert", "calm"]

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One part of a page. `warning` stands out; `listing` is long text that starts folded."""

    title: str
    intro: str = ""
    warning: str = ""
    facts: Sequence[Fact] = ()
    pictures: Sequence[Picture] = ()
    table: DataTable | None = None
    listing: str = ""
