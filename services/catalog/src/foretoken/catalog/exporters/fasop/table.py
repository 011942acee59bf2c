"""FASOP's tables as they fill up, and how its reader wants them.

The reader looks for `{model}_{gpu}_{tp}.npz`, takes the array `data` in ms, multiplies it by 3 for
the backward pass, and finds row r by the micro batch size 2^r and a column by its place. It fills
no gaps: a NaN would spoil every sum. Source: `ProfileDB` and `get_mbs_index` in `fasop/config.py`
of https://github.com/ai-computing/aicomp.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from foretoken.catalog.dims import Floats
from foretoken.catalog.importers.fasop.profile_rows import COLUMNS, DEVICES, PRESETS
from foretoken.catalog.importing import ImportNotes
from foretoken.domain.name import path_inside

# A model's last name counts: the first ones are short for it.
_MODEL_NAMES = {preset: name for name, preset in PRESETS.items()}
_GPU_NAMES = {
    **{device: name for name, device in DEVICES.items()},
    "a100_sxm_80": "A100",
    "h100_sxm": "H100",
    "l40s": "L40",
}


@dataclass(frozen=True, slots=True)
class TableKey:
    """Which table: an architecture on a device, split over `tp` ranks."""

    model: str
    device: str
    tp: int

    @property
    def file_name(self) -> str:
        """The name under which FASOP finds it."""
        model = _MODEL_NAMES.get(self.model, self.model.replace("_", "-"))
        gpu = _GPU_NAMES.get(self.device, self.device.upper().replace("_", ""))
        return f"{model}_{gpu}_{self.tp}.npz"


class ProfileTable:
    """The times of one table in ms, by micro batch size and column; several of one are averaged."""

    def __init__(self) -> None:
        self._times_ms: dict[tuple[int, str], list[float]] = {}

    def add(self, micro_batch: int, column: str, time_ms: float) -> None:
        """Add a time."""
        self._times_ms.setdefault((micro_batch, column), []).append(time_ms)

    def add_missing(self, other: "ProfileTable") -> None:
        """Add the times of cells that have none yet."""
        self._times_ms = {**other.times_by_cell, **self._times_ms}

    @property
    def times_by_cell(self) -> Mapping[tuple[int, str], list[float]]:
        """The times in ms, by micro batch size and column."""
        return self._times_ms

    @property
    def num_averaged(self) -> int:
        """Cells that have more than one time."""
        return sum(len(times) > 1 for times in self._times_ms.values())

    def missing_columns(self, micro_batch: int) -> tuple[str, ...]:
        """Return the columns that have no time at a micro batch size."""
        names = (column.name for column in COLUMNS)
        return tuple(name for name in names if (micro_batch, name) not in self._times_ms)

    def to_array(self) -> Floats:
        """Return the rows of micro batch sizes 1, 2, 4, ... up to the first with a gap."""
        rows: list[list[float]] = []
        while not self.missing_columns(2 ** len(rows)):
            row = 2 ** len(rows)
            rows.append([fmean(self._times_ms[row, column.name]) for column in COLUMNS])
        return np.array(rows, dtype=np.float64).reshape(-1, len(COLUMNS))


def write_tables(
    tables: Mapping[TableKey, ProfileTable], folder: Path
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Write every table that has a row; return the names of files, and remarks."""
    files: dict[str, TableKey] = {}
    notes = ImportNotes()
    for key, table in tables.items():
        data, name = table.to_array(), key.file_name
        gap = table.missing_columns(2 ** len(data))
        if not len(data):
            notes.add(name, f"not written: micro batch 1 lacks {', '.join(gap)}")
        elif name in files:
            notes.add(name, f"is {files[name].device}'s; {key.device} would have the same name")
        else:
            files[name] = key
            folder.mkdir(parents=True, exist_ok=True)
            np.savez(path_inside(folder, name), data=data)
            if len(gap) < len(COLUMNS):
                notes.add(name, f"ends before micro batch {2 ** len(data)}: {', '.join(gap)} lack")
            if table.num_averaged:
                notes.add(name, f"{table.num_averaged} cells are means of several times")
    return tuple(files), notes.lines()
