"""Import NVIDIA AIConfigurator's performance database.

`systems/data/<system>/<family>/<backend>/<version>/*_perf.parquet`, or CSV in `*_perf.txt` without
the family in older releases, in a folder or in the wheel; ms, message sizes in elements. Every row
has device, engine, version and kernel, from its columns or its folders. One table is in memory at a
time; what of it cannot be read is left out and noted, the rest goes in.
Source: https://github.com/ai-dynamo/aiconfigurator, collector/ and systems/.
"""

import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from foretoken.catalog.importers.aiconfigurator.formats import LIBRARIES
from foretoken.catalog.importers.aiconfigurator.perf_table import Place, open_perf_table
from foretoken.catalog.importers.aiconfigurator.points import PointBatch
from foretoken.catalog.importers.aiconfigurator.tables import READERS
from foretoken.catalog.importing import (
    Importer,
    ImportNotes,
    ImportPlan,
    ImportRequest,
    RawTable,
    TableStream,
    build_plan,
)
from foretoken.catalog.sources.content import parse_source_yaml
from foretoken.catalog.sources.file import DEFAULT_MAX_BYTES, SourceFile, limit_reading, refuse
from foretoken.catalog.sources.tree import SourceTree
from foretoken.domain.alias import canonical_device
from foretoken.domain.errors import ForetokenError, InvalidRequestError
from foretoken.domain.name import text_to_name

_SUFFIXES = (".parquet", ".csv", ".txt")
_TABLE_END = "_perf"
_META = "collection_meta.yaml"
_REUSE = "reuse.yaml"
# Side files of older releases, and what they say.
_OLD = {
    "SHARED_LAYER_REUSE.txt": "tables of other versions serve here: no rows of their own",
    "INCOMPLETE.txt": "the tables of this version are not complete",
}


@dataclass(frozen=True, slots=True)
class TableFile:
    """A table without its content; `is_raw` if no operator here is what it measured."""

    source: SourceFile
    path: Path
    num_rows: int
    is_raw: bool


def find_tables(
    tree: SourceTree, request: ImportRequest, notes: ImportNotes
) -> tuple[Sequence[TableFile], Mapping[str, str]]:
    """Return the tables of a path that are wanted, and what side files say of them.

    What cannot be read is noted.
    """
    environment: dict[str, str] = {}
    tables: dict[tuple[str, str], TableFile] = {}
    for link in tree.links:
        notes.add(link, "a link, read where it leads")
    for name in tree.names:
        path = tree.path(name)
        if not is_wanted(Place.of(path), request):
            continue
        try:
            if path.suffix not in _SUFFIXES or not path.stem.endswith(_TABLE_END):
                environment |= _read_side_file(tree, name, notes)
                continue
            table = _look_at(tree, name)
        except InvalidRequestError as err:
            notes.add(name, f"not read: {err.message}")
            continue
        twin = tables.setdefault((path.stem, table.source.content_hash), table)
        if twin is not table:
            notes.add(name, f"the same file as {twin.source.name}")
        elif table.is_raw:
            notes.add(name, f"{path.stem}: no operator here is what it measured, kept as it is")
    return tuple(tables.values()), environment


def keep_raw(tree: SourceTree, table: TableFile) -> RawTable:
    """Return a table as it is to be kept."""
    place, stem, source = Place.of(table.path), table.path.stem, table.source
    facts: dict[str, str | int] = {
        "tool": "aiconfigurator",
        "table": stem,
        "device": place.device,
        "framework": place.framework,
        "framework_version": place.version,
        "source_file": source.name,
        "num_rows": table.num_rows,
    }
    return RawTable(
        num_rows=table.num_rows,
        name=f"{text_to_name(f'{place.device}.{stem}')}.{source.content_hash[:16]}",
        content_hash=source.content_hash,
        facts=facts,
        read=lambda: tree.read(source.name).content,
    )


def is_wanted(place: Place, request: ImportRequest) -> bool:
    """Return whether a table may have rows that are asked for, as far as its folders say."""
    engines = [word for word in request.options.get("engines", "").split(",") if word]
    systems = [request.device, *request.options.get("systems", "").split(",")]
    devices = {canonical_device(name) for name in systems if name}
    if devices and place.device and place.device not in devices:
        return False
    if not engines or not place.framework or place.framework in LIBRARIES:
        return True
    return not {place.framework, f"{place.framework}/{place.version}"}.isdisjoint(engines)


