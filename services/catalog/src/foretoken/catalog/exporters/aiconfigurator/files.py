"""The files of an export: rows collected by table, then written with their side files."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import yaml
from pyarrow import parquet

from foretoken.catalog.exporters.aiconfigurator.system_file import format_system, system_of_device
from foretoken.catalog.exporters.aiconfigurator.writer import Written
from foretoken.catalog.importers.aiconfigurator.formats import FAMILIES
from foretoken.domain.hardware.device import find_device
from foretoken.domain.name import path_inside
from foretoken.domain.units import US_PER_MS

_PROVENANCE = "collected"
_ORDER = "order"
# What rows say of themselves, as their collectors write it.
_FRAMEWORKS = {"trtllm": "TRTLLM", "vllm": "VLLM", "sglang": "SGLang", "nccl": "TRTLLM"}


@dataclass(frozen=True, order=True, slots=True)
class Placement:
    """The file that rows belong to."""

    device: str
    backend: str
    version: str
    table: str

    @property
    def folder(self) -> Path:
        """The folder under the systems folder."""
        system = system_of_device(self.device)
        return Path("data") / system / FAMILIES[self.table] / self.backend / self.version


class TableFiles:
    """Collects rows, then writes every file."""

    def __init__(self) -> None:
        self._pieces: dict[Placement, list[pa.Table]] = {}
        self._topologies: dict[str, str] = {}
        self.num_rows = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """What the files say that nobody measured."""
        devices = sorted({placement.device for placement in self._pieces})
        return tuple(
            f"{system_of_device(device)}.yaml: corrections of bandwidth, latency and memory are"
            " AIConfigurator's own defaults, not measured"
            for device in devices
        )

    def add(self, written: Written, placement: Placement) -> None:
        """Take the rows of a group."""
        group = written.group
        if topology := group.texts["topology"]:
            self._topologies.setdefault(placement.device, topology)
        device = find_device(placement.device)
        values: dict[str, object] = {
            "framework": _FRAMEWORKS[placement.backend],
            "version": placement.version,
            "device": device.vendor_names[0] if device.vendor_names else device.name,
            "op_name": written.op_name,
            "kernel_source": written.kernel or group.texts["kernel"],
            **written.columns,
            "latency": group.latency_us / US_PER_MS,
            "power": group.power_w,
            _ORDER: group.order,
        }
        columns = {name: _column(value, group.num_rows) for name, value in values.items()}
        self._pieces.setdefault(placement, []).append(pa.table(columns))
        self.num_rows += group.num_rows

    def save(self, root: Path) -> tuple[str, ...]:
        """Write everything under a folder; return the files' paths relative to it."""
        names: list[str] = []
        versions: dict[Path, list[Placement]] = {}
        for placement, pieces in sorted(self._pieces.items()):
            name = (placement.folder / f"{placement.table}.parquet").as_posix()
            path = path_inside(root, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            parquet.write_table(_finish(pa.concat_tables(pieces)), path, compression="zstd")
            names.append(name)
            versions.setdefault(placement.folder, []).append(placement)
        for relative, placements in versions.items():
            name = (relative / "collection_meta.yaml").as_posix()
            path_inside(root, name).write_text(_meta(placements))
            names.append(name)
        for name, text in self._systems():
            path_inside(root, name).write_text(text)
            names.append(name)
        return tuple(sorted(names))

    def _systems(self) -> Iterator[tuple[str, str]]:
        for device in sorted({placement.device for placement in self._pieces}):
            nccl = [
                placement.version
                for placement in self._pieces
                if placement.device == device and placement.backend == "nccl"
            ]
            text = format_system(device, self._topologies.get(device, ""), max(nccl, default=""))
            yield f"{system_of_device(device)}.yaml", text


def _column(value: object, num_rows: int) -> pa.Array:
    if isinstance(value, str):
        words = pa.DictionaryArray.from_arrays(
            pa.array(np.zeros(num_rows, dtype=np.int32)), [value]
        )
        return words.cast(pa.string())
    filled: npt.NDArray[np.float64 | np.int64] = np.broadcast_to(np.asarray(value), num_rows)
    return pa.array(np.ascontiguousarray(filled))


def _finish(table: pa.Table) -> pa.Table:
    """Return the rows in the order they came, without the columns that say nothing."""
    table = table.sort_by(_ORDER).drop_columns([_ORDER])
    is_known = pc.is_finite(table["power"])
    if pc.any(is_known).as_py():
        # The reader takes 0 for unknown.
        power = pc.if_else(is_known, table["power"], 0.0)
        table = table.set_column(table.schema.get_field_index("power"), "power", power)
    else:
        table = table.drop_columns(["power"])
    return _split_widths(table) if "moe_tp_size" in table.schema.names else table


def _split_widths(table: pa.Table) -> pa.Table:
    """Return experts as shares of the widest with the same hidden size, experts and choices.

    The kernel timed has its share of an expert, and does not know of how much; the reader requests
    the whole width and the number of ranks that share it, a power of two.
    """
    width = table["inter_size"].to_numpy()
    columns = [table[name].to_numpy() for name in ("hidden_size", "num_experts", "topk")]
    keys = np.column_stack([*columns, width // (width & -width)])
    _, layer = np.unique(keys, axis=0, return_inverse=True)
    widest = np.zeros(int(layer.max()) + 1, dtype=np.int64)
    np.maximum.at(widest, layer.reshape(-1), width)
    whole = widest[layer.reshape(-1)]
    for name, column in (("inter_size", whole), ("moe_tp_size", whole // width)):
        table = table.set_column(table.schema.get_field_index(name), name, pa.array(column))
    return table


def _meta(placements: list[Placement]) -> str:
    first = placements[0]
    content = {
        "schema_version": 1,
        "provenance": _PROVENANCE,
        "runtime": {"framework": first.backend, "version": first.version},
        "tables": {placement.table: {"status": "complete"} for placement in placements},
    }
    return yaml.safe_dump(content, sort_keys=False)
