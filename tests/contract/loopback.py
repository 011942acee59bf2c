"""A real gRPC server on a free loopback port, for tests."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import grpc
from grpc_health.v1 import health_pb2_grpc
from prometheus_client import CollectorRegistry

from foretoken.app.config import ServerConfig
from foretoken.app.serve import HealthServicer, new_server
from foretoken.app.telemetry.call_log import OFF
from foretoken.client.channel_options import ChannelOptions

P = TypeVar("P")


@contextmanager
def serve(
    register: Callable[[grpc.Server, P], None],
    port: P,
    config: ServerConfig | None = None,
    registry: CollectorRegistry | None = None,
    logged_calls: str = OFF,
) -> Iterator[ChannelOptions]:
    """Serve a port object, and yield how to reach it."""
    with ExitStack() as closing:
        server = new_server(
            config or ServerConfig(),
            registry or CollectorRegistry(),
            closing,
            logged_calls=logged_calls,
        )
        health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), server)
        register(server, port)
        number = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield ChannelOptions(
                address=f"127.0.0.1:{number}", deadline_s=20.0, reconnect_delay_s=0.02
            )
        finally:
            server.stop(grace=None).wait()
