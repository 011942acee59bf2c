"""Options that name the file of a picture or a page: refused before anything is computed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer

from foretoken.app.cli.lazy_group import PAGE
from foretoken.app.cli.state import check_output_path

Check = Callable[[Path | None], Path | None]
PICTURES = (".png", ".svg", ".pdf")
PAGES = (".html", ".htm")


def page_option(
    *aliases: str,
    panel: str | None = None,
    text: str = "Write a page with pictures here (HTML).",
    check: Check = check_output_path,
) -> Any:
    """Return the option `--page` of a command; its aliases are read, and not in the help."""
    return typer.Option(PAGE, *aliases, help=text, callback=check, rich_help_panel=panel)


def check_picture_option(path: Path | None) -> Path | None:
    """Return the path of a picture to write.

    Raises:
        typer.BadParameter: it cannot be written, or its ending is no format of pictures.

    """
    return _check_ending(path, PICTURES)


def check_page_option(path: Path | None) -> Path | None:
    """Return the path of a page to write.

    Raises:
        typer.BadParameter: it cannot be written, or its ending is not that of a page.

    """
    return _check_ending(path, PAGES)


def check_page_or_drawing_option(path: Path | None) -> Path | None:
    """Return the path of a page to write, or of its picture alone.

    Raises:
        typer.BadParameter: it cannot be written, or its ending is that of neither.

    """
    return _check_ending(path, (*PAGES, ".svg"))


def _check_ending(path: Path | None, endings: Sequence[str]) -> Path | None:
    if path is not None and path.suffix not in endings:
        raise typer.BadParameter(f"{path} must end in {', '.join(endings[:-1])} or {endings[-1]}")
    return check_output_path(path)
