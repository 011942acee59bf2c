"""What commands print for programs: JSON and CSV with stable keys, errors, and the time left."""

import csv
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final

from foretoken.domain.errors import ForetokenError, InvalidRequestError
from foretoken.domain.units import describe_seconds

DATA_OUTPUTS: Final = ("json", "csv")
OUTPUTS: Final = ("table", *DATA_OUTPUTS)
# Less tells little of how long the rest takes.
_LEAST_RATIO: Final = 0.02


@cache
def _keys_by_title() -> Mapping[str, str]:
    # What every metric is of takes a tenth of a second to import; few commands print by its keys.
    from foretoken.domain.metrics.registry import METRICS

    # Some titles are of several metrics; those are no keys of one.
    titles = Counter(metric.title for metric in METRICS.values())
    return {metric.title: name for name, metric in METRICS.items() if titles[metric.title] == 1}


def key_of(title: str) -> str:
    """Return the key of a column: the name of its metric, else its title as a name."""
    found = _keys_by_title().get(title)
    if found:
        return found
    text = title.replace("µ", "u").replace("%", "percent")
    return re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_").lower()


def write_json(content: Any) -> None:
    """Print plain data as JSON."""
    sys.stdout.write(json.dumps(content, indent=2) + "\n")


def write_csv(content: Any) -> None:
    """Print plain data as CSV: a row for each object of a list, else one of the single values.

    Lists within them are left out; JSON has them.
    """
    records = content if isinstance(content, list) else [content]
    rows = [dict(flatten(record)) for record in records]
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(sys.stdout, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def flatten(content: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the single values in plain data with their dotted paths; no lists."""
    if not isinstance(content, Mapping):
        yield path or "value", content
        return
    for key, value in content.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping):
            yield from flatten(value, name)
        elif not isinstance(value, list):
            yield name, value


def describe_error(error: ForetokenError) -> dict[str, Any]:
    """Return an error as the HTTP API has it, without the status."""
    document: dict[str, Any] = {"reason": error.reason, "detail": error.message}
    if isinstance(error, InvalidRequestError) and error.violations:
        document["errors"] = [
            {"field": one.field, "detail": one.description} for one in error.violations
        ]
    return document


class TimeLeft:
    """How long work takes yet, by how far it came since it was first looked at."""

    def __init__(self) -> None:
        """Begin with nothing seen."""
        self._start: tuple[float, float] | None = None

    def describe(self, ratio: float, now_s: float) -> str:
        """Return the time left in words; empty where too little was done to tell."""
        # What was done before, of work that goes on, says nothing of its speed.
        if self._start is None or ratio < self._start[0]:
            self._start = (ratio, now_s)
        first, start_s = self._start
        if ratio - first < _LEAST_RATIO or ratio >= 1:
            return ""
        left_s = (now_s - start_s) * (1 - ratio) / (ratio - first)
        return f"about {describe_seconds(max(1.0, left_s))} left"
