"""What importers share: the request, the plan, and how they are found.

An importer turns another tool's files into a run of the catalog. It runs on the caller's side: the
plan's batches travel through `CatalogPort.record`, to a catalog in this process or a remote one.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import pyarrow as pa

from foretoken.catalog.sources.file import DEFAULT_MAX_BYTES, SourceFile, limit_reading
from foretoken.domain.alias import settle_devices, settle_model
from foretoken.domain.errors import (
    FieldViolation,
    InvalidRequestError,
    UnknownModelError,
    UnknownPluginError,
)
from foretoken.domain.measurements.measurement import Artifact, MeasurementBatch, Run, RunKind
from foretoken.domain.models.architecture import find_model
from foretoken.domain.plugins import scan_modules
from foretoken.domain.ports import CatalogPort

# Options every importer takes: what the files themselves cannot say.
_SHARED_OPTIONS = {
    "source": "where the files come from, kept with the run",
    "licence": "the licence of the files, kept with the run",
    "max_bytes": f"the most to read and unpack of them all, {DEFAULT_MAX_BYTES} unless said",
}
# How an import is carried out, which does not change what it brings.
_SILENT_OPTIONS = frozenset({"max_bytes"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportRequest:
    """What to import: a file or folder, narrowed to a device, topology or model where given."""

    path: Path
    device: str = ""
    topology: str = ""
    model: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Put own names in place of other names of the device and the model."""
        settle_devices(self, "device")
        settle_model(self, "model")


# The kind of the artifacts that `RawTable` are kept as.
RAW_TABLE = "raw_table"


@dataclass(frozen=True, kw_only=True, slots=True)
class RawTable:
    """A table that no operator here is what it measured, kept as the file it is.

    `facts` say what it holds: table, device, framework, version, rows.
    """

    name: str
    num_rows: int
    content_hash: str
    facts: Mapping[str, str | int]
    read: Callable[[], bytes]

    def store(self, catalog: CatalogPort) -> None:
        """Keep the file in a catalog; once more changes nothing."""
        content = self.read()
        artifact = Artifact(
            kind=RAW_TABLE,
            name=self.name,
            content_hash=self.content_hash,
            num_bytes=len(content),
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            metadata_json=json.dumps(self.facts, sort_keys=True),
        )
        catalog.store_artifact(artifact, [content])


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportPlan:
    """Everything an import will record; nothing of it is stored yet.

    `batches` may be read as they are asked for, once; of the `num_rows` of the files some are then
    left out. `remarks` say which and why, for people, when the batches are read. `device_rows` are
    the rows of the files by device, where their folders say.
    """

    run: Run
    batches: Iterable[MeasurementBatch]
    num_rows: int
    remarks: "ImportNotes"
    raw_tables: tuple[RawTable, ...] = ()
    device_rows: Mapping[str, int] = field(default_factory=dict)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out up to now and why, a line each."""
        return self.remarks.lines()


@dataclass(frozen=True, kw_only=True, slots=True)
class Importer:
    """Reads one format. `load` parses and checks every file before it returns."""

    name: str
    summary: str
    load: Callable[[ImportRequest], ImportPlan]
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def all_options(self) -> Mapping[str, str]:
        """What each option says: the format's own, then those that every importer takes."""
        return {**self.options, **_SHARED_OPTIONS}

    def read(self, request: ImportRequest) -> ImportPlan:
        """Return what the files say, as rows of the catalog.

        Raises:
            InvalidRequestError: a path, option, file or cell cannot be used; names which.
            UnknownDeviceError, UnknownTopologyError, UnknownModelError: the files need one that
                has no file here.

        """
        violations = [
            FieldViolation(f"options.{name}", f"{self.name} has {', '.join(self.all_options)}")
            for name in request.options
            if name not in self.all_options
        ]
        if not request.path.exists():
            violations.append(FieldViolation("path", f"{request.path} does not exist"))
        max_bytes = request.options.get("max_bytes", str(DEFAULT_MAX_BYTES))
        if not (max_bytes.isascii() and max_bytes.isdigit()):
            violations.append(FieldViolation("options.max_bytes", f"{max_bytes!r} is no count"))
        if violations:
            raise InvalidRequestError.of_violations(violations, f"import {self.name}")
        with limit_reading(int(max_bytes)):
            return self.load(request)


