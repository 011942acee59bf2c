"""The question of an answer, and what it rests on, below what a command prints."""

from rich.table import Table

from foretoken.app.cli.stack import stack
from foretoken.domain.results.echo import Echo


def with_echo(table: Table, *echoes: Echo) -> Table:
    """Return a table with the echoes of its answers below; what several say stands once."""
    lines = dict.fromkeys(line for echo in echoes for line in echo.lines())
    return stack(table, "", *lines) if lines else table
