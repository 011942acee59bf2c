"""Tables and remarks below each other, as one result."""

from rich.table import Table
from rich.text import Text


def stack(*parts: Table | str) -> Table:
    """Return the parts below each other; a blank line sets a table off from what is above it."""
    grid = Table.grid()
    for index, part in enumerate(parts):
        if index and isinstance(part, Table):
            grid.add_row("")
        grid.add_row(Text(part) if isinstance(part, str) else part)
    return grid
