"""Tables out of rows that came from FASOP profiles, composite ones included."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.catalog.exporters.fasop.table import ProfileTable, TableKey
from foretoken.catalog.importers.fasop.profile_rows import COLUMNS
from foretoken.catalog.importing import ImportNotes
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.operators.spec.variant import parse_variant
from foretoken.domain.units import US_PER_MS

Row = Mapping[str, Any]

_KERNELS = {column.kernel: column for column in COLUMNS}
_COMPOSITE = "composite: "
_TABLE_ENDING = ".npz"


@dataclass(frozen=True, kw_only=True, slots=True)
class _SourceFile:
    """A file of a run, its rows, and what only the composite ones of them say."""

    name: str
    rows: Sequence[Row]
    says: Mapping[str, str]

    @property
    def key(self) -> TableKey:
        return TableKey(self.rows[0]["model"], self.rows[0]["device"], int(self.says["tp"]))

    @property
    def assumed(self) -> tuple[str, str]:
        return self.says["seq_len"], self.rows[0]["dtype"]

    @property
    def is_table(self) -> bool:
        return self.name.endswith(_TABLE_ENDING)


def fill_profiled(rows: Sequence[Row], tables: dict[TableKey, ProfileTable]) -> tuple[str, ...]:
    """Put rows into their tables; return remarks.

    What an imported table says stays as it is; other cells are means over the layers and ranks of
    the profiles that FASOP makes tables of.

    Raises:
        InvalidRequestError: profiles of one table assume different sequences or formats.

    """
    notes = ImportNotes()
    assumed: dict[TableKey, tuple[str, str]] = {}
    made: dict[TableKey, ProfileTable] = {}
    for file in _group_by_file(rows):
        if not {"tp", "seq_len"} <= set(file.says):
            notes.add(file.name, "its composite rows are not in the selection: nothing to export")
            continue
        if assumed.setdefault(file.key, file.assumed) != file.assumed:
            raise InvalidRequestError.of_field(
                "selection",
                f"{file.key.file_name}: profiles of {assumed[file.key]} and {file.assumed} tokens a"
                " sequence and format; choose one with a narrower selection",
            )
        target = tables if file.is_table else made
        _fill(file, target.setdefault(file.key, ProfileTable()), notes)
    for key, table in made.items():
        tables.setdefault(key, ProfileTable()).add_missing(table)
    return notes.lines()


def _group_by_file(rows: Sequence[Row]) -> list[_SourceFile]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["run_id"], row["source_file"]), []).append(row)
    return [
        _SourceFile(
            name=name,
            rows=group,
            says=next((parse_variant(row["variant"]) for row in group if row["variant"]), {}),
        )
        for (_, name), group in found.items()
    ]


def _fill(file: _SourceFile, table: ProfileTable, notes: ImportNotes) -> None:
    seq_len = int(file.says["seq_len"])
    for row in file.rows:
        column = _KERNELS.get(row["kernel"])
        dims = dict(row["dims"])
        num_tokens = dims["m"] if "m" in dims else dims["num_tokens"]
        micro_batch = num_tokens // seq_len
        if column is None:
            notes.add(file.name, "a legacy profile of whole layers, which no table has a place for")
        elif micro_batch & (micro_batch - 1):
            notes.add(file.name, f"micro batch {micro_batch} is left out: no power of two")
        else:
            if any(not flag.startswith(_COMPOSITE) for flag in row["flags"] or ()):
                notes.add(file.name, "times that the catalog flags are in the table")
            table.add(micro_batch, column.name, _time_us(row) / US_PER_MS)


def _time_us(row: Row) -> float:
    """Return the mean, as FASOP's tables have it; NaN where there was no time."""
    for statistic in ("mean", "median"):
        if row[f"latency_us_{statistic}"] is not None:
            return float(row[f"latency_us_{statistic}"])
    return math.nan
