"""`{model}_{gpu}_{tp}.npz` tables, and the legacy `.npy` ones."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from foretoken.catalog.array import Floats
from foretoken.catalog.importers.fasop.columns import (
    COLUMNS,
    LEGACY_EMBEDDING,
    LEGACY_HEAD,
    LEGACY_LAYER,
)
from foretoken.catalog.importers.fasop.profile_rows import Profile
from foretoken.catalog.sources.content import parse_npy, read_zip_members
from foretoken.catalog.sources.file import refuse

_MEMBER = "data.npy"
# FASOP profiles micro batches up to 128 samples.
_ROWS_MAX = 16


def read_table(profile: Profile) -> pa.Table:
    """Read an `.npz`: a row per micro batch size 1, 2, 4, ..., a column per module, in ms.

    Raises:
        InvalidRequestError: it holds anything but one array of that form.

    """
    members = read_zip_members(profile.source, profile.path)
    if set(members) != {_MEMBER}:
        refuse(profile.path, f"holds {sorted(members)}, not one array named 'data'")
    data = _numbers(parse_npy(members[_MEMBER], profile.path), profile.path)
    if data.shape[1:] != (len(COLUMNS),) or not 1 <= len(data) <= _ROWS_MAX:
        refuse(
            profile.path,
            f"an array of shape {data.shape}, not of 1 to {_ROWS_MAX} rows of {len(COLUMNS)}",
        )
    rows = np.arange(len(data))
    return pa.concat_tables(
        # The one time there is, a mean over layers, ranks and steps, stands as median and mean.
        profile.rows_of(column, 2**rows, {"median": times, "mean": times}, rows)
        for column, times in zip(COLUMNS, data.T, strict=True)
    )


def read_legacy(profile: Profile) -> pa.Table:
    """Read an `.npy`: embedding, every layer, head; ms of one sample.

    Raises:
        InvalidRequestError: it is no array of that form.

    """
    data = _numbers(parse_npy(profile.source.content, profile.path), profile.path)
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


def _numbers(array: npt.NDArray[Any], path: Path) -> Floats:
    if array.dtype.kind not in "fiu":
        refuse(path, f"an array of {array.dtype}, not of numbers")
    return array.astype(np.float64)
