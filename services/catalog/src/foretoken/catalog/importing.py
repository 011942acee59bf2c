"""What importers share: the request, the plan, and how they are found.

An importer turns another tool's files into a run of the catalog. It runs on the caller's side: the
plan's batches travel through `CatalogPort.record`, to a catalog in this process or a remote one.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
from foretoken.domain.measurements.measurement import MeasurementBatch, Run, RunKind
from foretoken.domain.models.architecture import find_model
from foretoken.domain.plugins import scan_modules

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


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportPlan:
    """Everything an import will record; nothing of it is stored yet.

    `notes` say what was left out and why, for people.
    """

    run: Run
    batches: tuple[MeasurementBatch, ...]
    num_rows: int
    notes: tuple[str, ...] = ()


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
    """What an importer did not read, or read and flagged; the same remark once for all files."""

    def __init__(self) -> None:
        self._places: dict[str, dict[str, None]] = {}

    def add(self, place: str, text: str) -> None:
        """Remark on a file or folder; the same remark on it again counts once."""
        self._places.setdefault(text, {})[place] = None

    def lines(self) -> tuple[str, ...]:
        """Return one line per remark."""
        return tuple(f"{_say_places([*places])}: {text}" for text, places in self._places.items())


def _say_places(places: Sequence[str]) -> str:
    return f"{places[0]} and {len(places) - 1} more" if len(places) > 1 else places[0]


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
    tables: Iterable[pa.Table],
    *,
    notes: ImportNotes,
    environment: Mapping[str, str] | None = None,
) -> ImportPlan:
    """Return the plan of an import: a batch for every table that has rows.

    The run's id follows from the files and the request, so importing them again changes nothing.

    Raises:
        InvalidRequestError: there is no row at all.

    """
    batches = [table for table in tables if table.num_rows]
    num_rows = sum(table.num_rows for table in batches)
    if not num_rows:
        reasons = "; ".join((*notes.lines(), _say_nothing_found(tool, request)))
        raise InvalidRequestError.of_field(
            "path", f"nothing to import in {request.path}: {reasons}"
        )
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
    return ImportPlan(
        run=run,
        batches=tuple(
            MeasurementBatch(batch_index=index, rows=table, is_last=index == len(batches) - 1)
            for index, table in enumerate(batches)
        ),
        num_rows=num_rows,
        notes=notes.lines(),
    )


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
