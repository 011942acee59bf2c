"""Where log lines go. Libraries only log; this is where logging is set up."""

import json
import logging
import sys

from foretoken.app.config import LogConfig


class _JsonFormatter(logging.Formatter):
    """One JSON object a line, as log collectors in a cluster expect."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def configure_logging(config: LogConfig, *, quiet: bool = False) -> None:
    """Send logs to stderr, as text or as JSON lines; `quiet` keeps warnings and worse only."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    handler.setFormatter(_JsonFormatter() if config.format == "json" else text)
    level = "WARNING" if quiet else config.level.upper()
    logging.basicConfig(level=level, handlers=[handler], force=True)