def _look_at(tree: SourceTree, name: str) -> TableFile:
    source, path = tree.read(name), tree.path(name)
    if path.suffix == ".parquet":
        try:
            num_rows = int(parquet.read_metadata(io.BytesIO(source.content)).num_rows)
        except (pa.ArrowException, OSError) as err:
            refuse(path, f"not a Parquet file: {err}")
    else:
        num_rows = max(source.content.count(b"\n") - 1, 0)
    return TableFile(replace(source, content=b""), path, num_rows, path.stem not in READERS)


def _read_side_file(tree: SourceTree, name: str, notes: ImportNotes) -> Mapping[str, str]:
    """Note which tables another version lends and which are not complete; return provenance.

    A table that is lent is recorded once, under the version it was measured with.
    """
    kind = PurePosixPath(name).name
    if kind in _OLD:
        notes.add(name, _OLD[kind])
    if kind not in (_REUSE, _META):
        return {}
    content = parse_source_yaml(tree.read(name), tree.path(name))
    if kind == _REUSE:
        for entry in _mappings(content.get("reuse")):
            table, version = entry.get("table"), entry.get("from_version")
            notes.add(name, f"{table} is that of version {version}: no rows of its own")
        return {}
    tables = content.get("tables")
    for table, found in (tables if isinstance(tables, Mapping) else {}).items():
        status = found.get("status") if isinstance(found, Mapping) else None
        if status not in (None, "complete"):
            notes.add(name, f"{table} is {status}")
    provenance = content.get("provenance")
    return {name: f"provenance {provenance}"} if provenance else {}


def _mappings(found: Any) -> Sequence[Mapping[str, Any]]:
    entries = found if isinstance(found, list) else []
    return [entry for entry in entries if isinstance(entry, Mapping)]


def _load(request: ImportRequest) -> ImportPlan:
    notes = ImportNotes()
    tree = SourceTree.open(request.path)
    tables, environment = find_tables(tree, request, notes)
    archive = {"archive_sha256": tree.archive_hash} if tree.archive_hash else {}
    num_rows = sum(table.num_rows for table in tables)
    mapped = [table for table in tables if not table.is_raw]
    plan = build_plan(
        "aiconfigurator",
        request,
        [table.source for table in tables],
        TableStream(_read_tables(tree, mapped, request, notes), num_rows),
        notes=notes,
        environment={**archive, **environment},
    )
    raw_tables = tuple(keep_raw(tree, table) for table in tables if table.is_raw)
    device_rows: Counter[str] = Counter()
    for table in tables:
        device_rows[Place.of(table.path).device or "unnamed"] += table.num_rows
    return replace(plan, raw_tables=raw_tables, device_rows=device_rows)


def _read_tables(
    tree: SourceTree, tables: Sequence[TableFile], request: ImportRequest, notes: ImportNotes
) -> Iterator[PointBatch]:
    """Yield the rows of one table after the other, of each all that can be or none."""
    max_bytes = int(request.options.get("max_bytes", DEFAULT_MAX_BYTES))
    for table in tables:
        try:
            with limit_reading(max_bytes):
                batches = _read_table(tree, table, request, notes)
        except ForetokenError as err:
            notes.leave_out(table.source.name, table.num_rows, err.message)
        else:
            yield from batches


def _read_table(
    tree: SourceTree, table: TableFile, request: ImportRequest, notes: ImportNotes
) -> list[PointBatch]:
    source = tree.read(table.source.name)
    if source.content_hash != table.source.content_hash:
        refuse(table.path, "changed while it was imported")
    reader = READERS[table.path.stem]
    opened = open_perf_table(source, table.path, reader.required, request, notes)
    return [batch for points in reader.read(opened) for batch in points.batches()]


IMPORTER = Importer(
    name="aiconfigurator",
    summary="AIConfigurator's systems folder or wheel, or any folder or table in it",
    load=_load,
    options={
        "systems": "only these devices, a comma between them",
        "engines": "only these, a comma between them: `vllm`, or `vllm/0.24.0` for one version",
    },
)
