"""A table of calls of one operator, and what the calls of a query run on."""

from dataclasses import dataclass

from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import topology_of_device
from foretoken.domain.measurements.estimate import DType, OperatorTable, Phase
from foretoken.domain.operators.spec.operator import OperatorSpec
from foretoken.predictor.roofline import Columns, Target


@dataclass(frozen=True, slots=True)
class Call:
    """A table of calls, and what they run on."""

    spec: OperatorSpec
    table: OperatorTable
    columns: Columns
    target: Target


def find_target(
    spec: OperatorSpec, device: str, topology: str, dtype: DType, phase: Phase
) -> Target:
    """Return the target; a collective without a named topology takes the device's first.

    Raises:
        UnknownDeviceError, UnknownTopologyError: no file of that name.

    """
    found = find_device(device)
    links = None
    if spec.is_collective:
        links = topology_of_device(found.name, topology)
    return Target(device=found, dtype=dtype, phase=phase, topology=links)
