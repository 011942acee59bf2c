"""Import operator profiles in Vidur's layout.

`compute/<device>/<org>/<model>/{mlp,attention}.csv` hold times in ms of one layer in fp16, with the
model's dimensions in every row; `network/<topology>/{all_reduce,send_recv}.csv` hold collectives,
sizes in bytes; `cpu_overhead/<topology>/<org>/<model>/cpu_overhead.csv` holds times of the host.
Source: the profiling output of https://github.com/microsoft/vidur.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from foretoken.catalog.dims import Floats, Integers
from foretoken.catalog.importers.vidur.folders import (
    ModelFolder,
    find_compute_folders,
    find_host_folders,
    find_network_files,
    is_host_file,
    is_model,
    list_model_folders,
    select_model,
)
from foretoken.catalog.importers.vidur.layer_file import (
    LayerFile,
    join_rows,
    read_attention,
    read_mlp,
    rows_of_op,
    split_column,
)
from foretoken.catalog.importing import (
    Importer,
    ImportNotes,
    ImportPlan,
    ImportRequest,
    build_plan,
    name_model,
)
from foretoken.catalog.sources.file import SourceFile, is_lfs_pointer, open_source_file
from foretoken.catalog.sources.row import RowFacts, build_rows
from foretoken.catalog.sources.table import SourceTable, parse_csv
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.units import US_PER_MS

# The parts that Vidur adds up to a step's time on the host. Source: its predictor's
# _train_cpu_overhead_models. The file has others too, which these hold or which run on the device.
_PARTS = (
    "schedule",
    "sampler_e2e",
    "prepare_inputs_e2e",
    "process_model_outputs",
    "ray_comm_time",
)
_HOST_COLUMNS = ("batch_size", "tensor_parallel_degree")
_MODEL_COLUMN = "model_name"
_STATISTICS = ("median", "mean")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFile:
    """A file and where it was measured; its rows say the model, else `model` does."""

    source: SourceFile
    path: Path
    device: str
    topology: str | None = None
    model: str | None = None


def read_host(file: HostFile, wanted: str, notes: ImportNotes) -> tuple[SourceTable, pa.Table]:
    """Read a file; rows of other models than `wanted` (a name as rows carry it) are left out.

    Old versions write the columns in capitals. Where a part has one statistic, a mean, it stands
    for the median too.

    Raises:
        InvalidRequestError: the file lacks a column, or a cell cannot be used.

    """
    origin = _lower_names(parse_csv(file.source, file.path))
    models = _read_models(origin, file.model)
    num_seqs, num_ranks = (origin.integers(name) for name in _HOST_COLUMNS)
    pieces = []
    for model in dict.fromkeys(models.tolist()):
        if wanted and not is_model(model, wanted):
            continue
        rows = np.flatnonzero(models == model)
        dims = {"num_seqs": num_seqs[rows], "num_ranks": num_ranks[rows]}
        for part in _PARTS:
            facts = RowFacts(
                operator="host_step",
                dtype="fp16",
                device=file.device,
                topology=file.topology,
                framework="sarathi",
                variant=f"part={part}",
                model=model or None,
            )
            if latency_us := _read_times(origin, part, rows):
                pieces.append(build_rows(facts, origin, rows, dims, latency_us))
    others = sorted(_list_parts(origin) - set(_PARTS))
    if others:
        notes.add(origin.source.name, f"parts that Vidur does not read: {', '.join(others)}")
    return origin, join_rows(pieces)


def _lower_names(origin: SourceTable) -> SourceTable:
    names = [name.lower() for name in origin.table.schema.names]
    if len(set(names)) < len(names):
        raise InvalidRequestError.of_field("path", f"{origin.path}: columns twice but for capitals")
    return replace(origin, table=origin.table.rename_columns(names))


def _read_models(origin: SourceTable, of_folder: str | None) -> npt.NDArray[np.str_]:
    if not origin.has(_MODEL_COLUMN):
        return np.full(origin.num_rows, of_folder or "")
    own = origin.texts(_MODEL_COLUMN)
    names = {name: name_model(name) for name in np.unique(own).tolist()}
    return np.array([names[name] for name in own.tolist()])


def _read_times(origin: SourceTable, part: str, rows: Integers) -> dict[str, Floats]:
    """Return the statistics there are, by name; none where the part was not measured."""
    found = {
        statistic: origin.numbers(f"{part}_{statistic}")[rows] * US_PER_MS
        for statistic in _STATISTICS
        if origin.has(f"{part}_{statistic}")
    }
    if found:
        found.setdefault("median", found.get("mean", np.empty(0)))
    return found


def _list_parts(origin: SourceTable) -> set[str]:
    names = [name.rpartition("_") for name in origin.table.schema.names]
    return {part for part, _, statistic in names if statistic in _STATISTICS}


_COLUMNS = ("num_workers", "size", "collective", "devices_per_node")


def read_collective(source: SourceFile, path: Path, topology: str) -> tuple[SourceTable, pa.Table]:
    """Read the CSV file of a collective, named like it.

    Raises:
        InvalidRequestError: the file lacks a column, or a cell cannot be used.

    """
    operator = path.stem
    origin = parse_csv(source, path, _COLUMNS)
    per_node = origin.integers("devices_per_node")
    dims = {
        "message_bytes": origin.integers("size"),
        "devices_per_node": per_node,
        "num_nodes": split_column(origin, "num_workers", per_node),
    }
    facts = RowFacts(
        operator=operator,
        dtype="fp16",
        device=find_topology(topology).device,
        topology=topology,
        framework="vllm",
    )
    mask = origin.texts("collective") == operator
    if not mask.all():
        raise origin.fault(
            int(np.argmin(mask)), f"collective: not {operator}, as the file is named"
        )
    return origin, rows_of_op(origin, operator, facts, dims, mask)


_LAYER_READERS = {"mlp": read_mlp, "attention": read_attention}


def _load(request: ImportRequest) -> ImportPlan:
    reading = _Reading(request)
    folders = find_compute_folders(request, reading.notes)
    devices = {device for _, device in folders}
    models = [found for place in folders for found in list_model_folders(*place)]
    models += find_host_folders(request, devices, reading.notes)
    for found in select_model(models, request.model) if request.model else models:
        reading.read_model_folder(found)
    for path, topology in find_network_files(request, devices, reading.notes):
        if source := reading.open(path):
            reading.tables.append(read_collective(source, path, topology))
    return build_plan(
        "vidur",
        request,
        [origin.source for origin, _ in reading.tables],
        [rows for _, rows in reading.tables],
        notes=reading.notes,
    )


class _Reading:
    """What was read so far, and what was not."""

    def __init__(self, request: ImportRequest) -> None:
        self.notes = ImportNotes()
        self.tables: list[tuple[SourceTable, pa.Table]] = []
        self._root = request.path
        self._model = name_model(request.model) if request.model else ""

    def open(self, path: Path) -> SourceFile | None:
        """Read a file; None, with a remark, if Git LFS keeps the data elsewhere."""
        source = open_source_file(path, self._root)
        if is_lfs_pointer(source):
            self.notes.add(
                source.name,
                "NOT READ: a Git LFS pointer, not the data; run `git lfs pull` where it is from,"
                " then import again",
            )
            return None
        return source

    def read_model_folder(self, found: ModelFolder) -> None:
        """Read all files of a model."""
        for path in sorted(found.folder.glob("*.csv")):
            is_layer = path.stem in _LAYER_READERS and found.topology is None
            if not (is_layer or is_host_file(path)):
                name = path.relative_to(self._root).as_posix()
                self.notes.add(name, "not a file of this format")
            elif source := self.open(path):
                self.tables.append(self._read(source, path, found, is_layer=is_layer))

    def _read(
        self, source: SourceFile, path: Path, found: ModelFolder, *, is_layer: bool
    ) -> tuple[SourceTable, pa.Table]:
        if is_layer:
            file = LayerFile(source=source, path=path, device=found.device, model=found.model)
            return _LAYER_READERS[path.stem](file, self.notes)
        host_file = HostFile(
            source=source,
            path=path,
            device=found.device,
            topology=found.topology,
            model=found.model,
        )
        return read_host(host_file, self._model, self.notes)


IMPORTER = Importer(
    name="vidur",
    summary="Vidur's profiling folder: compute/<device>/<model>/*.csv and network/<topology>/*.csv",
    load=_load,
    options={"folder": "read this folder of compute/ as the profile of --device"},
)
