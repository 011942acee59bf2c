"""A written page of 10^5 points and rows, to be looked at in a browser."""

from foretoken.page.block import Column, Page, Table
from foretoken.page.chart import Plot
from foretoken.page.html import render

NUM_MANY = 100_000


def render_many() -> str:
    """Return a page with a chart of so many points, and their table."""
    columns = [Column.words("name"), Column(title="x"), Column(title="y"), Column.words("group")]
    # Fills the plane evenly: the multiples of two roots, less their whole parts.
    rows = [(f"row {n}", n * 2**0.5 % 1, n * 3**0.5 % 1, f"group {n % 3}") for n in range(NUM_MANY)]
    table = Table(columns=columns, rows=rows)
    chart = Plot(title="Many", table=table, x="x", y="y", by="group").scatter()
    return render(Page(title="Many", blocks=[chart, table]))
