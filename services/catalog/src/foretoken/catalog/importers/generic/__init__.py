"""Import any CSV or Parquet tables, as a mapping file says what their columns hold."""

from pathlib import Path

import pyarrow as pa

from foretoken.catalog.importers.generic.mapping import (
    Group,
    TableRule,
    find_groups,
    read_dims,
    read_mapping,
    read_times,
)
from foretoken.catalog.importing import (
    Importer,
    ImportNotes,
    ImportPlan,
    ImportRequest,
    build_plan,
    name_model,
)
from foretoken.catalog.sources.file import read_source_file
from foretoken.catalog.sources.row import RowFacts, build_rows
from foretoken.catalog.sources.table import SourceTable, parse_csv, parse_parquet
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.measurements.estimate import DType, Phase
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.operators.spec.variant import format_variant, parse_variant
from foretoken.wire.arrow import MEASUREMENT_SCHEMA

_PARSERS = {".csv": parse_csv, ".parquet": parse_parquet}
# A legal value of every dimension: the names are checked before the rows.
_LEGAL = 1


def _load(request: ImportRequest) -> ImportPlan:
    if not request.options.get("mapping"):
        raise InvalidRequestError.of_field("options.mapping", "give the mapping file")
    mapping_path = Path(request.options["mapping"])
    mapping_file = read_source_file(mapping_path, mapping_path)
    mapping = read_mapping(mapping_file, mapping_path)
    notes = ImportNotes()
    sources, tables = [mapping_file], []
    for index, rule in enumerate(mapping.tables):
        for path in _find_files(rule, f"tables[{index}]", request, mapping_path):
            origin = _PARSERS[path.suffix](read_source_file(path, request.path), path)
            sources.append(origin.source)
            tables.append(_rows_of_table(origin, rule, request, notes))
    return build_plan("generic", request, sources, tables, notes=notes)


def _find_files(
    rule: TableRule, key: str, request: ImportRequest, mapping_path: Path
) -> list[Path]:
    if request.path.is_dir():
        found = sorted(path for path in request.path.glob(rule.files) if not path.is_dir())
    else:
        found = [request.path] if request.path.match(rule.files) else []
    unknown = [path.name for path in found if path.suffix not in _PARSERS]
    if unknown or not found:
        text = f"{unknown[0]} is neither .csv nor .parquet" if unknown else "no file matches"
        raise InvalidRequestError.of_field(
            f"{mapping_path}.{key}.files", f"{rule.files!r} under {request.path}: {text}"
        )
    return found


def _rows_of_table(
    origin: SourceTable, rule: TableRule, request: ImportRequest, notes: ImportNotes
) -> pa.Table:
    """Return the rows of one file; those of other devices, topologies or models are left out."""
    asked = {"device": request.device, "topology": request.topology, "model": request.model}
    given = {name: value for name, value in asked.items() if getattr(rule, name) is None}
    pieces = []
    num_taken = 0
    for group in find_groups(origin, rule, given):
        num_taken += len(group.rows)
        facts = _facts_of(group, rule, origin)
        if _is_asked(facts, request):
            find_operator(facts.operator).check_dims(dict.fromkeys(rule.dims, _LEGAL))
            dims = read_dims(origin, rule.dims, group)
            times_us = read_times(origin, rule, group)
            pieces.append(build_rows(facts, origin, group.rows, dims, times_us))
    if num_taken < origin.num_rows:
        text = f"{origin.num_rows - num_taken} rows are left out by `where`"
        notes.add(origin.source.name, text)
    return pa.concat_tables(pieces) if pieces else MEASUREMENT_SCHEMA.empty_table()


def _facts_of(group: Group, rule: TableRule, origin: SourceTable) -> RowFacts:
    """Return what the rows of a group have in common, every name checked.

    Raises:
        InvalidRequestError: a name cannot be used; tells the line.
        UnknownOperatorError, UnknownDeviceError, UnknownTopologyError: there is no such.

    """
    names = group.names
    first = int(group.rows[0])
    operator = find_operator(names["operator"])
    for name, known in (("dtype", DType), ("phase", Phase)):
        if names[name].upper() not in known.__members__:
            legal = ", ".join(member.lower() for member in known.__members__)
            raise origin.fault(first, f"{name}: {names[name]!r} is not one of {legal}")
    if not names["device"]:
        raise origin.fault(first, "device: the mapping does not say it; give --device")
    if operator.is_collective and not names["topology"]:
        raise origin.fault(first, f"topology: {operator.name} needs one; give --topology")
    topology = find_topology(names["topology"]) if names["topology"] else None
    device = find_device(names["device"]).name
    if topology and topology.device != device:
        text = f"topology: {topology.name} is made of {topology.device}, not of {device}"
        raise origin.fault(first, text)
    return RowFacts(
        operator=operator.name,
        phase=names["phase"].lower(),
        dtype=names["dtype"].lower(),
        device=device,
        topology=topology.name if topology else None,
        framework=names["framework"] or None,
        framework_version=names["framework_version"] or None,
        kernel=names["kernel"] or None,
        variant=format_variant(parse_variant(names["variant"])),
        model=name_model(names["model"]) if names["model"] else None,
        num_samples=rule.num_samples,
    )


def _is_asked(facts: RowFacts, request: ImportRequest) -> bool:
    asked = (
        (request.device and find_device(request.device).name, facts.device),
        (request.topology, facts.topology),
        (request.model and name_model(request.model), facts.model),
    )
    return all(wanted in ("", found) for wanted, found in asked)


IMPORTER = Importer(
    name="generic",
    summary="CSV and Parquet tables of any layout; --option mapping=FILE.yaml says what they hold",
    load=_load,
    options={"mapping": "the YAML file that says which column holds what"},
)
