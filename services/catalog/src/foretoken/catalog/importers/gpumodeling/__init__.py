"""Import the operator and NCCL samples of the GPUModeling25 and estimate-train-time projects.

`<cluster>/operator/<GPU>_<op>_<dtype>.csv` hold forward and backward times of one operator in µs;
`<cluster>/nccl/<GPU>_<collective>_<dtype>_<nodes>_<devices>.csv` those of one collective, its
size in elements. A path at any level is read. Source:
https://github.com/Littlesnakess/GPUModeling25, https://github.com/DebarghaG/estimate-train-time.
"""

from collections.abc import Iterator

import pyarrow as pa

from foretoken.catalog.importers.gpumodeling.sample_file import (
    SampleFile,
    find_sample_files,
    read_collective,
    read_operator,
)
from foretoken.catalog.importing import (
    Importer,
    ImportNotes,
    ImportPlan,
    ImportRequest,
    build_plan,
)
from foretoken.catalog.sources.table import SourceTable
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.hardware.topology import TopologySpec, find_topology

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
