"""A command is a request: logs and calls of services for it have its id, and are of its span."""

import json
import logging
import sys
from collections.abc import Callable

from foretoken.app.config import AppConfig, LogConfig, TracingConfig
from foretoken.app.telemetry.spans import start_tracing
from foretoken.wire import trace

_TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"


class _TextFormatter(logging.Formatter):
    """A line for people, the trace id at its end."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        text = super().formatMessage(record)
        request = trace.current()
        return text if request is None else f"{text} trace_id={request.trace_id}"


class _JsonFormatter(logging.Formatter):
    """One JSON object a line, as log collectors in a cluster expect."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request := trace.current()) is not None:
            entry |= {"trace_id": request.trace_id, "span_id": request.span_id}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def configure_logging(config: LogConfig, *, quiet: bool = False) -> None:
    """Send logs to stderr, as text or as JSON lines.

    `quiet` keeps warnings and worse only, without ids: all are about the one command.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(log_formatter(config, quiet=quiet))
    level = "WARNING" if quiet else config.level.upper()
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # It warns of every try of one call; callers say that they try again, and why.
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)


def log_formatter(config: LogConfig, *, quiet: bool = False) -> logging.Formatter:
    """Return what makes lines, in the thread that works for the request."""
    if config.format == "json":
        return _JsonFormatter()
    return (logging.Formatter if quiet else _TextFormatter)(_TEXT)


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
