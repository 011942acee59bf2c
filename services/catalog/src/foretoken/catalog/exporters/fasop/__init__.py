"""Export FASOP's profile database: `{model}_{gpu}_{tp}.npz`.

Rows that came from FASOP profiles go back to their tables. With a model and a sequence length,
tables are also composed of operators measured alone, where a whole layer is covered.
"""

import re
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from foretoken.catalog.exporters.fasop.composed import LayerPlan, MeasuredPoints
from foretoken.catalog.exporters.fasop.profiled import fill_profiled
from foretoken.catalog.exporters.fasop.table import ProfileTable, TableKey, write_tables
from foretoken.catalog.exporting import Exporter, ExportReport, ExportRequest, LeftOut
from foretoken.catalog.importers.fasop.profile_rows import KERNEL_PREFIX
from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.measurements.measurement import MeasurementFilter
from foretoken.domain.models.architecture import find_model

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
