"""Which GPUs the nodes of a cluster have, by the names of the device files."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from foretoken.domain.hardware.device import DeviceSpec, all_devices
from foretoken.profiler.cluster.api import Resource
from foretoken.profiler.cluster.spec import KubernetesSpec

CPU = "cpu"


def product_labels(device: DeviceSpec) -> tuple[str, ...]:
    """Return the values of the product label that stand for a device.

    Source: NVIDIA's GPU feature discovery writes the driver's name with dashes for spaces. What no
    label may hold, such as the parentheses of `Intel(R) Arc(TM)`, is a dash too.
    """
    return tuple(sorted({re.sub(r"[^\w.-]+", "-", name) for name in device.vendor_names}))


def count_devices(nodes: Iterable[Resource], spec: KubernetesSpec) -> Mapping[str, int]:
    """Return how many of each device the nodes offer; GPUs without a device file do not count."""
    devices = {
        label: device.name for device in all_devices().values() for label in product_labels(device)
    }
    counts: Counter[str] = Counter()
    for node in nodes:
        name = devices.get(product_of_node(node, spec))
        if name is not None:
            counts[name] += num_gpus(node, spec)
    return {name: count for name, count in sorted(counts.items()) if count}


def product_of_node(node: Resource, spec: KubernetesSpec) -> str:
    """Return the product label of a node, empty where it has none."""
    return str((node["metadata"].get("labels") or {}).get(spec.product_label, ""))


def num_gpus(node: Resource, spec: KubernetesSpec) -> int:
    """Return how many GPUs a node offers to pods."""
    offered = (node.get("status") or {}).get("allocatable") or {}
    return int(offered.get(spec.gpu_resource, 0))
