"""The profiler over gRPC."""

import grpc

from foretoken.domain.ports import ProfilerPort
from foretoken.wire.rpcs import ProfilerRpcs
from foretoken.wire.serving import Servicer, register_service

SERVICE = ProfilerRpcs.descriptor()
SERVICE_NAME: str = SERVICE.full_name


class ProfilerServicer(Servicer, rpcs=ProfilerRpcs):
    """Answers the profiler's rpcs."""


def register(server: grpc.Server, port: ProfilerPort) -> None:
    """Let a server answer for this profiler."""
    register_service(server, SERVICE, ProfilerServicer(port))
