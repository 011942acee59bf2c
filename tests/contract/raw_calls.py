"""Calls of any method as bytes: what clients send that are none of ours."""

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_status import rpc_status

from foretoken.api.catalog.v1 import catalog_service_pb2
from foretoken.api.predictor.v1 import predictor_service_pb2
from foretoken.api.profiler.v1 import profiler_service_pb2
from foretoken.api.simulator.v1 import simulator_service_pb2

_FILES = (
    catalog_service_pb2,
    predictor_service_pb2,
    profiler_service_pb2,
    simulator_service_pb2,
    health_pb2,
    reflection_pb2,
)


def methods() -> list[MethodDescriptor]:
    """Return every method of every service that a server of ours has."""
    services = [one for file in _FILES for one in file.DESCRIPTOR.services_by_name.values()]
    return [method for service in services for method in service.methods]


def path(method: MethodDescriptor) -> str:
    """Return the name by which a method is called."""
    return f"/{method.containing_service.full_name}/{method.name}"


class RawCalls:
    """Streams of bytes to a server; on the wire a single message is a stream of one."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._may_end = threading.Event()
        self._calls: list[Any] = []

    def open_silent(self, method: str, *messages: bytes) -> Any:
        """Open a stream that says no more after its first messages."""
        call = self._channel.stream_stream(method)(itertools.chain(messages, self._say_nothing()))
        self._calls.append(call)
        return call

    def send(self, method: str, *messages: bytes) -> tuple[grpc.StatusCode, str]:
        """Return how a call of these messages ends."""
        call = self._channel.stream_stream(method)(iter(messages), timeout=60)
        try:
            for _ in call:
                pass
        except grpc.RpcError:
            pass
        return call.code(), call.details()

    def close(self) -> None:
        """End all streams."""
        self._may_end.set()
        for call in self._calls:
            call.cancel()

    def _say_nothing(self) -> Iterator[bytes]:
        self._may_end.wait()
        yield from ()


def retry_delay_s(call: Any) -> float:
    """Return what a refused call says about when to come again; -1 where it says nothing."""
    status = rpc_status.from_call(call)
    info = error_details_pb2.RetryInfo()
    delays = [
        info.retry_delay.ToMilliseconds() / 1_000
        for detail in (status.details if status is not None else ())
        if detail.Unpack(info)
    ]
    return max(delays, default=-1.0)
