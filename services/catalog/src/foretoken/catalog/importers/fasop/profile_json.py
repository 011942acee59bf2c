"""`profile_*.json`: times of every module, layer and rank, from which tables are made."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from foretoken.catalog.importers.fasop.columns import COLUMNS, Column
from foretoken.catalog.importers.fasop.profile_rows import Profile
from foretoken.catalog.sources.file import refuse
from foretoken.domain.models.architecture import ModelArchitecture

_MODULE = re.compile(r"model_layers_\d+_(\w+)")
_STATISTICS = ("median", "mean", "min", "max", "std")
_REQUIRED = ("median", "mean")
_COUNT_MAX = 10**6
# How the file and the presets name what a model is made of.
_SIZES = {
    "hidden_size": "hidden",
    "intermediate_size": "intermediate",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
}


def is_profile(content: Any) -> bool:
    """Return whether a JSON value is a profile."""
    return isinstance(content, dict) and {"config", "combined_timing"} <= set(content)


def read_setting(content: Mapping[str, Any], name: str, path: Path) -> int:
    """Return a count of the profile's configuration.

    Raises:
        InvalidRequestError: it is missing or no count.

    """
    value = _mapping(content, "config", path).get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _COUNT_MAX:
        refuse(path, f"config.{name}: {value!r} is no count")
    return value


def model_name(content: Mapping[str, Any], path: Path) -> str:
    """Return the model's name on Hugging Face.

    Raises:
        InvalidRequestError: it is missing.

    """
    name = _mapping(content, "config", path).get("model_name")
    if not isinstance(name, str):
        refuse(path, "config.model_name is missing")
    return name


def read_profile(content: Mapping[str, Any], profile: Profile) -> pa.Table:
    """Read the combined times: a row per module, layer and rank, means over the steps measured.

    Raises:
        InvalidRequestError: the sizes are not the model's, or an entry cannot be used.

    """
    path = profile.path
    _check_sizes(content, profile.model, path)
    micro_batch = read_setting(content, "micro_batch_size", path)
    num_warmups = read_setting(content, "warmup_steps", path)
    num_samples = max(read_setting(content, "profile_steps", path) - num_warmups, 1)
    found: dict[Column, list[tuple[int, dict[str, float]]]] = {}
    for place, (column, times) in enumerate(_entries(content, path)):
        found.setdefault(column, []).append((place, times))
    pieces = []
    for column, entries in found.items():
        rows = np.array([place for place, _ in entries])
        times_ms = {
            statistic: np.array([times.get(statistic, np.nan) for _, times in entries])
            for statistic in _STATISTICS
        }
        micro_batches = np.full(len(rows), micro_batch)
        pieces.append(
            profile.rows_of(column, micro_batches, times_ms, rows, num_samples=num_samples)
        )
    return pa.concat_tables(pieces)


def _entries(content: Mapping[str, Any], path: Path) -> Iterator[tuple[Column, dict[str, float]]]:
    """Yield the entries in the order of a forward pass: embedding, modules, head."""
    combined = _mapping(content, "combined_timing", path)
    modules = combined.get("modules")
    if not isinstance(modules, list):
        refuse(path, "combined_timing.modules is no list")
    by_module = {column.module: column for column in COLUMNS}
    yield from _single(combined, by_module["embedding"], path)
    for index, entry in enumerate(modules):
        place = f"combined_timing.modules[{index}]"
        name = entry.get("name") if isinstance(entry, dict) else None
        match = _MODULE.fullmatch(name) if isinstance(name, str) else None
        if match is None or match[1] not in by_module:
            refuse(path, f"{place}: {name!r} is no module of a layer")
        yield by_module[match[1]], _times(entry, place, path)
    yield from _single(combined, by_module["lm_head"], path)


def _single(
    combined: Mapping[str, Any], column: Column, path: Path
) -> Iterator[tuple[Column, dict[str, float]]]:
    """Yield the one entry of a module outside the layers; none was timed where its count is 0."""
    entry = _mapping(combined, column.module, path)
    if entry.get("count"):
        yield column, _times(entry, column.module, path)


def _times(entry: Mapping[str, Any], place: str, path: Path) -> dict[str, float]:
    times = {}
    for statistic in _STATISTICS:
        value = entry.get(f"{statistic}_ms")
        if isinstance(value, int | float) and not isinstance(value, bool):
            times[statistic] = float(value)
        elif value is not None or statistic in _REQUIRED:
            refuse(path, f"{place}: {statistic}_ms: {value!r} is not a number")
    return times


def _check_sizes(content: Mapping[str, Any], model: ModelArchitecture, path: Path) -> None:
    for theirs, ours in _SIZES.items():
        value, expected = read_setting(content, theirs, path), getattr(model, ours)
        if value != expected:
            refuse(path, f"config.{theirs} is {value}; {model.name} has {expected}")


def _mapping(content: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    found = content.get(name)
    if not isinstance(found, dict):
        refuse(path, f"{name} is no object")
    return found
