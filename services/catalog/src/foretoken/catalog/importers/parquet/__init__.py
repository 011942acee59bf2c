"""Import a dataset that the exporter of this name wrote: Parquet files with a manifest.

See `dataset.py` for the layout. Every file must be as it was written. The rows become one import,
with the flags they had; only a check of the catalog judges them together with what is here.
What the manifest says of the runs that brought them is kept in its environment under the ids of
these runs, and the id of its run before the name of the file that a row is from.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foretoken.catalog.dataset import (
    DATASET_TOOL,
    MANIFEST_NAME,
    READABLE_VERSIONS,
    DatasetFile,
    DatasetManifest,
)
from foretoken.catalog.dims import Mask, places_to_dims
from foretoken.catalog.importers.parquet.dataset_reader import DatasetReader, check_listing
from foretoken.catalog.importing import (
    Importer,
    ImportNotes,
    ImportPlan,
    ImportRequest,
    build_plan,
)
from foretoken.catalog.reading.content import ContentHash
from foretoken.catalog.sources.content import parse_source_json
from foretoken.catalog.sources.file import SourceFile, limit_reading, read_source_file, refuse
from foretoken.domain import schema
from foretoken.domain.measurements.measurement import Run
from foretoken.wire.arrow import MEASUREMENT_SCHEMA

_BATCH_ROWS = 100_000
# Bytes that were accepted once are accepted again.
_UNLIMITED = 2**63 - 1


def _load(request: ImportRequest) -> ImportPlan:
    root = request.path
    source, manifest = _read_manifest(root)
    check_listing(root, manifest.files)
    reader = DatasetReader(root, manifest)
    content = ContentHash()
    pieces = []
    for entry in manifest.files:
        for group in range(reader.count_groups(entry)):
            rows = reader.read_group(entry, group)
            content.add(rows)
            num_wanted = int(np.count_nonzero(_is_wanted(rows, request)))
            pieces.append(_Piece(entry, group, num_wanted))
    reader.close()
    if (content.hexdigest(), content.num_rows) != (manifest.content_hash, manifest.num_rows):
        refuse(root, f"its rows are not those that {MANIFEST_NAME} was written for")
    plan = build_plan(
        DATASET_TOOL,
        request,
        [source],
        [_LazyRows(reader, batch, request) for batch in _group_pieces(pieces)],
        notes=ImportNotes(),
        environment=_join_environments(manifest.runs),
    )
    return replace(plan, run=_with_origin(plan.run, manifest.runs))


def _read_manifest(root: Path) -> tuple[SourceFile, DatasetManifest]:
    path = root / MANIFEST_NAME
    if not path.is_file():
        refuse(
            root,
            f"has no {MANIFEST_NAME}, so it is no dataset that was exported here; other Parquet "
            "files have other importers",
        )
    source = read_source_file(path, root)
    content = parse_source_json(source, path)
    version = content.get("version") if isinstance(content, dict) else None
    if version not in READABLE_VERSIONS:
        known = " and ".join(map(str, READABLE_VERSIONS))
        refuse(path, f"is of version {version}, this program reads {known}")
    return replace(source, content=b""), schema.decode(DatasetManifest, content, path.name)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A row group, and how many of its rows are asked for."""

    entry: DatasetFile
    group: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class _LazyRows:
    """A batch in the measurement schema that is read when it is recorded."""

    reader: DatasetReader
    pieces: Sequence[_Piece]
    request: ImportRequest

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return sum(piece.num_rows for piece in self.pieces)

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Read the rows."""
        tables = []
        with limit_reading(_UNLIMITED):
            for piece in self.pieces:
                rows = self.reader.read_group(piece.entry, piece.group)
                wanted = rows.filter(pa.array(_is_wanted(rows, self.request)))
                tables.append(_to_measurements(wanted))
        stream: object = pa.concat_tables(tables).__arrow_c_stream__(requested_schema)
        return stream


def _group_pieces(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Yield small pieces together, so that many small files are few batches."""
    batch: list[_Piece] = []
    num_rows = 0
    for piece in pieces:
        if batch and num_rows + piece.num_rows > _BATCH_ROWS:
            yield batch
            batch, num_rows = [], 0
        if piece.num_rows:
            batch.append(piece)
            num_rows += piece.num_rows
    if batch:
        yield batch


def _is_wanted(rows: pa.RecordBatch, request: ImportRequest) -> Mask:
    is_wanted = np.ones(rows.num_rows, dtype=bool)
    for name in ("device", "topology", "model"):
        if value := getattr(request, name):
            is_equal = pc.fill_null(pc.equal(rows.column(name), value), fill_value=False)
            is_wanted &= is_equal.to_numpy(zero_copy_only=False)
    return is_wanted


def _to_measurements(rows: pa.RecordBatch) -> pa.Table:
    columns = dict(zip(rows.schema.names, rows.columns, strict=True))
    columns["dims"] = places_to_dims(columns["operator"], columns)
    columns["source_file"] = pc.binary_join_element_wise(
        columns["run_id"], columns["source_file"], "/", null_handling="skip"
    )
    arrays = [columns[field.name].cast(field.type) for field in MEASUREMENT_SCHEMA]
    return pa.table(arrays, schema=MEASUREMENT_SCHEMA)


def _with_origin(run: Run, origins: Sequence[Run]) -> Run:
    """Return the run with sources and licences, unless the request says them."""
    return replace(
        run,
        source=run.source or _join_distinct([origin.source for origin in origins]),
        licence=run.licence or _join_distinct([origin.licence for origin in origins]),
    )


def _join_distinct(texts: Sequence[str]) -> str:
    return "; ".join(dict.fromkeys(text for text in texts if text))


def _join_environments(origins: Sequence[Run]) -> dict[str, str]:
    """Return what all runs say alike, and under each run's id the rest of what is said of it."""
    shared = dict(origins[0].environment) if origins else {}
    for origin in origins:
        shared = {
            key: value for key, value in shared.items() if origin.environment.get(key) == value
        }
    found = dict(shared)
    for origin in origins:
        said = {key: value for key, value in schema.encode(origin).items() if value}
        del said["run_id"]
        own = {k: v for k, v in origin.environment.items() if k not in shared}
        found[origin.run_id] = json.dumps({**said, "environment": own}, sort_keys=True)
    return found


IMPORTER = Importer(
    name=DATASET_TOOL,
    summary="a dataset as `export parquet` writes it: Parquet files with a manifest",
    load=_load,
)
