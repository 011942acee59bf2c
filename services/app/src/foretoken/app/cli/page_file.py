"""A page of a simulation or a search in a file."""

from collections.abc import Sequence
from pathlib import Path

from foretoken.app.cli.state import note
from foretoken.page.section import Section


def write_page(path: Path, title: str, sections: Sequence[Section]) -> None:
    """Write a page, and say so."""
    # What draws pages takes longer to load than most commands that can write one need.
    from foretoken.simulator.report.page import render_page

    path.write_text(render_page(title, sections), encoding="utf-8")
    note(f"page written to {path}")
