"""The files of one tensor-parallel degree, and rows made from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from foretoken.catalog.array import Floats, Mask
from foretoken.catalog.importers.llmservingsim.variant import RankDims, Variant
from foretoken.catalog.importing import ImportNotes
from foretoken.catalog.sources.file import read_source_file
from foretoken.catalog.sources.row import RowFacts, build_rows
from foretoken.catalog.sources.table import SourceTable, parse_csv
from foretoken.wire.arrow import MEASUREMENT_SCHEMA

Rows = tuple[SourceTable, pa.Table]


@dataclass(frozen=True, slots=True)
class Degree:
    """One `tp<N>` folder; `notes` gathers what was not read and why."""

    variant: Variant
    tp: int
    notes: ImportNotes

    @property
    def rank(self) -> RankDims:
        """The model's dimensions on one rank."""
        return RankDims.of(self.variant.model, self.tp)

    def list_stems(self) -> list[str]:
        """Return the names of the CSV files, without their ending."""
        folder = self.variant.folder / f"tp{self.tp}"
        return sorted(path.stem for path in folder.glob("*.csv"))

    def open(self, stem: str, required: tuple[str, ...]) -> SourceTable:
        """Read a file.

        Raises:
            InvalidRequestError: it is not a CSV file with the required columns.

        """
        path = self.variant.folder / f"tp{self.tp}" / f"{stem}.csv"
        return parse_csv(read_source_file(path, self.variant.root), path, required)

    def note(self, stem: str, text: str) -> None:
        """Say what of a file was not read, or how."""
        folder = self.variant.folder.relative_to(self.variant.root).as_posix()
        self.notes.add(f"{folder}/tp{self.tp}/{stem}.csv", text)

    def facts(self, operator: str, *, kernel: str | None = None, flag: str = "") -> RowFacts:
        """Return what rows of an operator have in common."""
        return RowFacts(
            operator=operator,
            dtype=self.variant.dtype,
            device=self.variant.device,
            framework=self.variant.framework,
            framework_version=self.variant.framework_version,
            kernel=kernel,
            model=self.variant.model.name,
            num_samples=self.variant.num_iterations,
            flag=flag,
        )


def take_rows(
    facts: RowFacts, origin: SourceTable, mask: Mask, dims: Mapping[str, Any], times_us: Floats
) -> pa.Table:
    """Return measurement rows for the rows of a file under a mask.

    The one time a source gives, a mean of a few iterations, stands as median and mean.
    """
    taken = {name: np.broadcast_to(value, len(mask))[mask] for name, value in dims.items()}
    latency_us = {"median": times_us[mask], "mean": times_us[mask]}
    return build_rows(facts, origin, np.flatnonzero(mask), taken, latency_us)


def join_rows(pieces: list[pa.Table]) -> pa.Table:
    """Return the rows of all pieces in one table, which may be empty."""
    return pa.concat_tables(pieces) if pieces else MEASUREMENT_SCHEMA.empty_table()
