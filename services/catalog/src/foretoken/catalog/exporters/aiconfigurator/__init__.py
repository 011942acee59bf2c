"""Export measurements as a performance database that NVIDIA AIConfigurator reads.

`<system>.yaml` and `data/<system>/<family>/<backend>/<version>/*_perf.parquet` with a
`collection_meta.yaml` next to the tables; times in ms, message sizes in elements. What its reader
expects: docs/reference/import-aiconfigurator.md.
"""

from pathlib import Path

import pyarrow as pa

from foretoken.catalog.exporters.aiconfigurator.files import Placement, TableFiles
from foretoken.catalog.exporters.aiconfigurator.rows import Group, Written, read_groups
from foretoken.catalog.exporters.aiconfigurator.tables import write_group
from foretoken.catalog.exporting import Exporter, ExportReport, ExportRequest, LeftOut
from foretoken.catalog.importers.aiconfigurator.formats import ENGINES
from foretoken.domain.errors import FieldViolation, InvalidRequestError

_NCCL = "nccl"
_COMMON_TABLE = "nccl_perf"
# Which rows of an operator its table has no room for.
_COLLECTIVES_REST = "nodes filled in part, or no whole number of elements"
_ATTENTION_REST = "sequences of unequal lengths, prefill after cached tokens, or other widths"
_REST_OF_TABLE = {
    "moe_perf": "other experts reached than with a known routing",
    "nccl_perf": _COLLECTIVES_REST,
    "custom_allreduce_perf": _COLLECTIVES_REST,
}


def _save(rows: pa.RecordBatchReader, request: ExportRequest) -> ExportReport:
    _check_options(request)
    files, left_out = TableFiles(), LeftOut()
    for group in read_groups(rows):
        written = write_group(group)
        placement = None if written is None else _place(written, request)
        if written is None or placement is None:
            left_out.add(*_reason(group, written), group.num_rows)
            continue
        num_rest = group.num_rows - written.group.num_rows
        rest = _REST_OF_TABLE.get(written.table, _ATTENTION_REST)
        left_out.add(rest, group.operator, num_rest)
        files.add(written, placement)
    if not files.num_rows:
        reasons = "; ".join(left_out.lines()) or "there are none"
        raise InvalidRequestError(f"no row fits AIConfigurator's tables: {reasons}")
    names = files.save(request.path)
    notes = (*left_out.lines(), *files.notes)
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
    """Return where rows belong; None if no engine or version there is said or named."""
    texts, options = written.group.texts, request.options
    engine, version = texts["framework"], texts["framework_version"]
    if written.table == _COMMON_TABLE:
        backend = _NCCL
        version = version if version and engine == _NCCL else options.get("nccl_version", "")
    elif engine in ENGINES and version:
        backend = engine
    else:
        backend, version = options.get("backend", ""), options.get("version", "")
        if engine in ENGINES and backend != engine:
            return None
    if not backend or not _is_folder_name(version):
        return None
    return Placement(device=texts["device"], backend=backend, version=version, table=written.table)


def _is_folder_name(text: str) -> bool:
    is_plain = all(char.isalnum() or char in "._+-" for char in text)
    return is_plain and bool(text) and not text.startswith(".") and Path(text).name == text


def _reason(group: Group, written: Written | None) -> tuple[str, str]:
    """Return why rows have no place, and what they measure."""
    if group.texts["status"] != "ok":
        return "failed", group.operator
    engine = group.texts["framework"]
    if written is None:
        phase = group.texts["phase"]
        said = [group.texts["dtype"], group.texts["variant"], "" if phase == "forward" else phase]
        return "no table holds such", f"{group.operator} ({', '.join(filter(None, said))})"
    measured = f"{group.operator} of {engine or 'no engine'}"
    if written.table == _COMMON_TABLE:
        return "of no NCCL version (--option nccl_version=V names it)", measured
    if engine in ENGINES:
        return f"of no version (--option backend={engine} --option version=V names it)", measured
    return "of none of its engines (--option backend=E --option version=V names one)", measured


EXPORTER = Exporter(
    name="aiconfigurator",
    summary="a systems folder for AIConfigurator: <system>.yaml and data/<system>/.../*.parquet",
    save=_save,
    options={
        "backend": "write rows of other engines, or of this one in no version, as of this one:"
        f" {', '.join(ENGINES)}",
        "version": "the version of that engine",
        "nccl_version": "write collectives of no NCCL version as this one's",
    },
)
