"""A command is a request: calls of services for it have its id, and is a part of its span."""

from collections.abc import Callable

from foretoken.app.config import AppConfig, TracingConfig
from foretoken.app.telemetry.log_setup import configure_logging
from foretoken.app.telemetry.spans import start_tracing
from foretoken.wire import trace

# Their requests are those of others; they log all that is logged.
_SERVING = {"serve", "ui"}


def observe_command(config: AppConfig, name: str, *, is_quiet: bool) -> Callable[[], None]:
    """Set up the logs of a command and its request, and return what ends that.

    One that serves logs what it does; of others `is_quiet` leaves warnings.

    Raises:
        InvalidRequestError: as `trace_command`.

    """
    is_serving = name in _SERVING
    configure_logging(config.log, quiet=is_quiet and not is_serving)
    return _do_nothing if is_serving else trace_command(config.tracing, name)


def _do_nothing() -> None:
    pass


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
