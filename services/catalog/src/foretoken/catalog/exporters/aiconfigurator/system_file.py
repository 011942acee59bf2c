"""The `<system>.yaml` of a device: what AIConfigurator must know of it next to the tables.

Peaks, memory and links are those of our device and topology files. The rest are corrections that
its own files give every system alike; they are not measured, and a note says so.
"""

from typing import Any

import yaml

from foretoken.domain.hardware.device import DeviceSpec, find_device
from foretoken.domain.hardware.topology import all_topologies
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.units import US_PER_S

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
_SM_OF_DEVICE = {"a40": 86, "b300": 103, "gb300": 103, "rtx_pro_6000": 120}
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
