"""Export FASOP's profile database: `{model}_{gpu}_{tp}.npz`.

Rows that came from FASOP profiles go back to their tables. With a model and a sequence length,
tables are also composed of operators measured alone, where a whole layer is covered.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from foretoken.catalog.exporters.fasop.composed import LayerPlan, MeasuredPoints
from foretoken.catalog.exporters.fasop.table import ProfileTable, TableKey, write_tables
from foretoken.catalog.exporting import Exporter, ExportReport, ExportRequest, LeftOut
from foretoken.catalog.importers.fasop.profile_rows import COLUMNS, KERNEL_PREFIX
from foretoken.catalog.importing import ImportNotes
from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.measurements.measurement import MeasurementFilter
from foretoken.domain.models.architecture import find_model
from foretoken.domain.operators.spec.variant import parse_variant
from foretoken.domain.units import US_PER_MS

Row = Mapping[str, Any]

_KERNELS = {column.kernel: column for column in COLUMNS}
_COMPOSITE = "composite: "
_TABLE_ENDING = ".npz"


@dataclass(frozen=True, kw_only=True, slots=True)
class _SourceFile:
    """A file of a run, its rows, and what only the composite ones of them say."""

    name: str
    rows: Sequence[Row]
    says: Mapping[str, str]

    @property
    def key(self) -> TableKey:
        return TableKey(self.rows[0]["model"], self.rows[0]["device"], int(self.says["tp"]))

    @property
    def assumed(self) -> tuple[str, str]:
        return self.says["seq_len"], self.rows[0]["dtype"]

    @property
    def is_table(self) -> bool:
        return self.name.endswith(_TABLE_ENDING)


def fill_profiled(rows: Sequence[Row], tables: dict[TableKey, ProfileTable]) -> tuple[str, ...]:
    """Put rows into their tables; return remarks.

    What an imported table says stays as it is; other cells are means over the layers and ranks of
    the profiles that FASOP makes tables of.

    Raises:
        InvalidRequestError: profiles of one table assume different sequences or formats.

    """
    notes = ImportNotes()
    assumed: dict[TableKey, tuple[str, str]] = {}
    made: dict[TableKey, ProfileTable] = {}
    for file in _group_by_file(rows):
        if not {"tp", "seq_len"} <= set(file.says):
            notes.add(file.name, "its composite rows are not in the selection: nothing to export")
            continue
        if assumed.setdefault(file.key, file.assumed) != file.assumed:
            raise InvalidRequestError.of_field(
                "selection",
                f"{file.key.file_name}: profiles of {assumed[file.key]} and {file.assumed} tokens a"
                " sequence and format; choose one with a narrower selection",
            )
        target = tables if file.is_table else made
        _fill(file, target.setdefault(file.key, ProfileTable()), notes)
    for key, table in made.items():
        tables.setdefault(key, ProfileTable()).add_missing(table)
    return notes.lines()


def _group_by_file(rows: Sequence[Row]) -> list[_SourceFile]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["run_id"], row["source_file"]), []).append(row)
    return [
        _SourceFile(
            name=name,
            rows=group,
            says=next((parse_variant(row["variant"]) for row in group if row["variant"]), {}),
        )
        for (_, name), group in found.items()
    ]


def _fill(file: _SourceFile, table: ProfileTable, notes: ImportNotes) -> None:
    seq_len = int(file.says["seq_len"])
    for row in file.rows:
        column = _KERNELS.get(row["kernel"])
        dims = dict(row["dims"])
        num_tokens = dims["m"] if "m" in dims else dims["num_tokens"]
        micro_batch = num_tokens // seq_len
        if column is None:
            notes.add(file.name, "a legacy profile of whole layers, which no table has a place for")
        elif micro_batch & (micro_batch - 1):
            notes.add(file.name, f"micro batch {micro_batch} is left out: no power of two")
        else:
            if any(not flag.startswith(_COMPOSITE) for flag in row["flags"] or ()):
                notes.add(file.name, "times that the catalog flags are in the table")
            table.add(micro_batch, column.name, _time_us(row) / US_PER_MS)


def _time_us(row: Row) -> float:
    """Return the mean, as FASOP's tables have it; NaN where there was no time."""
    for statistic in ("mean", "median"):
        if row[f"latency_us_{statistic}"] is not None:
            return float(row[f"latency_us_{statistic}"])
    return math.nan


_OPTIONS = {
    "model": "compose tables of this model, too, of operators measured alone",
    "seq_len": "tokens of a sequence of the tables composed",
    "dtype": "number format of the operators they are composed of; bf16 unless said",
}

_COUNT = re.compile(r"[1-9][0-9]{0,6}")
_NO_PROFILE = "of no FASOP profile (options model and seq_len compose tables of others)"


def _save(rows: pa.RecordBatchReader, request: ExportRequest) -> ExportReport:
    plan = _plan_of(request)
    points = MeasuredPoints(plan) if plan else None
    profiled: list[dict[str, Any]] = []
    left_out = LeftOut()
    reason = f"no part of {plan.model.name}'s tables" if plan else _NO_PROFILE
    for piece in rows:
        is_profiled = pc.fill_null(
            pc.starts_with(piece["kernel"], pattern=KERNEL_PREFIX), fill_value=False
        )
        profiled += piece.filter(is_profiled).to_pylist()
        others = piece.filter(pc.invert(is_profiled))
        taken = points.take(others) if points else {}
        for counted in pc.value_counts(others["operator"]).to_pylist():
            operator = counted["values"]
            left_out.add(reason, operator, counted["counts"] - taken.get(operator, 0))
    tables: dict[TableKey, ProfileTable] = {}
    notes = [*fill_profiled(profiled, tables), *(points.fill(tables) if points else ())]
    files, remarks = write_tables(tables, request.path)
    if not files:
        reasons = "; ".join((*notes, *remarks, *left_out.lines())) or "there are none"
        raise InvalidRequestError.of_field("selection", f"no table can be written: {reasons}")
    num_rows = len(profiled) + (points.num_rows if points else 0)
    return ExportReport(files=files, num_rows=num_rows, notes=(*notes, *remarks, *left_out.lines()))


def _plan_of(request: ExportRequest) -> LayerPlan | None:
    name, seq_len = (request.options.get(key, "") for key in ("model", "seq_len"))
    dtype = request.options.get("dtype", DType.BF16.name).upper()
    violations = []
    if bool(name) != bool(seq_len):
        violations.append(FieldViolation("options", "model and seq_len go together"))
    if seq_len and not _COUNT.fullmatch(seq_len):
        violations.append(FieldViolation("options.seq_len", f"{seq_len!r} is no count"))
    if dtype not in DType.__members__:
        violations.append(FieldViolation("options.dtype", f"{dtype!r} is no number format"))
    if violations:
        raise InvalidRequestError.of_violations(violations, "export fasop")
    if not name:
        return None
    return LayerPlan(model=find_model(name), seq_len=int(seq_len), dtype=DType[dtype])


def _narrow(selection: MeasurementFilter) -> MeasurementFilter:
    """Ask for flagged and failed rows, too: a table has composite columns, and keeps its gaps."""
    return replace(selection, include_flagged=True, include_failed=True)


EXPORTER = Exporter(
    name="fasop",
    summary="FASOP's {model}_{gpu}_{tp}.npz: times of modules by micro batch size, in ms",
    save=_save,
    narrow=_narrow,
    options=_OPTIONS,
)
