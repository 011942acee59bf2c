"""A real gRPC server on a free loopback port, for tests."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from foretoken.client.channel_options import ChannelOptions
from foretoken.wire.serving import SERVER_OPTIONS

P = TypeVar("P")


@contextmanager
def serve(register: Callable[[grpc.Server, P], None], port: P) -> Iterator[ChannelOptions]:
    """Serve a port object, and yield how to reach it."""
    server = grpc.server(ThreadPoolExecutor(16), options=SERVER_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    register(server, port)
    number = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield ChannelOptions(address=f"127.0.0.1:{number}", deadline_s=20.0, reconnect_delay_s=0.02)
    finally:
        server.stop(grace=None).wait()
