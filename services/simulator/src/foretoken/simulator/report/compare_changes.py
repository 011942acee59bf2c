"""What differs between the configurations of several runs, by dotted path."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Longer lists, such as the requests of a trace, are told by their length and content.
_MAX_ENTRIES = 16
_DIGEST = 6
# What a configuration has not.
ABSENT = "-"
# The keys of a model follow from its name.
_MODEL, _MODEL_NAME = "model.", "model.name"


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A key of which not all runs have the same value; `values` as text, one per run."""

    path: str
    values: tuple[str, ...]


def list_changes(configurations: Sequence[str]) -> tuple[Change, ...]:
    """Return what differs between configurations (JSON), in the order of their keys.

    Of models with different names the name alone is told, which stands for all that they are.
    """
    flat = [dict(_flatten(json.loads(text) if text else {}, "")) for text in configurations]
    paths = dict.fromkeys(path for entries in flat for path in entries)
    changes = [
        Change(path=path, values=tuple(entries.get(path, ABSENT) for entries in flat))
        for path in paths
    ]
    differing = [change for change in changes if len(set(change.values)) > 1]
    is_renamed = any(_is_model_name(change.path) for change in differing)
    return tuple(
        change
        for change in differing
        if not is_renamed or _is_model_name(change.path) or _MODEL not in f".{change.path}"
    )


def _is_model_name(path: str) -> bool:
    return path == _MODEL_NAME or path.endswith(f".{_MODEL_NAME}")


def _flatten(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flatten(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        if len(value) > _MAX_ENTRIES:
            digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
            yield path, f"{len(value):,} entries, {digest[:_DIGEST]}"
            return
        for place, item in enumerate(value):
            yield from _flatten(item, f"{path}.{place}")
    else:
        yield path, _describe(value)


def _describe(value: Any) -> str:
    """Return a value as a scenario file would have it; nothing where it is empty."""
    if value is None or value in ("", [], {}):
        return ABSENT
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list) and len(value) <= _MAX_ENTRIES:
        return ", ".join(_describe(item) for item in value)
    if isinstance(value, list):
        digest = hashlib.sha256(json.dumps(value).encode()).hexdigest()
        return f"{len(value):,} entries, {digest[:_DIGEST]}"
    return f"{value:.10g}" if isinstance(value, float) else str(value)
