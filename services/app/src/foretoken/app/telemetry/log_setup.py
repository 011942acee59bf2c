"""Where logs go, and how a line looks: with the id of the request that it is about."""

import json
import logging
import sys

from foretoken.app.config import LogConfig
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


def log_formatter(config: LogConfig, *, quiet: bool = False) -> logging.Formatter:
    """Return what makes lines, in the thread that works for the request."""
    if config.format == "json":
        return _JsonFormatter()
    return (logging.Formatter if quiet else _TextFormatter)(_TEXT)
