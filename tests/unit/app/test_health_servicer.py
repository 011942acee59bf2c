"""Health that changes while its watchers leave."""

import threading
from collections.abc import Callable
from typing import cast

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from foretoken.app.serve import HealthServicer

_LONG_S = 5.0


class _Call:
    """A watcher's call: keeps what to do when it ends."""

    def __init__(self) -> None:
        self.has_ended: Callable[[], None] = lambda: None

    def add_callback(self, callback: Callable[[], None]) -> None:
        self.has_ended = callback


def test_a_watcher_that_leaves_during_a_change_holds_nothing_up() -> None:
    """As in grpcio: an answer waits for the thread that is told that the call has ended."""
    servicer, call = HealthServicer(), _Call()
    is_held_up: list[bool] = []

    def answer(response: HealthCheckResponse | None) -> None:
        if response and response.status == HealthCheckResponse.NOT_SERVING:
            server = threading.Thread(target=call.has_ended, daemon=True)
            server.start()
            server.join(_LONG_S)
            is_held_up.append(server.is_alive())

    servicer.Watch(HealthCheckRequest(service=""), cast("grpc.ServicerContext", call), answer)
    servicer.enter_graceful_shutdown()
    assert is_held_up == [False]
