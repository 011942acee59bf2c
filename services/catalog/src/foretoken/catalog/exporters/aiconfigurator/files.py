"""The files of an export: rows collected by table, then written with their side files.

Peaks, memory and links are those of our device and topology files. The rest are corrections that
its own files give every system alike; they are not measured, and a note says so.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import yaml
from pyarrow import parquet

from foretoken.catalog.exporters.aiconfigurator.rows import Written
from foretoken.catalog.importers.aiconfigurator.formats import FAMILIES
from foretoken.domain.hardware.device import DeviceSpec, find_device
from foretoken.domain.hardware.topology import all_topologies
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.name import path_inside
from foretoken.domain.units import US_PER_MS, US_PER_S

# What its authors call the products that we name more exactly.
_SYSTEMS = {
    "a100_sxm_80": "a100_sxm",
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    "rtx_pro_6000": "rtx_pro_6000_server",
}
_PEAKS = {
    "bfloat16_tc_flops": DType.BF16,
    "int8_tc_flops": DType.INT8,
    "fp8_tc_flops": DType.FP8,
    "fp4_tc_flops": DType.FP4,
}
# CUDA compute capability. Source: NVIDIA CUDA C++ programming guide, table of compute capabilities.
_SM_OF_ARCHITECTURE = {"volta": 70, "ampere": 80, "ada": 89, "hopper": 90, "blackwell": 100}
_SM_OF_DEVICE = {
    **dict.fromkeys(("a10", "a40"), 86),
    **dict.fromkeys(("b300", "gb300"), 103),
    **dict.fromkeys(("rtx_5090", "rtx_pro_6000"), 120),
}
# Alike in the system files of every NVIDIA device there. Source: systems/h200_sxm.yaml.
_BANDWIDTH_RATIO = 0.8
_CONSTANT_LATENCY_S = 3e-6
_P2P_LATENCY_S = 1e-5
_NCCL_BYTES = {1: 0, 2: 358612992, 4: 411041792, 8: 411041792}
_OTHER_BYTES = 3758096384


def system_of_device(device: str) -> str:
    """Return the name of a device's system there."""
    return _SYSTEMS.get(device, device)


def format_system(device_name: str, topology_name: str, nccl_version: str) -> str:
    """Return the text of the file; `topology_name` and `nccl_version` may be empty."""
    device = find_device(device_name)
    content: dict[str, Any] = {
        "data_dir": f"data/{system_of_device(device.name)}",
        "gpu": _gpu(device),
        "node": _node(device, topology_name),
        "misc": {"nccl_mem": _NCCL_BYTES, "other_mem": _OTHER_BYTES},
    }
    if nccl_version:
        content["misc"]["nccl_version"] = nccl_version
    return yaml.safe_dump(content, sort_keys=False)


def _gpu(device: DeviceSpec) -> dict[str, Any]:
    capability = _SM_OF_DEVICE.get(device.name, _SM_OF_ARCHITECTURE.get(device.architecture))
    return {
        "mem_bw": round(device.memory_bandwidth_bytes_per_s),
        "mem_bw_empirical_scaling_factor": _BANDWIDTH_RATIO,
        "mem_empirical_constant_latency": _CONSTANT_LATENCY_S,
        "mem_capacity": round(device.memory_bytes),
        **{
            name: round(device.peak_flops_per_s[dtype])
            for name, dtype in _PEAKS.items()
            if dtype in device.peak_flops_per_s
        },
        "power": round(device.tdp_w),
        **({"sm_version": capability} if capability else {}),
    }


def _node(device: DeviceSpec, topology_name: str) -> dict[str, Any]:
    found = [
        topology
        for topology in all_topologies().values()
        if topology.name == topology_name or (not topology_name and topology.device == device.name)
    ]
    if not found:
        return {"num_gpus_per_node": 1}
    links = found[0]
    return {
        "num_gpus_per_node": links.devices_per_node,
        "inter_node_bw": round(links.inter_node.bandwidth_bytes_per_s),
        "intra_node_bw": round(links.intra_node.bandwidth_bytes_per_s),
        "p2p_latency": max(_P2P_LATENCY_S, links.intra_node.latency_us / US_PER_S),
    }


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
