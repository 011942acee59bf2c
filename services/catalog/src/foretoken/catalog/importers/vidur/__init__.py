"""Import operator profiles in Vidur's layout.

`compute/<device>/<org>/<model>/{mlp,attention}.csv` hold times in ms of one layer in fp16, with the
model's dimensions in every row; `network/<topology>/{all_reduce,send_recv}.csv` hold collectives,
sizes in bytes. Source: the profiling output of https://github.com/microsoft/vidur.
"""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from foretoken.catalog.importers.vidur.tables import read_attention, read_mlp, read_network
from foretoken.catalog.importing import (
    Importer,
    ImportNotes,
    ImportPlan,
    ImportRequest,
    build_plan,
)
from foretoken.catalog.source_table import SourceTable
from foretoken.domain.errors import InvalidRequestError, UnknownDeviceError, UnknownModelError
from foretoken.domain.hardware.device import all_devices, find_device
from foretoken.domain.hardware.topology import all_topologies, find_topology

# Vidur's short names of the products its authors profiled.
_DEVICE_OF_FOLDER = {"a100": "a100_sxm_80", "h100": "h100_sxm"}
_COLLECTIVES = ("all_reduce", "send_recv")


def _load(request: ImportRequest) -> ImportPlan:
    notes = ImportNotes()
    folders = _compute_folders(request, notes)
    tables: list[tuple[SourceTable, pa.Table]] = []
    for folder, device in folders:
        for path in _model_files(folder, request.model):
            if path.name == "mlp.csv":
                tables.append(read_mlp(path, request.path, device, notes))
            elif path.name == "attention.csv":
                tables.append(read_attention(path, request.path, device, notes))
            else:
                notes.add(path.relative_to(request.path).as_posix(), "not a file of this format")
    devices = {device for _, device in folders}
    for path, topology in _network_files(request, devices, notes):
        tables.append(read_network(path, request.path, topology))
    return build_plan(
        "vidur",
        request,
        [origin.source for origin, _ in tables],
        [rows for _, rows in tables],
        notes=notes,
    )


def _compute_folders(request: ImportRequest, notes: ImportNotes) -> list[tuple[Path, str]]:
    """Return the folders to read and their devices."""
    parent = request.path / "compute"
    if not parent.is_dir():
        raise InvalidRequestError.of_field("path", f"{request.path} has no folder compute/")
    wanted = _resolve_device(request.device) if request.device else ""
    folders = {path.name: path for path in sorted(parent.iterdir()) if path.is_dir()}
    if name := request.options.get("folder", ""):
        if name not in folders:
            raise InvalidRequestError.of_field(
                "options.folder", f"{parent} has {', '.join(folders)}, not {name}"
            )
        return [(folders[name], wanted or _resolve_device(name))]
    found = []
    for name, path in folders.items():
        try:
            device = _resolve_device(name)
        except UnknownDeviceError:
            notes.add(
                f"compute/{name}",
                f"no device of that name: import it with --device DEVICE --option folder={name}",
            )
            continue
        if wanted in ("", device):
            found.append((path, device))
    if not found:
        raise InvalidRequestError.of_field(
            "device", f"{parent} has {', '.join(folders) or 'nothing'}, none is {wanted or 'known'}"
        )
    return found


def _resolve_device(name: str) -> str:
    if name in all_devices():
        return name
    return find_device(_DEVICE_OF_FOLDER.get(name, name)).name


def _model_files(folder: Path, model: str) -> list[Path]:
    paths = sorted(folder.rglob("*.csv"))
    if not model:
        return paths
    names = {path: path.parent.relative_to(folder).as_posix() for path in paths}
    found = [p for p in paths if model.lower() in (names[p].lower(), p.parent.name.lower())]
    if not found:
        raise UnknownModelError.named(model, set(names.values()))
    return found


def _network_files(
    request: ImportRequest, devices: set[str], notes: ImportNotes
) -> Iterator[tuple[Path, str]]:
    parent = request.path / "network"
    if request.topology and not (parent / request.topology).is_dir():
        raise InvalidRequestError.of_field("topology", f"{parent} has no {request.topology}/")
    for folder in sorted(parent.iterdir()) if parent.is_dir() else ():
        if request.topology not in ("", folder.name):
            continue
        if folder.name not in all_topologies() and not request.topology:
            notes.add(f"network/{folder.name}", "no topology of that name")
            continue
        if find_topology(folder.name).device not in devices:
            continue
        for path in sorted(folder.glob("*.csv")):
            if path.stem in _COLLECTIVES:
                yield path, folder.name
            else:
                notes.add(f"network/{folder.name}/{path.name}", "not a collective known here")


IMPORTER = Importer(
    name="vidur",
    summary="Vidur's profiling folder: compute/<device>/<model>/*.csv and network/<topology>/*.csv",
    load=_load,
    options={"folder": "read this folder of compute/ as the profile of --device"},
)
