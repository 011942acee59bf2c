"""What a page is made of."""

from collections.abc import Sequence
from dataclasses import dataclass


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


@dataclass(frozen=True, kw_only=True, slots=True)
class DataTable:
    """A table; the first column names the rows."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]


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
