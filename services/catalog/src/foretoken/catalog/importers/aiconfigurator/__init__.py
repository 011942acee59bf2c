"""Import NVIDIA AIConfigurator's performance database.

`systems/data/<system>/<family>/<backend>/<version>/*_perf.parquet`, or CSV in `*_perf.txt` without
the family in older releases; ms, message sizes in elements. Every row has device, engine, version
and kernel, from its columns or its folders. One table is in memory at a time; what of it cannot be
read is left out and noted, the rest goes in.
Source: https://github.com/ai-dynamo/aiconfigurator, collector/ and systems/.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from foretoken.catalog.importers.aiconfigurator.folder import TableFile, find_tables, keep_raw
from foretoken.catalog.importers.aiconfigurator.perf_table import Place, open_perf_table
from foretoken.catalog.importers.aiconfigurator.points import PointBatch
from foretoken.catalog.importers.aiconfigurator.tables import READERS
from foretoken.catalog.importing import (
    Importer,
    ImportNotes,
    ImportPlan,
    ImportRequest,
    TableStream,
    build_plan,
)
from foretoken.catalog.sources.file import DEFAULT_MAX_BYTES, limit_reading, refuse
from foretoken.catalog.sources.tree import SourceTree
from foretoken.domain.errors import ForetokenError


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
