"""Import NVIDIA AIConfigurator's performance database.

`systems/data/<system>/<family>/<backend>/<version>/*_perf.parquet`, or CSV in `*_perf.txt` without
the family in older releases; ms, message sizes in elements. Every row names device, engine, version
and kernel. Source: https://github.com/ai-dynamo/aiconfigurator, collector/ and systems/.
"""

from foretoken.catalog.importers.aiconfigurator.folder import find_tables
from foretoken.catalog.importers.aiconfigurator.perf_table import open_perf_table
from foretoken.catalog.importers.aiconfigurator.points import PointBatch
from foretoken.catalog.importers.aiconfigurator.tables import READERS
from foretoken.catalog.importing import (
    Importer,
    ImportNotes,
    ImportPlan,
    ImportRequest,
    build_plan,
)
from foretoken.catalog.sources.file import SourceFile


def _load(request: ImportRequest) -> ImportPlan:
    notes = ImportNotes()
    files = find_tables(request, notes)
    sources: list[SourceFile] = []
    batches: list[PointBatch] = []
    for path in files.paths:
        reader = READERS[path.stem]
        table = open_perf_table(path, request, notes, reader.required)
        sources.append(table.origin.source)
        for points in reader.read(table):
            batches += points.batches()
    return build_plan(
        "aiconfigurator", request, sources, batches, notes=notes, environment=files.environment
    )


IMPORTER = Importer(
    name="aiconfigurator",
    summary="AIConfigurator's systems folder, or any folder or table in it",
    load=_load,
)
