"""What exporters share: the request, the report, and how they are found.

An exporter writes measurements as another tool's files. It runs on the caller's side, as importers
do: the rows come through `CatalogPort.read_measurements`, from a catalog here or a remote one.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pyarrow as pa

from foretoken.domain.errors import FieldViolation, InvalidRequestError, UnknownPluginError
from foretoken.domain.measurements.measurement import ArrowStream, MeasurementFilter, Run
from foretoken.domain.plugins import scan_modules
from foretoken.wire.arrow import open_stream


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRequest:
    """Where to write: a folder that is empty or not there yet.

    `selection` is the filter the rows were asked for with, `runs` the runs of the catalog; formats
    that have a place for where rows came from keep both.
    """

    path: Path
    options: Mapping[str, str] = field(default_factory=dict)
    selection: MeasurementFilter = field(default_factory=MeasurementFilter)
    runs: Sequence[Run] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport:
    """What was written. `notes` say what the format has no place for, for people."""

    files: tuple[str, ...]
    num_rows: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Exporter:
    """Writes one format. `save` takes rows in the stored schema as they come from the catalog.

    `narrow` may restrict what is read to what the format can hold, flagged rows included.
    """

    name: str
    summary: str
    save: Callable[[pa.RecordBatchReader, ExportRequest], ExportReport]
    narrow: Callable[[MeasurementFilter], MeasurementFilter] = lambda selection: selection
    options: Mapping[str, str] = field(default_factory=dict)

    def write(self, rows: ArrowStream, request: ExportRequest) -> ExportReport:
        """Write rows in the stored schema.

        Raises:
            InvalidRequestError: an option is unknown, the folder has content, or no row fits the
                format.

        """
        violations = [
            FieldViolation(f"options.{name}", f"{self.name} has {', '.join(self.options)}")
            for name in request.options
            if name not in self.options
        ]
        if request.path.exists() and (not request.path.is_dir() or any(request.path.iterdir())):
            violations.append(FieldViolation("path", f"{request.path} is not an empty folder"))
        if violations:
            raise InvalidRequestError.of_violations(violations, f"export {self.name}")
        return self.save(open_stream(rows), request)


class LeftOut:
    """Counts the rows that a format has no place for, by reason and by what they measure."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {}

    def add(self, reason: str, measured: str, num_rows: int) -> None:
        """Count rows; `measured` is their operator and what sets it apart."""
        if num_rows:
            self._counts.setdefault(reason, Counter())[measured] += num_rows

    def lines(self) -> tuple[str, ...]:
        """Return one line per reason, which names everything measured, the most rows first."""
        return tuple(
            f"{counts.total():,} rows left out, {reason}: "
            + ", ".join(f"{measured} {num_rows:,}" for measured, num_rows in counts.most_common())
            for reason, counts in self._counts.items()
        )


@cache
def all_exporters() -> dict[str, Exporter]:
    """Return every exporter by name: one file each in `exporters/`."""
    found = scan_modules("foretoken.catalog.exporters", "EXPORTER").values()
    return {exporter.name: exporter for exporter in found}


def find_exporter(name: str) -> Exporter:
    """Return the exporter of that name.

    Raises:
        UnknownPluginError: there is none; the message names the nearest.

    """
    return UnknownPluginError.look_up(name, all_exporters())
