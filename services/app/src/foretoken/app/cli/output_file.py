"""Files that commands write: options that are checked early, pages, and Arrow tables by ending.

Arrow and what draws are imported where a file is written, which few commands are asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foretoken.app.cli.command_table import PAGE
from foretoken.app.cli.state import check_output_path, note, parse_assignments

if TYPE_CHECKING:
    import pyarrow as pa

    from foretoken.domain.measurements.measurement import ArrowStream
    from foretoken.domain.results.echo import Echo
    from foretoken.domain.results.report import Columns
    from foretoken.page.section import Section

Check = Callable[[Path | None], Path | None]
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
        InvalidRequestError: the package that draws is not here.

    """
    if path is None:
        return None
    from foretoken.page.picture import PICTURES, load_vega

    load_vega()
    return _check_ending(path, PICTURES)


def check_page_option(path: Path | None) -> Path | None:
    """Return the path of a page to write.

    Raises:
        typer.BadParameter: it cannot be written, or its ending is not that of a page.

    """
    return _check_ending(path, PAGES)


def _check_ending(path: Path | None, endings: Sequence[str]) -> Path | None:
    if path is not None and path.suffix not in endings:
        raise typer.BadParameter(f"{path} must end in {', '.join(endings[:-1])} or {endings[-1]}")
    return check_output_path(path)


def write_page(path: Path, title: str, sections: Sequence[Section], *echoes: Echo) -> None:
    """Write a page with the echoes of its answers, and say so."""
    # What draws pages takes longer to load than most commands that can write one need.
    from foretoken.simulator.report.page import render_page
    from foretoken.simulator.report.question import with_echo

    lines = (line for echo in echoes for line in echo.lines())
    page = render_page(title, with_echo(sections, lines))
    path.write_text(page, encoding="utf-8")
    note(f"page written to {path}")


def _write_parquet(table: pa.Table, path: str) -> None:
    from pyarrow import parquet

    parquet.write_table(table, path, compression="zstd")


def _write_csv(table: pa.Table, path: str) -> None:
    from pyarrow import csv

    csv.write_csv(table, path)


def _write_jsonl(table: pa.Table, path: str) -> None:
    with Path(path).open("w", encoding="utf-8") as file:
        for batch in table.to_batches():
            file.writelines(json.dumps(row) + "\n" for row in batch.to_pylist())


_WRITERS: Mapping[str, Callable[[pa.Table, str], None]] = {
    ".parquet": _write_parquet,
    ".csv": _write_csv,
    ".jsonl": _write_jsonl,
}


def check_table_path(path: Path) -> Path:
    """Return the path of a table to write, refused where its ending or folder cannot be used.

    Raises:
        typer.BadParameter: it has none of the endings that can be written, or cannot be written.

    """
    if path.suffix not in _WRITERS:
        raise typer.BadParameter(f"{path} must end in {', '.join(_WRITERS)}")
    check_output_path(path)
    return path


def check_table_option(path: Path | None) -> Path | None:
    """Check the path of an option that may be left out; see `check_table_path`."""
    return None if path is None else check_table_path(path)


def table_paths(words: Sequence[str], tables: Sequence[str]) -> dict[str, Path]:
    """Return `steps=FILE` words as paths by table.

    Raises:
        typer.BadParameter: no such table, or `check_table_path` refuses the file.

    """
    paths: dict[str, Path] = {}
    for name, file in parse_assignments(words).items():
        if name not in tables:
            raise typer.BadParameter(f"--table {name}: the tables are {', '.join(tables)}")
        paths[name] = check_table_path(Path(file))
    return paths


def write_table(table: pa.Table, path: Path) -> None:
    """Write a table as its file's ending says; `check_table_path` has let it pass."""
    _WRITERS[path.suffix](table, str(path))


def write_stream(stream: ArrowStream, path: Path) -> None:
    """Write what a service streams; see `write_table`."""
    from foretoken.wire.arrow import read_table

    write_table(read_table(stream), path)


def write_columns(columns: Columns, path: Path) -> None:
    """Write a frozen dataclass of columns; see `write_table`."""
    from foretoken.wire.ipc import record_to_table

    write_table(record_to_table(columns), path)
