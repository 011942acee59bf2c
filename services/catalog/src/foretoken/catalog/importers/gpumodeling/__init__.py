"""Import the operator and NCCL samples of the GPUModeling25 and estimate-train-time projects.

`<cluster>/operator/<GPU>_<op>_<dtype>.csv` hold forward and backward times of one operator in µs;
`<cluster>/nccl/<GPU>_<collective>_<dtype>_<nodes>_<devices>.csv` those of one collective, its
size in elements. A path at any level is read. Source:
https://github.com/Littlesnakess/GPUModeling25, https://github.com/DebarghaG/estimate-train-time.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from foretoken.catalog.dims import Floats
from foretoken.catalog.importers.gpumodeling.operators import (
    COLLECTIVES,
    SAMPLED_OPS,
    SampledOp,
    Shape,
)
from foretoken.catalog.importing import (
    Importer,
    ImportNotes,
    ImportPlan,
    ImportRequest,
    build_plan,
)
from foretoken.catalog.sources.file import read_source_file
from foretoken.catalog.sources.row import RowFacts, build_rows
from foretoken.catalog.sources.table import SourceTable, parse_csv
from foretoken.domain.errors import InvalidRequestError, UnknownDeviceError
from foretoken.domain.hardware.device import all_devices, find_device
from foretoken.domain.hardware.topology import TopologySpec, find_topology
from foretoken.domain.measurements.estimate import DType

# The GPU's name has no spaces left, and no underscore.
_FILE_NAME = re.compile(
    r"(?P<gpu>[^_]+)_(?P<op>\w+?)_(?P<dtype>fp16|bf16|fp32)"
    r"(?:_(?P<num_nodes>[1-9]\d{0,5})_(?P<devices_per_node>[1-9]\d{0,3}))?\.csv"
)
_MODEL_SELECTION = ("Best_model", "Best_config")
# Times are the mean of the third to the seventh of ten in order: as robust as a median.
_NUM_SAMPLES = 5
_FRAMEWORK = "pytorch"

Rows = tuple[SourceTable, pa.Table]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleFile:
    """A file by its name. `op` is a name of the source; a collective has a group, others none."""

    path: Path
    root: Path
    device: str
    op: str
    dtype: DType
    num_nodes: int = 0
    devices_per_node: int = 0

    @property
    def name(self) -> str:
        """The path from the folder imported."""
        return _name_of(self.path, self.root)

    @property
    def is_collective(self) -> bool:
        """Whether the samples are of a group of devices."""
        return self.num_nodes > 0


def find_sample_files(request: ImportRequest, notes: ImportNotes) -> Iterator[SampleFile]:
    """Yield the files at or under a path that hold samples, narrowed to a device where given.

    Raises:
        UnknownDeviceError: a file's GPU has no device file; names the file.

    """
    wanted = find_device(request.device).name if request.device else ""
    root = request.path
    for path in [root] if root.is_file() else sorted(root.rglob("*.csv")):
        place = _name_of(path, root)
        matched = _FILE_NAME.fullmatch(path.name)
        if "truth" in path.parts[len(root.parts) :]:
            notes.add(place, "measured training steps to compare with, not times of operators")
        elif not matched:
            notes.add(place, _describe_other(path, root))
        elif not _is_known(matched["op"], is_collective=matched["num_nodes"] is not None):
            notes.add(place, f"no operator known here is {matched['op']!r}")
        else:
            device = _device_of(matched["gpu"], path)
            if wanted in ("", device):
                yield SampleFile(
                    path=path,
                    root=root,
                    device=device,
                    op=matched["op"],
                    dtype=DType[matched["dtype"].upper()],
                    num_nodes=int(matched["num_nodes"] or 0),
                    devices_per_node=int(matched["devices_per_node"] or 0),
                )


def read_operator(file: SampleFile, notes: ImportNotes) -> Rows:
    """Read the samples of one operator: its forward passes, then its backward passes.

    Raises:
        InvalidRequestError: the file lacks a column, or a cell cannot be used.

    """
    origin = parse_csv(read_source_file(file.path, file.root), file.path)
    op = SAMPLED_OPS[file.op]
    if origin.has("F_dur(us)"):
        forward_us, backward_us = origin.numbers("F_dur(us)"), origin.numbers("B_dur(us)")
    else:
        forward_us = origin.numbers("dur" if origin.has("dur") else "dur(us)")
        backward_us = None
    pieces = [_rows(file, op, origin, forward_us)]
    if backward_us is not None and np.array_equal(forward_us, backward_us, equal_nan=True):
        notes.add(file.name, "B_dur(us) is a copy of F_dur(us) in every row, and is not read")
    elif backward_us is not None:
        pieces.append(_rows(file, op, origin, backward_us, is_backward=True))
    return origin, pa.concat_tables(pieces)


def _rows(
    file: SampleFile,
    op: SampledOp,
    origin: SourceTable,
    times_us: Floats,
    *,
    is_backward: bool = False,
) -> pa.Table:
    facts = RowFacts(
        operator=op.operator,
        phase="backward" if is_backward else "forward",
        dtype=file.dtype.name.lower(),
        device=file.device,
        framework=_FRAMEWORK,
        kernel=op.kernel,
        variant=op.backward_variant if is_backward else op.variant,
        num_samples=_NUM_SAMPLES,
    )
    rows = np.arange(origin.num_rows)
    return build_rows(facts, origin, rows, op.dims(Shape(origin)), {"median": times_us})


def read_collective(file: SampleFile, topology: TopologySpec) -> Rows:
    """Read the samples of one collective on the group that the file is named after.

    Raises:
        InvalidRequestError: the file lacks a column, a cell cannot be used, or a row is of
            another group.

    """
    origin = parse_csv(read_source_file(file.path, file.root), file.path)
    for column, expected in (("nodes", file.num_nodes), ("GPUsPerNode", file.devices_per_node)):
        is_other = origin.integers(column) != expected
        if is_other.any():
            raise origin.fault(int(np.argmax(is_other)), f"{column}: not {expected} as in the name")
    operator, is_shard = COLLECTIVES[_collective_of(file.op)]
    num_shards = file.num_nodes * file.devices_per_node if is_shard else 1
    dims = {
        "message_bytes": file.dtype.bytes_of(Shape(origin).count("shape") * num_shards),
        "devices_per_node": file.devices_per_node,
        "num_nodes": file.num_nodes,
    }
    facts = RowFacts(
        operator=operator,
        dtype=file.dtype.name.lower(),
        device=file.device,
        topology=topology.name,
        framework=_FRAMEWORK,
        kernel="nccl",
        num_samples=_NUM_SAMPLES,
    )
    times_us = {"median": origin.numbers("dur(us)")}
    return origin, build_rows(facts, origin, np.arange(origin.num_rows), dims, times_us)


def _is_known(op: str, *, is_collective: bool) -> bool:
    return _collective_of(op) in COLLECTIVES if is_collective else op in SAMPLED_OPS


def _collective_of(op: str) -> str:
    # Sizes from 256 MiB on are in files of their own.
    return op.removesuffix("_large")


def _describe_other(path: Path, root: Path) -> str:
    header = read_source_file(path, root).content.split(b"\n", 1)[0].decode(errors="replace")
    if all(column in header.split(",") for column in _MODEL_SELECTION):
        return "the regression models that were fitted, not measurements"
    return "not a file of this format"


def _device_of(gpu: str, path: Path) -> str:
    for device in all_devices().values():
        if gpu in [name.replace(" ", "") for name in (device.name, *device.vendor_names)]:
            return device.name
    try:
        return find_device(gpu).name
    except UnknownDeviceError as err:
        raise UnknownDeviceError(f"{path}: {err.message}", **err.details) from err


def _name_of(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path != root else path.name


# The clusters these projects measured on.
_TOPOLOGY_OF_CLUSTER = {"Perlmutter": "a100_perlmutter", "Vista": "gh200_infiniband"}


def _load(request: ImportRequest) -> ImportPlan:
    notes = ImportNotes()
    found = list(_read(request, notes))
    return build_plan(
        "gpumodeling",
        request,
        [origin.source for origin, _ in found],
        [rows for _, rows in found],
        notes=notes,
    )


def _read(request: ImportRequest, notes: ImportNotes) -> Iterator[tuple[SourceTable, pa.Table]]:
    wanted = find_topology(request.topology) if request.topology else None
    for file in find_sample_files(request, notes):
        if not file.is_collective:
            yield read_operator(file, notes)
        elif wanted and wanted.device != file.device:
            notes.add(file.name, f"not read: {wanted.name} is made of {wanted.device}")
        else:
            yield read_collective(file, wanted or _topology_of(file))


def _topology_of(file: SampleFile) -> TopologySpec:
    for folder in reversed(file.path.absolute().parts):
        if folder in _TOPOLOGY_OF_CLUSTER:
            topology = find_topology(_TOPOLOGY_OF_CLUSTER[folder])
            if topology.device == file.device:
                return topology
    known = ", ".join(f"{folder} ({name})" for folder, name in _TOPOLOGY_OF_CLUSTER.items())
    raise InvalidRequestError.of_field(
        "topology", f"{file.path}: the cluster is none of {known}; name its topology"
    )


IMPORTER = Importer(
    name="gpumodeling",
    summary="GPUModeling25 samples: <cluster>/{operator,nccl}/<GPU>_<op>_<dtype>[_N_G].csv",
    load=_load,
)
