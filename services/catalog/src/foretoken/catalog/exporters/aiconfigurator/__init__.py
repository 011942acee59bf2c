"""Export measurements as a performance database that NVIDIA AIConfigurator reads.

`<system>.yaml` and `data/<system>/<family>/<backend>/<version>/*_perf.parquet` with a
`collection_meta.yaml` next to the tables; times in ms, message sizes in elements. What its reader
expects: docs/reference/import-aiconfigurator.md.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pyarrow as pa

from foretoken.catalog.dims import Mask
from foretoken.catalog.exporters.aiconfigurator.attention_tables import attention_writers
from foretoken.catalog.exporters.aiconfigurator.files import Placement, TableFiles
from foretoken.catalog.exporters.aiconfigurator.rows import Group, Writer, Written, read_groups
from foretoken.catalog.exporting import Exporter, ExportReport, ExportRequest, LeftOut
from foretoken.catalog.importers.aiconfigurator.formats import (
    COLLECTIVES,
    ENGINES,
    name_scheme,
)
from foretoken.catalog.importers.aiconfigurator.moe_table import (
    Routing,
    is_known_distribution,
    local_load,
)
from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.hardware.topology import topology_of_device
from foretoken.domain.measurements.estimate import DType

_UNGATED = "_nongated"


def write_group(group: Group) -> Written | None:
    """Return the columns for a group of rows; None where no table has words for it."""
    writer = _WRITERS.get(group.operator)
    if writer is None or group.texts["phase"] != "forward" or group.texts["status"] != "ok":
        return None
    if not set(group.facts) <= writer.facts:
        return None
    return writer.write(group)


def _write_gemm(group: Group) -> Written | None:
    scheme = name_scheme(group.texts["dtype"], group.facts.get("quant", ""))
    if scheme is None:
        return None
    columns = {"gemm_dtype": scheme, **{name: group.dims[name] for name in ("m", "n", "k")}}
    return Written(table="gemm_perf", op_name="gemm", group=group, columns=columns)


def _write_moe(group: Group) -> Written | None:
    scheme = name_scheme(group.texts["dtype"], group.facts.get("quant", ""))
    distribution = group.facts.get("routing", "balanced")
    if scheme is None or not is_known_distribution(distribution):
        return None
    if "routing" not in group.facts:
        group = group.take(_is_balanced(group))
    dims = group.dims
    num_local = dims.get("num_local_experts", dims["num_experts"])
    kernel = group.texts["kernel"]
    if group.facts.get("mlp") == "ungated" and not kernel.endswith(_UNGATED):
        kernel += _UNGATED
    columns = {
        "moe_dtype": scheme,
        "num_tokens": dims["num_tokens"],
        "hidden_size": dims["hidden"],
        # The rank's share; the file's widest of the same layer decides later how many share it.
        "inter_size": dims["intermediate"],
        "topk": dims["top_k"],
        "num_experts": dims["num_experts"],
        "moe_tp_size": 1,
        "moe_ep_size": dims["num_experts"] // num_local,
        "distribution": distribution,
    }
    return Written(table="moe_perf", op_name="moe", group=group, columns=columns, kernel=kernel)


def _write_collective(group: Group) -> Written | None:
    dtype, is_engine = group.texts["dtype"], group.texts["framework"] in ENGINES
    if is_engine and group.operator != "all_reduce":
        return None
    cells = {"bf16": "bfloat16", "fp16": "float16"} if is_engine else {"fp16": "half"}
    cells |= {} if is_engine else {"bf16": "half", "int8": "int8", "fp8": "int8"}
    if dtype not in cells:
        return None
    element_bytes = int(DType[dtype.upper()].num_bytes)
    group = group.take(
        _is_on_full_nodes(group) & (group.dims["message_bytes"] % element_bytes == 0)
    )
    lane = group.facts.get("lane", "")
    column = "allreduce_dtype" if is_engine else "nccl_dtype"
    columns = {
        column: cells[dtype],
        "num_gpus": group.dims["devices_per_node"] * group.dims["num_nodes"],
        "message_size": group.dims["message_bytes"] // element_bytes,
    }
    if is_engine:
        columns["backend"] = "_".join(filter(None, (group.texts["framework"], lane)))
    names = {ours: theirs for theirs, ours in COLLECTIVES.items()}
    return Written(
        table="custom_allreduce_perf" if is_engine else "nccl_perf",
        op_name=names[group.operator],
        group=group,
        columns=columns,
    )


def _is_balanced(group: Group) -> Mask:
    """Say which rows without a named routing reached as many experts as a balanced one does."""
    names = ("num_tokens", "top_k", "num_experts", "num_active_experts")
    keys = np.column_stack([group.dims[name] for name in names])
    local = group.dims.get("num_local_experts", group.dims["num_experts"])
    pairs = group.dims.get("num_local_pairs", group.dims["num_tokens"] * group.dims["top_k"])
    keys = np.column_stack([keys, group.dims["num_experts"] // local, pairs])
    found, inverse = np.unique(keys, axis=0, return_inverse=True)
    is_alike = []
    for num_tokens, top_k, num_experts, num_active, num_ranks, num_pairs in found.tolist():
        routing = Routing(num_tokens, top_k, num_experts, num_ranks, "balanced")
        load = None if routing.fault else local_load(routing)
        is_alike.append(
            load is not None and (load.num_pairs, load.num_active) == (num_pairs, num_active)
        )
    return np.array(is_alike, dtype=bool)[inverse.reshape(-1)]


def _is_on_full_nodes(group: Group) -> Mask:
    """Say which rows ran on one node, or filled every node they ran on."""
    topology = group.texts["topology"]
    found = topology_of_device(group.texts["device"], topology)
    per_node = group.dims["devices_per_node"]
    return np.asarray(
        ((group.dims["num_nodes"] == 1) & (per_node <= found.devices_per_node))
        | (per_node == found.devices_per_node)
    )


_MOE = Writer(frozenset({"quant", "routing", "mlp"}), _write_moe)
_COLLECTIVE = Writer(frozenset({"lane"}), _write_collective)
_WRITERS: Mapping[str, Writer] = MappingProxyType(
    {
        "gemm": Writer(frozenset({"quant"}), _write_gemm),
        "moe_experts": _MOE,
        "moe_local_experts": _MOE,
        **attention_writers(),
        **dict.fromkeys(COLLECTIVES.values(), _COLLECTIVE),
    }
)


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
