"""Which files to read under a path, and what the side files say of them.

`data/<system>/<family>/<backend>/<version>/<table>.parquet`, in older releases
`data/<system>/<backend>/<version>/<table>.txt` with comma-separated values. Everything a row needs
stands in the file, so any folder above or below serves as well.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.catalog.importers.aiconfigurator.tables import READERS
from foretoken.catalog.importing import ImportNotes, ImportRequest
from foretoken.catalog.sources.content import parse_source_yaml
from foretoken.catalog.sources.file import read_source_file, refuse

_SUFFIXES = (".parquet", ".csv", ".txt")
_TABLE_END = "_perf"
_META = "collection_meta.yaml"
_REUSE = "reuse.yaml"
# Side files of older releases.
_OLD_REUSE = "SHARED_LAYER_REUSE.txt"
_OLD_PARTIAL = "INCOMPLETE.txt"


@dataclass(frozen=True, slots=True)
class TableFiles:
    """Files to read, in order, and what their side files say of how they were collected."""

    paths: tuple[Path, ...]
    environment: Mapping[str, str]


def find_tables(request: ImportRequest, notes: ImportNotes) -> TableFiles:
    """Return the tables under a path that an operator can hold; what else is there is noted.

    Raises:
        InvalidRequestError: a link leads out of the path, or a side file cannot be read.

    """
    if request.path.is_file():
        return TableFiles((request.path,) if _is_read(request.path, "", notes) else (), {})
    paths: list[Path] = []
    environment: dict[str, str] = {}
    for folder, names in _walk(request.path, notes):
        _note_side_files(folder, names, request, notes)
        if _META in names:
            environment |= _read_meta(folder / _META, request, notes)
        paths += [
            folder / name
            for name in names
            if _is_read(folder / name, _place(folder / name, request), notes)
        ]
    return TableFiles(tuple(paths), environment)


def _walk(root: Path, notes: ImportNotes) -> Iterator[tuple[Path, list[str]]]:
    """Yield every folder and its files in order; links are not followed."""
    for folder, folders, names in os.walk(root):
        folders.sort()
        links = [name for name in (*folders, *names) if (Path(folder) / name).is_symlink()]
        for name in links:
            link = Path(folder) / name
            if not link.resolve().is_relative_to(root.resolve()):
                refuse(link, f"leads out of {root}; copy what it names there")
            notes.add(link.relative_to(root).as_posix(), "a link, read where it leads")
        yield Path(folder), sorted(set(names) - set(links))


def _is_read(path: Path, place: str, notes: ImportNotes) -> bool:
    if path.suffix not in _SUFFIXES or not path.stem.endswith(_TABLE_END):
        return False
    if path.stem not in READERS:
        notes.add(place or path.name, f"{path.stem}: no operator here is what it measured")
        return False
    return True


def _note_side_files(
    folder: Path, names: list[str], request: ImportRequest, notes: ImportNotes
) -> None:
    """Say which tables another version lends and which are not complete.

    A table that is lent is recorded once, under the version it was measured with.
    """
    if _REUSE in names:
        source = read_source_file(folder / _REUSE, request.path)
        for entry in _mappings(parse_source_yaml(source, folder / _REUSE).get("reuse")):
            table, version = entry.get("table"), entry.get("from_version")
            notes.add(
                _place(folder / _REUSE, request),
                f"{table} is that of version {version}: no rows of its own",
            )
    if _OLD_REUSE in names:
        notes.add(
            _place(folder / _OLD_REUSE, request),
            "tables of other versions serve here: no rows of their own",
        )
    if _OLD_PARTIAL in names:
        notes.add(
            _place(folder / _OLD_PARTIAL, request), "the tables of this version are not complete"
        )


def _read_meta(path: Path, request: ImportRequest, notes: ImportNotes) -> dict[str, str]:
    meta = parse_source_yaml(read_source_file(path, request.path), path)
    tables = meta.get("tables")
    for table, found in (tables if isinstance(tables, Mapping) else {}).items():
        status = found.get("status") if isinstance(found, Mapping) else None
        if status not in (None, "complete"):
            notes.add(_place(path, request), f"{table} is {status}")
    provenance = meta.get("provenance")
    return {_place(path, request): f"provenance {provenance}"} if provenance else {}


def _place(path: Path, request: ImportRequest) -> str:
    return path.relative_to(request.path).as_posix()


def _mappings(found: Any) -> list[Mapping[str, Any]]:
    entries = found if isinstance(found, list) else []
    return [entry for entry in entries if isinstance(entry, Mapping)]
