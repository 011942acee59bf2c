"""Profiles as files: `profile_*.json` of modules, layers and ranks, and the tables made of it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from foretoken.catalog.dims import Floats
from foretoken.catalog.importers.fasop.profile_rows import (
    COLUMNS,
    LEGACY_EMBEDDING,
    LEGACY_HEAD,
    LEGACY_LAYER,
    Column,
    Profile,
)
from foretoken.catalog.sources.content import parse_npy, read_zip_members
from foretoken.catalog.sources.file import SourceFile, refuse
from foretoken.domain.models.architecture import ModelArchitecture

_MEMBER = "data.npy"
# FASOP profiles micro batches up to 128 samples.
_ROWS_MAX = 16


def read_table(profile: Profile) -> pa.Table:
    """Read an `.npz`: a row per micro batch size 1, 2, 4, ..., a column per module, in ms.

    Raises:
        InvalidRequestError: it holds anything but one array of that form.

    """
    data = read_table_ms(profile.source, profile.path)
    rows = np.arange(len(data))
    return pa.concat_tables(
        # The one time there is, a mean over layers, ranks and steps, stands as median and mean.
        profile.rows_of(column, 2**rows, {"median": times, "mean": times}, rows)
        for column, times in zip(COLUMNS, data.T, strict=True)
    )


def read_table_ms(source: SourceFile, path: Path) -> Floats:
    """Return the array of an `.npz`: a row per micro batch size 1, 2, 4, ..., by column, in ms.

    Raises:
        InvalidRequestError: it holds anything but one array of that form.

    """
    members = read_zip_members(source, path)
    if set(members) != {_MEMBER}:
        refuse(path, f"holds {sorted(members)}, not one array named 'data'")
    data = read_numbers(members[_MEMBER], path)
    if data.shape[1:] != (len(COLUMNS),) or not 1 <= len(data) <= _ROWS_MAX:
        refuse(path, f"an array of shape {data.shape}, not of 1 to {_ROWS_MAX} x {len(COLUMNS)}")
    return data


def read_legacy(profile: Profile) -> pa.Table:
    """Read an `.npy`: embedding, every layer, head; ms of one sample.

    Raises:
        InvalidRequestError: it is no array of that form.

    """
    data = read_numbers(profile.source.content, profile.path)
    expected = profile.model.num_layers + 2
    if data.shape != (expected,):
        refuse(
            profile.path,
            f"an array of shape {data.shape}; {profile.model.name} has embedding, "
            f"{profile.model.num_layers} layers and head: ({expected},)",
        )
    places = np.arange(expected)
    # One measured layer is written for all of them.
    layers = places[1:2] if np.unique(data[1:-1]).size == 1 else places[1:-1]
    parts = ((LEGACY_EMBEDDING, places[:1]), (LEGACY_LAYER, layers), (LEGACY_HEAD, places[-1:]))
    return pa.concat_tables(
        profile.rows_of(
            column,
            np.ones(len(rows), dtype=np.int64),
            {"median": data[rows], "mean": data[rows]},
            rows,
        )
        for column, rows in parts
    )


def read_numbers(content: bytes, path: Path) -> Floats:
    """Return the array of an `.npy`.

    Raises:
        InvalidRequestError: it is none, or not of numbers.

    """
    array = parse_npy(content, path)
    if array.dtype.kind not in "fiu":
        refuse(path, f"an array of {array.dtype}, not of numbers")
    return array.astype(np.float64)


_MODULE = re.compile(r"model_layers_(\d+)_(\w+)")
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
    for place, (column, _, times) in enumerate(list_entries(content, path)):
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


def list_entries(
    content: Mapping[str, Any], path: Path, required: Sequence[str] = _REQUIRED
) -> Iterator[tuple[Column, int, dict[str, float]]]:
    """Yield the entries in the order of a forward pass: embedding, modules, head.

    Each with its layer (-1: outside the layers) and ms by statistic, of which some are `required`.

    Raises:
        InvalidRequestError: an entry is no module, or lacks a statistic.

    """
    combined = _mapping(content, "combined_timing", path)
    modules = combined.get("modules")
    if not isinstance(modules, list):
        refuse(path, "combined_timing.modules is no list")
    by_module = {column.module: column for column in COLUMNS}
    yield from _single(combined, by_module["embedding"], path, required)
    for index, entry in enumerate(modules):
        place = f"combined_timing.modules[{index}]"
        name = entry.get("name") if isinstance(entry, dict) else None
        match = _MODULE.fullmatch(name) if isinstance(name, str) else None
        if match is None or match[2] not in by_module:
            refuse(path, f"{place}: {name!r} is no module of a layer")
        yield by_module[match[2]], int(match[1]), _times(entry, place, path, required)
    yield from _single(combined, by_module["lm_head"], path, required)


def _single(
    combined: Mapping[str, Any], column: Column, path: Path, required: Sequence[str]
) -> Iterator[tuple[Column, int, dict[str, float]]]:
    """Yield the one entry of a module outside the layers, if any was timed: its count is not 0."""
    entry = _mapping(combined, column.module, path) if column.module in combined else {}
    if entry.get("count"):
        yield column, -1, _times(entry, column.module, path, required)


def _times(
    entry: Mapping[str, Any], place: str, path: Path, required: Sequence[str]
) -> dict[str, float]:
    times = {}
    for statistic in _STATISTICS:
        value = entry.get(f"{statistic}_ms")
        if isinstance(value, int | float) and not isinstance(value, bool):
            times[statistic] = float(value)
        elif value is not None or statistic in required:
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
