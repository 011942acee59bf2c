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

from foretoken.catalog.source_table import SourceFile
from foretoken.domain.errors import FieldViolation, InvalidRequestError, UnknownPluginError
from foretoken.domain.measurement import MeasurementBatch, Run, RunKind
from foretoken.domain.plugins import scan_modules

# Options every importer takes: what the files themselves cannot say.
_SHARED_OPTIONS = {
    "source": "where the files come from, kept with the run",
    "licence": "the licence of the files, kept with the run",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportRequest:
    """What to import: a file or folder, narrowed to a device, topology or model where given."""

    path: Path
    device: str = ""
    topology: str = ""
    model: str = ""
    options: Mapping[str, str] = field(default_factory=dict)


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

    def read(self, request: ImportRequest) -> ImportPlan:
        """Return what the files say, as rows of the catalog.

        Raises:
            InvalidRequestError: a path, option, file or cell cannot be used; names which.
            UnknownDeviceError, UnknownTopologyError, UnknownModelError: the files need one that
                has no file here.

        """
        known = {**_SHARED_OPTIONS, **self.options}
        violations = [
            FieldViolation(f"options.{name}", f"{self.name} has {', '.join(known)}")
            for name in request.options
            if name not in known
        ]
        if not request.path.exists():
            violations.append(FieldViolation("path", f"{request.path} does not exist"))
        if violations:
            raise InvalidRequestError.of_violations(violations, f"import {self.name}")
        return self.load(request)


class ImportNotes:
    """What an importer did not read, or read with a doubt; the same remark once for all files."""

    def __init__(self) -> None:
        self._places: dict[str, list[str]] = {}

    def add(self, place: str, text: str) -> None:
        """Remark on a file or folder."""
        self._places.setdefault(text, []).append(place)

    def lines(self) -> tuple[str, ...]:
        """Return one line per remark."""
        return tuple(
            f"{places[0]}{f' and {len(places) - 1} more' if len(places) > 1 else ''}: {text}"
            for text, places in self._places.items()
        )


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
        reasons = "; ".join(notes.lines()) or "no file of this format"
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


def _hash_of(tool: str, request: ImportRequest, sources: Sequence[SourceFile]) -> str:
    # The files by content, not by the folder they lie in on this machine.
    said = {
        "tool": tool,
        "files": sorted((source.name, source.content_hash) for source in sources),
        "device": request.device,
        "topology": request.topology,
        "model": request.model,
        "options": dict(sorted(request.options.items())),
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
