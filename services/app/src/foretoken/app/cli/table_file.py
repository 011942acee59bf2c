"""Arrow tables written to the files users name, by the file's ending.

Arrow is imported where a table is written, which few commands are asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from foretoken.app.cli.state import check_output_path, parse_assignments

if TYPE_CHECKING:
    import pyarrow as pa

    from foretoken.domain.measurements.measurement import ArrowStream
    from foretoken.domain.results.report import Columns


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
