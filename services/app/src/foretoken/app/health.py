"""A server's health, over gRPC."""

import threading
from collections.abc import Callable

from grpc_health.v1 import health


class HealthServicer(health.HealthServicer):
    """Health whose watchers may leave while it changes.

    grpcio's own waits, with its lock held, for a watcher to take an answer, while the one thread
    that could say the watcher has gone waits for that lock: clients and server that stop in the
    same moment would never end.
    """

    def _on_close_callback(
        self, send_response_callback: Callable[..., None], service: str
    ) -> Callable[[], None]:
        forget = super()._on_close_callback(send_response_callback, service)
        return lambda: threading.Thread(target=forget, daemon=True).start()
