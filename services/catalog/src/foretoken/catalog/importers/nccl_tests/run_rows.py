"""Rows of the catalog from one run of a test."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from foretoken.catalog.importers.nccl_tests.log import TableLine, TestLog, Timing
from foretoken.catalog.importing import ImportNotes, ImportRequest
from foretoken.catalog.sources.file import SourceFile, refuse
from foretoken.catalog.sources.row import RowFacts, build_rows
from foretoken.catalog.sources.table import SourceTable
from foretoken.domain.errors import (
    FieldViolation,
    InvalidRequestError,
    UnknownDeviceError,
)
from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import TopologySpec, all_topologies, find_topology
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.operators.spec.variant import format_variant

# Sizes mean what the operators' mean: the tensor of a rank (all_reduce, reduce_scatter, broadcast),
# the gathered tensor (all_gather), all that a rank sends (alltoall, sendrecv).
OPERATORS: Mapping[str, str] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "sendrecv": "send_recv",
    "broadcast": "broadcast",
}
# Every rank sends to the next one and receives from the one before, at the same time.
_PATTERNS = {"sendrecv": "ring"}
_DTYPES = {
    "float": DType.FP32,
    "half": DType.FP16,
    "bfloat16": DType.BF16,
    "f8e4m3": DType.FP8,
    "fp8_e4m3": DType.FP8,
    "f8e5m2": DType.FP8,
    "fp8_e5m2": DType.FP8,
    "int8": DType.INT8,
    "uint8": DType.INT8,
}
_PLAIN_REDOP = "sum"


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """What the request says about all logs; empty and 0 where the logs must say it."""

    device: str
    topology: str
    program: str
    devices_per_node: int
    num_nodes: int

    @classmethod
    def of(cls, request: ImportRequest) -> "Site":
        """Return what a request says.

        Raises:
            InvalidRequestError: an option is no count, or names no collective.
            UnknownDeviceError, UnknownTopologyError: there is no file for it.

        """
        program = request.options.get("collective", "")
        if program and program not in OPERATORS:
            raise InvalidRequestError.of_field(
                "options.collective", f"{program!r} is none of {', '.join(OPERATORS)}"
            )
        return cls(
            device=find_device(request.device).name if request.device else "",
            topology=find_topology(request.topology).name if request.topology else "",
            program=program,
            devices_per_node=_count_in(request, "devices_per_node"),
            num_nodes=_count_in(request, "num_nodes"),
        )


@dataclass(frozen=True, slots=True)
class _Group:
    """The ranks of a collective. `num_groups` of them ran side by side."""

    device: str
    devices_per_node: int
    num_nodes: int
    num_groups: int = 1


@dataclass(frozen=True, slots=True)
class _Kind:
    """What rows must share to be built together."""

    dtype: DType
    redop: str
    is_in_place: bool


def build_run_rows(
    run: TestLog, source: SourceFile, path: Path, site: Site, notes: ImportNotes
) -> Iterator[pa.Table]:
    """Yield the rows of a run, alike ones together.

    Raises:
        InvalidRequestError: the log does not say which collective ran on which devices.
        UnknownDeviceError: there is no file for its devices.

    """
    program = run.program or _program_of_name(path) or site.program
    if not program:
        refuse(path, "names no collective; give --option collective=NAME")
    if program not in OPERATORS:
        notes.add(source.name, f"no operator here is {program}_perf's; its rows are not read")
        return
    group = _group_of(run, path, site)
    if site.device not in ("", group.device):
        notes.add(source.name, f"not read: it ran on {group.device}")
        return
    if run.num_out_of_bounds and not any(_num_wrong(line) for line in run.lines):
        notes.add(source.name, "some results were wrong; the log does not say which")
    topology = _topology_of(group, path, site)
    origin = SourceTable(replace(source, content=b""), path, pa.table({}), has_lines=False)
    for kind, lines in _by_kind(run.lines, source, notes).items():
        yield _build(origin, lines, _facts(run, program, kind, group, topology), group)


def _facts(
    run: TestLog, program: str, kind: _Kind, group: _Group, topology: TopologySpec
) -> RowFacts:
    variant = format_variant(
        {
            "agg_iters": str(run.num_aggregated) if run.num_aggregated > 1 else "",
            "buffers": "in_place" if kind.is_in_place else "",
            "graph": "true" if run.has_graph else "",
            "groups": str(group.num_groups) if group.num_groups > 1 else "",
            "pattern": _PATTERNS.get(program, ""),
            "redop": "" if kind.redop == _PLAIN_REDOP else kind.redop,
        }
    )
    return RowFacts(
        operator=OPERATORS[program],
        dtype=kind.dtype.name.lower(),
        device=group.device,
        topology=topology.name,
        framework="nccl",
        framework_version=run.nccl_version or None,
        kernel="nccl",
        variant=variant,
        num_samples=run.num_iterations or None,
    )


def _by_kind(
    lines: list[TableLine], source: SourceFile, notes: ImportNotes
) -> dict[_Kind, list[tuple[TableLine, Timing]]]:
    found: dict[_Kind, list[tuple[TableLine, Timing]]] = {}
    for line in lines:
        if line.dtype not in _DTYPES:
            notes.add(source.name, f"rows of type {line.dtype} are not read")
        elif line.size_bytes == 0:
            notes.add(source.name, "rows of 0 bytes are not read")
        else:
            for timing, is_in_place in ((line.out_of_place, False), (line.in_place, True)):
                if timing:
                    kind = _Kind(_DTYPES[line.dtype], line.redop, is_in_place)
                    found.setdefault(kind, []).append((line, timing))
    return found


def _build(
    origin: SourceTable,
    lines: list[tuple[TableLine, Timing]],
    facts: RowFacts,
    group: _Group,
) -> pa.Table:
    """Return rows, those with wrong results failed. Their number in the source is the line's."""
    times_us = np.array([np.nan if t.num_wrong else t.time_us for _, t in lines])
    dims = {
        "message_bytes": np.array([line.size_bytes for line, _ in lines]),
        "devices_per_node": group.devices_per_node,
        "num_nodes": group.num_nodes,
    }
    places = np.array([line.line - 1 for line, _ in lines])
    # The one time there is, a mean over iterations, stands as median and mean.
    rows = build_rows(facts, origin, places, dims, {"median": times_us, "mean": times_us})
    reasons = [f"{t.num_wrong:g} wrong values" if t.num_wrong else None for _, t in lines]
    position = rows.schema.get_field_index("status_reason")
    return rows.set_column(position, rows.schema.field(position), pa.array(reasons, pa.string()))