class ImportNotes:
    """What an importer did not read, or read and flagged; the same remark once for all files.

    `num_passed` rows were looked at and are not recorded.
    """

    def __init__(self) -> None:
        self._rows_by_place: dict[str, dict[str, int]] = {}
        self.num_passed = 0

    def add(self, place: str, text: str) -> None:
        """Remark on a file or folder; the same remark on it again counts once."""
        self._rows_by_place.setdefault(text, {})[place] = 0

    def leave_out(self, place: str, num_rows: int, reason: str) -> None:
        """Remark on rows of a file that are not recorded."""
        if num_rows:
            rows = self._rows_by_place.setdefault(reason, {})
            rows[place] = rows.get(place, 0) + num_rows
            self.num_passed += num_rows

    def lines(self) -> tuple[str, ...]:
        """Return one line per remark."""
        return tuple(
            f"{_say_places([*rows])}: {_say_rows(sum(rows.values()))}{text}"
            for text, rows in self._rows_by_place.items()
        )


def _say_places(places: Sequence[str]) -> str:
    return f"{places[0]} and {len(places) - 1} more" if len(places) > 1 else places[0]


def _say_rows(num_rows: int) -> str:
    return f"{num_rows:,} rows are not read: " if num_rows else ""


def name_model(own_name: str) -> str:
    """Return what rows call a model: its preset's name where there is one, else the source's."""
    try:
        return find_model(own_name).name
    except UnknownModelError:
        return own_name


@cache
def all_importers() -> dict[str, Importer]:
    """Return every importer by name: one file each in `importers/`."""
    found = scan_modules("foretoken.catalog.importers", "IMPORTER").values()
    return {importer.name: importer for importer in found}


def find_importer(name: str) -> Importer:
    """Return the importer of that name.

    Raises:
        UnknownPluginError: there is none; the message names the nearest.

    """
    return UnknownPluginError.look_up(name, all_importers())


def build_plan(
    tool: str,
    request: ImportRequest,
    sources: Sequence[SourceFile],
    tables: "Iterable[pa.Table] | TableStream",
    *,
    notes: ImportNotes,
    environment: Mapping[str, str] | None = None,
) -> ImportPlan:
    """Return the plan of an import: a batch for every table that has rows.

    The run's id follows from the files and the request, so importing them again changes nothing.

    Raises:
        InvalidRequestError: there is no row at all; of a stream, as far as its files say.

    """
    if not isinstance(tables, TableStream):
        tables = [table for table in tables if table.num_rows]
    num_rows = sum(t.num_rows for t in tables) if isinstance(tables, list) else tables.num_rows
    if not num_rows:
        raise _nothing_found(tool, request, notes)
    content_hash = _hash_of(tool, request, sources)
    run = Run(
        run_id=f"{tool}-{content_hash[:16]}",
        kind=RunKind.IMPORT,
        tool=tool,
        content_hash=content_hash,
        source=request.options.get("source", ""),
        licence=request.options.get("licence", ""),
        environment=environment or {},
    )
    batches = _number(tables, lambda: _nothing_found(tool, request, notes))
    return ImportPlan(
        run=run,
        batches=batches if isinstance(tables, TableStream) else tuple(batches),
        num_rows=num_rows,
        remarks=notes,
    )


@dataclass(frozen=True, slots=True)
class TableStream:
    """Tables that are read as they are asked for, once; their files hold `num_rows` in all."""

    tables: Iterator[pa.Table]
    num_rows: int

    def __iter__(self) -> Iterator[pa.Table]:
        """Read them."""
        return self.tables


def _number(
    tables: Iterable[pa.Table], explain: Callable[[], InvalidRequestError]
) -> Iterator[MeasurementBatch]:
    """Yield a batch for every table that has rows, each when it is known whether it is the last."""
    last: MeasurementBatch | None = None
    for index, table in enumerate(table for table in tables if table.num_rows):
        if last is not None:
            yield last
        last = MeasurementBatch(batch_index=index, rows=table)
    if last is None:
        raise explain()
    yield replace(last, is_last=True)


def _nothing_found(tool: str, request: ImportRequest, notes: ImportNotes) -> InvalidRequestError:
    reasons = "; ".join((*notes.lines(), _say_nothing_found(tool, request)))
    return InvalidRequestError.of_field("path", f"nothing to import in {request.path}: {reasons}")


def _say_nothing_found(tool: str, request: ImportRequest) -> str:
    importer = all_importers().get(tool)
    expected = f" ({importer.summary})" if importer else ""
    asked = " ".join(filter(None, (request.device, request.topology, request.model)))
    return f"no file with rows in this format{expected}{f' of {asked}' if asked else ''}"


def _hash_of(tool: str, request: ImportRequest, sources: Sequence[SourceFile]) -> str:
    # The files by content, not by the folder they lie in on this machine.
    said = {
        "tool": tool,
        "files": sorted((source.name, source.content_hash) for source in sources),
        "device": request.device,
        "topology": request.topology,
        "model": request.model,
        "options": {
            name: value
            for name, value in sorted(request.options.items())
            if name not in _SILENT_OPTIONS
        },
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
