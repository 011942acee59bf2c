"""A command is a request: calls of services for it have its id, and is a part of its span."""

from collections.abc import Callable

from foretoken.app.config import TracingConfig
from foretoken.app.telemetry.spans import start_tracing
from foretoken.wire import trace


def trace_command(config: TracingConfig, name: str) -> Callable[[], None]:
    """Begin the request of a command, and return what ends it.

    Raises:
        InvalidRequestError: spans are to be sent, and OpenTelemetry is not installed.

    """
    stop = start_tracing(config, "command")
    found = trace.begin_request(f"foretoken {name}", trace.Kind.INTERNAL)
    trace.enter(found.context)

    def end() -> None:
        found.end()
        trace.enter(None)
        stop()

    return end