def _group_of(run: TestLog, path: Path, site: Site) -> _Group:
    if not run.ranks:
        if not (site.device and site.devices_per_node):
            refuse(
                path,
                "has no list of devices; give --device and --option devices_per_node=N"
                " (and num_nodes=N)",
            )
        return _Group(site.device, site.devices_per_node, site.num_nodes or 1)
    counts = Counter(rank.rank for rank in run.ranks)
    if max(counts.values()) > 1:
        refuse(path, "has a rank twice: separate processes, as without MPI support, or mixed logs")
    if len(counts) != max(counts) + 1:
        refuse(path, f"the list of devices has {len(counts)} of {max(counts) + 1} ranks")
    gpus = {rank.gpu for rank in run.ranks}
    if len(gpus) > 1:
        refuse(path, f"devices of several products: {', '.join(sorted(gpus))}")
    shapes = {
        group: Counter(rank.host for rank in run.ranks if rank.group == group)
        for group in {rank.group for rank in run.ranks}
    }
    layouts = {(len(hosts), count) for hosts in shapes.values() for count in hosts.values()}
    if len(layouts) > 1:
        refuse(path, "nodes of a group have different numbers of ranks")
    [(num_nodes, devices_per_node)] = layouts
    return _Group(_device_of(gpus.pop(), path), devices_per_node, num_nodes, len(shapes))


def _device_of(gpu: str, path: Path) -> str:
    try:
        return find_device(gpu).name
    except UnknownDeviceError as err:
        raise UnknownDeviceError(f"{path}: {err.message}", **err.details) from err


def _topology_of(group: _Group, path: Path, site: Site) -> TopologySpec:
    if site.topology:
        topology = find_topology(site.topology)
        if topology.device != group.device:
            refuse(path, f"ran on {group.device}; {topology.name} is made of {topology.device}")
        return topology
    # Those with nodes like another's are of sites with networks of their own.
    known = [
        found
        for found in all_topologies().values()
        if found.device == group.device and not found.nodes_like
    ]
    if len(known) != 1:
        names = ", ".join(found.name for found in known) or "none"
        raise InvalidRequestError.of_field(
            "topology", f"{path}: {group.device} is in {names}; give --topology"
        )
    return known[0]


def _program_of_name(path: Path) -> str:
    """Return the collective that a file is named after, as in `alltoall_perf_16.log`."""
    stem = path.stem.replace("-", "_")
    found = [name for name in OPERATORS if stem == name or stem.startswith(f"{name}_")]
    return max(found, key=len, default="")


def _num_wrong(line: TableLine) -> bool:
    return any(timing and timing.num_wrong for timing in (line.out_of_place, line.in_place))


def _count_in(request: ImportRequest, name: str) -> int:
    text = request.options.get(name, "")
    if text and not (text.isascii() and text.isdigit() and int(text) > 0):
        raise InvalidRequestError.of_violations(
            [FieldViolation(f"options.{name}", f"{text!r} is no count")], "import nccl_tests"
        )
    return int(text or 0)
