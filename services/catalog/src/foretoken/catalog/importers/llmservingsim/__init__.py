"""Import operator profiles in LLMServingSim's layout.

`perf/<hardware>/<org>/<model>/<dtype>/tp<N>/*.csv` next to a `meta.yaml`, in µs of one layer under
vLLM; the rows have no dimensions, those follow from the model and the degree. `collectives/*.csv`
have message sizes in elements. Source: https://github.com/casys-kaist/LLMServingSim, profiler/.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from foretoken.catalog.dims import Mask
from foretoken.catalog.importers.llmservingsim.layer_files import read_layers
from foretoken.catalog.importers.llmservingsim.variant import Rows, find_variants, join_rows
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
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import find_topology, topology_of_device
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.units import US_PER_MS

_COLUMNS = (
    "framework",
    "version",
    "device",
    "op_name",
    "kernel_source",
    "num_gpus",
    "message_elements",
    "latency_ms",
)
_DTYPE_COLUMNS = ("allreduce_dtype", "nccl_dtype")
_OPERATORS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}
_DTYPES = {"half": DType.FP16, "bfloat16": DType.BF16, "float": DType.FP32, "int8": DType.INT8}


class _Kind(NamedTuple):
    """The texts of a row."""

    op_name: str
    kernel: str
    dtype: str
    device: str
    framework: str
    version: str


def find_collective_files(path: Path) -> list[Path]:
    """Return the files of folders named `collectives` at or under a path."""
    folder = [path] if path.name == "collectives" else []
    folder += sorted(found for found in path.rglob("collectives") if found.is_dir())
    return [file for found in folder for file in sorted(found.glob("*.csv"))]


def read_collectives(path: Path, request: ImportRequest, notes: ImportNotes) -> Rows:
    """Read one file; rows of other devices than the one asked for are left out.

    Raises:
        InvalidRequestError: the file lacks a column, or a cell cannot be used.
        UnknownDeviceError, UnknownTopologyError: there is no file for the device's.

    """
    origin = parse_csv(read_source_file(path, request.path), path, _COLUMNS)
    dtype_column = next((name for name in _DTYPE_COLUMNS if origin.has(name)), None)
    if dtype_column is None:
        raise InvalidRequestError.of_field(
            "path", f"{path}: missing one of the columns {', '.join(_DTYPE_COLUMNS)}"
        )
    wanted = find_device(request.device).name if request.device else ""
    keys = [
        origin.texts(name)
        for name in ("op_name", "kernel_source", dtype_column, "device", "framework", "version")
    ]
    pieces = []
    texts = zip(*(column.tolist() for column in keys), strict=True)
    for kind in dict.fromkeys(_Kind(*row) for row in texts):
        mask = np.logical_and.reduce([c == k for c, k in zip(keys, kind, strict=True)])
        if kind.op_name not in _OPERATORS or kind.dtype not in _DTYPES:
            text = (
                f"{mask.sum()} rows of {kind.op_name} in {kind.dtype}, unknown here, are not read"
            )
            notes.add(origin.source.name, text)
        elif wanted in ("", find_device(kind.device).name):
            facts = _facts_of(kind, request.topology)
            pieces.append(_rows_of(origin, facts, mask, _DTYPES[kind.dtype]))
    return origin, join_rows(pieces)


def _facts_of(kind: _Kind, topology: str) -> RowFacts:
    """Return what rows of a kind have in common; `topology` is the one asked for, if one was."""
    device = find_device(kind.device).name
    # Where NCCL was timed, the version is NCCL's, whatever framework timed it.
    is_nccl = kind.kernel.upper() == "NCCL"
    return RowFacts(
        operator=_OPERATORS[kind.op_name],
        dtype=_DTYPES[kind.dtype].name.lower(),
        device=device,
        topology=find_topology(topology or topology_of_device(device).name).name,
        framework="nccl" if is_nccl else kind.framework.lower(),
        framework_version=kind.version or None,
        kernel=kind.kernel.lower(),
    )


def _rows_of(origin: SourceTable, facts: RowFacts, mask: Mask, dtype: DType) -> pa.Table:
    dims = {
        "message_bytes": origin.integers("message_elements")[mask] * int(dtype.num_bytes),
        "devices_per_node": origin.integers("num_gpus")[mask],
        "num_nodes": 1,
    }
    times_us = origin.numbers("latency_ms")[mask] * US_PER_MS
    return build_rows(facts, origin, np.flatnonzero(mask), dims, {"median": times_us})


def _load(request: ImportRequest) -> ImportPlan:
    notes = ImportNotes()
    variants = find_variants(request)
    tables = [found for variant in variants for found in read_layers(variant, notes)]
    tables += [
        read_collectives(path, request, notes) for path in find_collective_files(request.path)
    ]
    sources = [variant.meta_file for variant in variants] + [origin.source for origin, _ in tables]
    environment = {
        f"{variant.hardware}/{variant.model.name}/{key}": value
        for variant in variants
        for key, value in variant.environment.items()
    }
    return build_plan(
        "llmservingsim",
        request,
        sources,
        [rows for _, rows in tables],
        notes=notes,
        environment=environment,
    )


IMPORTER = Importer(
    name="llmservingsim",
    summary="LLMServingSim's profiler/perf folder, or one above it that also has collectives/",
    load=_load,
)
