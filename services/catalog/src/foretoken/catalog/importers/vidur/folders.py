"""Which folders of a Vidur profile belong to the device, topology and model asked for."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from foretoken.catalog.importing import ImportNotes, ImportRequest, name_model
from foretoken.domain.errors import (
    InvalidRequestError,
    UnknownDeviceError,
    UnknownModelError,
    UnknownTopologyError,
)
from foretoken.domain.hardware.device import all_devices, find_device
from foretoken.domain.hardware.topology import find_topology

# Vidur's short names of the products its authors profiled.
DEVICE_OF_FOLDER = {"a100": "a100_sxm_80", "h100": "h100_sxm"}
COLLECTIVES = ("all_reduce", "send_recv")
# Vidur reads the second, its profiler writes the first.
_HOST_STEMS = ("cpu_overhead", "cpu_overheads")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFolder:
    """A folder of files of one model; `model` is as rows carry it, None where no folder says."""

    folder: Path
    device: str
    topology: str | None = None
    model: str | None = None


def find_compute_folders(request: ImportRequest, notes: ImportNotes) -> list[tuple[Path, str]]:
    """Return the folders of compute/ to read and their devices, one folder a device.

    Raises:
        InvalidRequestError: there is no such folder.
        UnknownDeviceError: the request names a device without a file.

    """
    parent = request.path / "compute"
    if not parent.is_dir():
        raise InvalidRequestError.of_field(
            "path",
            f"{request.path} has no folder compute/; give Vidur's data/profiling, which has",
        )
    wanted = _resolve_device(request.device) if request.device else ""
    folders = {path.name: path for path in sorted(parent.iterdir()) if path.is_dir()}
    if name := request.options.get("folder", ""):
        if name not in folders:
            raise InvalidRequestError.of_field(
                "options.folder", f"{parent} has {', '.join(folders)}, not {name}"
            )
        return [(folders[name], wanted or _resolve_device(name))]
    found: dict[str, Path] = {}
    for name, path in folders.items():
        try:
            device = _resolve_device(name)
        except UnknownDeviceError:
            notes.add(f"compute/{name}", f"not read: {_explain(name, folders)}")
            continue
        if device in found:
            text = f"not read, or rows would be there twice: {found[device].name} is {device} too"
            notes.add(f"compute/{name}", f"{text}; choose it with --option folder={name}")
        elif wanted in ("", device):
            found[device] = path
    if not found:
        raise InvalidRequestError.of_field(
            "device", f"{parent} has {', '.join(folders) or 'nothing'}, none is {wanted or 'known'}"
        )
    return [(path, device) for device, path in found.items()]


def _explain(name: str, folders: dict[str, Path]) -> str:
    """Say why a folder of no device is left out, and how to read it."""
    plain = next((other for other in folders if other != name and name.startswith(other)), None)
    if plain is None:
        return f"no device of that name; read it with --device DEVICE --option folder={name}"
    return (
        f"a version of {plain}, whose rows would be there twice;"
        f" read it instead with --device {plain} --option folder={name}"
    )


def _resolve_device(name: str) -> str:
    if name in all_devices():
        return name
    return find_device(DEVICE_OF_FOLDER.get(name, name)).name


def list_model_folders(
    folder: Path, device: str, topology: str | None = None
) -> Iterator[ModelFolder]:
    """Yield the folders of models under one, as <org>/<model>, or <model> as of old."""
    for found in sorted({path.parent for path in folder.rglob("*.csv")}):
        name = found.relative_to(folder).as_posix()
        model = name_model(name) if found != folder else None
        yield ModelFolder(folder=found, device=device, topology=topology, model=model)


def select_model(folders: list[ModelFolder], wanted: str) -> list[ModelFolder]:
    """Return the folders that may hold a model: by its preset, its own name or the last part of it.

    Raises:
        UnknownModelError: there is none.

    """
    name = name_model(wanted)
    found = [f for f in folders if f.model is None or is_model(f.model, name)]
    if not found:
        raise UnknownModelError.named(wanted, {f.model for f in folders if f.model})
    return found


def is_model(model: str, wanted: str) -> bool:
    """Return whether a row's model is the one wanted."""
    return wanted.lower() in (model.lower(), model.lower().rsplit("/", 1)[-1])


def find_network_files(
    request: ImportRequest, devices: set[str], notes: ImportNotes
) -> Iterator[tuple[Path, str]]:
    """Yield the files of collectives and their topologies.

    Raises:
        InvalidRequestError: the topology asked for has no folder.

    """
    parent = request.path / "network"
    if request.topology and not (parent / request.topology).is_dir():
        raise InvalidRequestError.of_field("topology", f"{parent} has no {request.topology}/")
    for folder, topology in _topology_folders(parent, request, devices, notes):
        for path in sorted(folder.glob("*.csv")):
            if path.stem in COLLECTIVES:
                yield path, topology
            else:
                notes.add(f"network/{folder.name}/{path.name}", "not a collective known here")


def find_host_folders(
    request: ImportRequest, devices: set[str], notes: ImportNotes
) -> Iterator[ModelFolder]:
    """Yield the folders of cpu_overhead/<topology>/<org>/<model>."""
    parent = request.path / "cpu_overhead"
    for folder, topology in _topology_folders(parent, request, devices, notes):
        yield from list_model_folders(folder, find_topology(topology).device, topology)


def is_host_file(path: Path) -> bool:
    """Return whether a file is named as Vidur names the times of the host."""
    return path.stem in _HOST_STEMS


def _topology_folders(
    parent: Path, request: ImportRequest, devices: set[str], notes: ImportNotes
) -> Iterator[tuple[Path, str]]:
    for folder in sorted(parent.iterdir()) if parent.is_dir() else ():
        if request.topology not in ("", folder.name) or not folder.is_dir():
            continue
        try:
            topology = find_topology(folder.name)
        except UnknownTopologyError:
            if request.topology:
                raise
            notes.add(f"{parent.name}/{folder.name}", "not read: no topology of that name")
            continue
        if topology.device in devices:
            yield folder, topology.name
