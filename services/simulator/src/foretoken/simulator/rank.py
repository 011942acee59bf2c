"""The ranks a simulation asks about: one of every pipeline stage, for the others are alike."""

from foretoken.domain.graph import RankContext
from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import find_topology, topology_of_device
from foretoken.domain.layout import ParallelLayout
from foretoken.domain.models.architecture import ModelArchitecture


def stage_ranks(
    model: ModelArchitecture, layout: ParallelLayout, device: str, topology: str
) -> tuple[RankContext, ...]:
    """Return one rank of every pipeline stage; without a topology the device's own is taken.

    Raises:
        UnknownDeviceError: no such device.
        UnknownTopologyError: no such topology, or none of the device where more than one is used.

    """
    devices_per_node = 1
    if topology:
        devices_per_node = find_topology(topology).devices_per_node
    elif layout.num_devices > 1:
        devices_per_node = topology_of_device(find_device(device).name).devices_per_node
    return tuple(
        RankContext(model=model, layout=layout, devices_per_node=devices_per_node, stage=stage)
        for stage in range(layout.pp)
    )
