"""Export measurements as a performance database that NVIDIA AIConfigurator reads.

`<system>.yaml` and `data/<system>/<family>/<backend>/<version>/*_perf.parquet` with a
`collection_meta.yaml` beside the tables; times in ms, message sizes in elements. What its reader
expects: docs/reference/import-aiconfigurator.md.
"""

from collections import Counter
from pathlib import Path

import pyarrow as pa

from foretoken.catalog.exporters.aiconfigurator.files import Placement, TableFiles
from foretoken.catalog.exporters.aiconfigurator.rows import Group, read_groups
from foretoken.catalog.exporters.aiconfigurator.tables import Written, write_group
from foretoken.catalog.exporting import Exporter, ExportReport, ExportRequest
from foretoken.catalog.importers.aiconfigurator.formats import ENGINES
from foretoken.domain.errors import FieldViolation, InvalidRequestError

_NCCL = "nccl"
_COMMON_TABLE = "nccl_perf"


def _save(rows: pa.RecordBatchReader, request: ExportRequest) -> ExportReport:
    _check_options(request)
    files, left_out = TableFiles(), Counter[str]()
    for group in read_groups(rows):
        written = write_group(group)
        placement = None if written is None else _place(written, request)
        if written is None or placement is None:
            left_out[_reason(group, written)] += group.num_rows
            continue
        if written.group.num_rows < group.num_rows:
            reason = f"{group.operator}: batches or groups of ranks that its tables cannot say"
            left_out[reason] += group.num_rows - written.group.num_rows
        files.add(written, placement)
    if not files.num_rows:
        reasons = "; ".join(_lines(left_out)) or "there are none"
        raise InvalidRequestError(f"no row fits AIConfigurator's tables: {reasons}")
    names = files.save(request.path)
    notes = (*_lines(left_out), *files.notes)
    return ExportReport(files=names, num_rows=files.num_rows, notes=notes)


def _check_options(request: ExportRequest) -> None:
    backend = request.options.get("backend", "")
    violations = []
    if backend and backend not in ENGINES:
        violations.append(FieldViolation("options.backend", f"one of {', '.join(ENGINES)}"))
    if bool(backend) != bool(request.options.get("version", "")):
        violations.append(FieldViolation("options.version", "goes with options.backend"))
    violations += [
        FieldViolation(f"options.{name}", "names a folder: letters, digits, . _ + and - only")
        for name in ("version", "nccl_version")
        if not _is_folder_name(request.options.get(name, "x"))
    ]
    if violations:
        raise InvalidRequestError.of_violations(violations, "export aiconfigurator")


def _place(written: Written, request: ExportRequest) -> Placement | None:
    """Return where rows belong; None if they are of no engine there and none is named."""
    texts, options = written.group.texts, request.options
    if written.table == _COMMON_TABLE:
        is_nccl = texts["framework"] == _NCCL
        version = texts["framework_version"] if is_nccl else options.get("nccl_version", "")
        backend = _NCCL
    elif texts["framework"] in ENGINES:
        backend, version = texts["framework"], texts["framework_version"]
    else:
        backend, version = options.get("backend", ""), options.get("version", "")
    if not backend or not _is_folder_name(version):
        return None
    return Placement(device=texts["device"], backend=backend, version=version, table=written.table)


def _is_folder_name(text: str) -> bool:
    is_plain = all(char.isalnum() or char in "._+-" for char in text)
    return is_plain and bool(text) and not text.startswith(".") and Path(text).name == text


def _reason(group: Group, written: Written | None) -> str:
    if group.texts["status"] != "ok":
        return f"{group.operator}: failed rows"
    if written is not None:
        option = "nccl_version" if written.table == _COMMON_TABLE else "backend and version"
        engine = group.texts["framework"] or "no engine"
        return f"{group.operator} of {engine}: not one of its engines; name one with {option}"
    phase = group.texts["phase"]
    said = [group.texts["dtype"], group.texts["variant"], "" if phase == "forward" else phase]
    return f"{group.operator} ({', '.join(filter(None, said))}): no table for it"


def _lines(left_out: Counter[str]) -> list[str]:
    return [f"{count} rows left out: {reason}" for reason, count in sorted(left_out.items())]


EXPORTER = Exporter(
    name="aiconfigurator",
    summary="a systems folder for AIConfigurator: <system>.yaml and data/<system>/.../*.parquet",
    save=_save,
    options={
        "backend": f"write rows of other engines as this one's: {', '.join(ENGINES)}",
        "version": "the version of that engine",
        "nccl_version": "write collectives that no engine of theirs timed as this NCCL version's",
    },
)
