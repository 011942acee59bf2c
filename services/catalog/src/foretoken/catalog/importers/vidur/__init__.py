"""Import operator profiles in Vidur's layout.

`compute/<device>/<org>/<model>/{mlp,attention}.csv` hold times in ms of one layer in fp16, with the
model's dimensions in every row; `network/<topology>/{all_reduce,send_recv}.csv` hold collectives,
sizes in bytes; `cpu_overhead/<topology>/<org>/<model>/cpu_overhead.csv` holds times of the host.
Source: the profiling output of https://github.com/microsoft/vidur.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa

from foretoken.catalog.importers.vidur.folders import (
    ModelFolder,
    find_compute_folders,
    find_host_folders,
    find_network_files,
    is_host_file,
    list_model_folders,
    select_model,
)
from foretoken.catalog.importers.vidur.host_file import HostFile, read_host
from foretoken.catalog.importers.vidur.layer_file import (
    LayerFile,
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
from foretoken.catalog.sources.row import RowFacts
from foretoken.catalog.sources.table import SourceTable, parse_csv
from foretoken.domain.hardware.topology import find_topology

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
