"""The simulator over gRPC."""

import grpc

from foretoken.domain.ports import SimulatorPort
from foretoken.wire.rpcs import SimulatorRpcs
from foretoken.wire.serving import Servicer, register_service

SERVICE = SimulatorRpcs.descriptor()
SERVICE_NAME: str = SERVICE.full_name


class SimulatorServicer(Servicer, rpcs=SimulatorRpcs):
    """Answers the simulator's rpcs."""


def register(server: grpc.Server, port: SimulatorPort) -> None:
    """Let a server answer for this simulator."""
    register_service(server, SERVICE, SimulatorServicer(port))
