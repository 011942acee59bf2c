"""What a test of a review is, and what it finds."""

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from foretoken.catalog.dims import Indices
from foretoken.catalog.quality.stored_row import StoredRows
from foretoken.domain.plugins import scan_modules


class Judges(enum.Enum):
    """Whether a test flags tables as a whole or rows among their neighbours.

    Rows of a flagged table are no neighbours: tables are judged first.
    """

    TABLES = 1
    ROWS = 2


@dataclass(frozen=True, slots=True)
class FlaggedRows:
    """Places of flagged rows, with an explanation for each or one for all."""

    places: Indices
    explanations: Sequence[str] | str

    def explain(self, index: int) -> str:
        """Return the explanation of one place."""
        found = self.explanations
        return found if isinstance(found, str) else found[index]


@dataclass(frozen=True, kw_only=True, slots=True)
class QualityTest:
    """One way to find rows that do not fit. Its name is the flag's, `name: explanation`."""

    name: str
    summary: str
    judges: Judges
    find: Callable[[StoredRows], Iterator[FlaggedRows]]


@cache
def all_tests() -> tuple[QualityTest, ...]:
    """Return every test, those of tables first: one file each in `quality/tests`."""
    found = scan_modules("foretoken.catalog.quality.tests", "TEST").values()
    return tuple(sorted(found, key=lambda test: (test.judges.value, test.name)))
