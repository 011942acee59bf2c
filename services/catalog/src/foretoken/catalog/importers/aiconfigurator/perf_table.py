"""One `*_perf` file: its columns, checked, and what the rows have in common."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from foretoken.catalog.array import Floats, Integers, Mask
from foretoken.catalog.importing import ImportNotes, ImportRequest, name_model
from foretoken.catalog.sources.file import read_source_file
from foretoken.catalog.sources.table import SourceTable, parse_csv, parse_parquet
from foretoken.domain.errors import UnknownDeviceError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import find_topology, topology_of_device
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.operators.spec.variant import format_variant
from foretoken.domain.units import US_PER_MS

# A column of texts: a code for every row, and the texts that the codes stand for.
Coded = tuple[Integers, list[str]]

_REQUIRED = ("framework", "version", "device", "op_name", "kernel_source", "latency")
_COMMON_TEXTS = ("framework", "version", "device", "op_name", "kernel_source")


@dataclass(frozen=True, kw_only=True, slots=True)
class Circumstances:
    """What a measurement was made on and with, as a row of the catalog says it."""

    dtype: str
    device: str
    framework: str
    framework_version: str
    kernel: str
    topology: str | None = None
    variant: str | None = None
    model: str | None = None

    @classmethod
    def of(
        cls,
        said: Mapping[str, str],
        dtype: DType,
        facts: Mapping[str, str],
        *,
        topology: str | None = None,
        model: str | None = None,
    ) -> "Circumstances":
        """Return those of rows with these texts; `facts` make the variant, empty ones left out."""
        return cls(
            dtype=dtype.name.lower(),
            device=said["device"],
            framework=said["framework"].lower(),
            framework_version=said["version"],
            kernel=said["kernel_source"],
            topology=topology,
            variant=format_variant(facts),
            model=model,
        )


@dataclass(frozen=True, slots=True)
class Described:
    """Rows that can be read, counted from 0, and for each the place of its circumstances."""

    rows: Integers
    codes: Integers
    circumstances: tuple[Circumstances, ...]

    def where(self, is_taken: Mask) -> "Described":
        """Return the rows of these for which a value per row of the file is true."""
        kept = is_taken[self.rows]
        return Described(self.rows[kept], self.codes[kept], self.circumstances)


class PerfTable:
    """A file in memory; what cannot be used is an error that names the file and row."""

    def __init__(self, origin: SourceTable, request: ImportRequest, notes: ImportNotes) -> None:
        self.origin = origin
        self._request = request
        self._notes = notes

    @property
    def latency_us(self) -> Floats:
        """Times by row, NaN where the file has none.

        Raises:
            InvalidRequestError: a time is negative or not a number.

        """
        latency_us = self.origin.numbers("latency") * US_PER_MS
        is_negative = latency_us < 0
        if is_negative.any():
            row = int(np.argmax(is_negative))
            raise self.origin.fault(row, f"latency: {latency_us[row] / US_PER_MS} ms is negative")
        return latency_us

    @property
    def power_w(self) -> Floats | None:
        """Mean power of the device by row, NaN where unknown; None without such a column."""
        return self.origin.numbers("power") if self.origin.has("power") else None

    def integers(self, column: str, default: int | None = None) -> Integers:
        """Return a column of whole numbers, or the default where there is no such column."""
        if default is not None and not self.origin.has(column):
            return np.full(self.origin.num_rows, default, dtype=np.int64)
        return self.origin.integers(column)

    def leave_out(self, num_rows: int, reason: str) -> None:
        """Note that rows are not read."""
        if num_rows:
            self._notes.add(self.origin.source.name, f"{num_rows} rows are not read: {reason}")

    def describe(
        self,
        columns: tuple[str, ...],
        describe: Callable[[Mapping[str, str]], Circumstances | str],
        derived: Mapping[str, Coded] | None = None,
    ) -> Described:
        """Return the rows whose texts `describe` makes `Circumstances` of, the device wanted.

        It gets the common texts and those of `columns` (empty where there is no such column) and of
        `derived`, with `device` and `topology` as we name them; a text it returns is why the rows
        are not read.

        Raises:
            UnknownDeviceError: a device has no file.

        """
        coded = {name: self.coded(name) for name in (*_COMMON_TEXTS, *columns)} | dict(
            derived or {}
        )
        combined = np.zeros(self.origin.num_rows, dtype=np.int64)
        for codes, words in coded.values():
            combined = combined * len(words) + codes
        found, first, inverse = np.unique(combined, return_index=True, return_inverse=True)
        places = np.full(len(found), -1, dtype=np.int64)
        circumstances: list[Circumstances] = []
        for number, row in enumerate(first.tolist()):
            said = {name: words[codes[row]] for name, (codes, words) in coded.items()}
            answer = self._describe_one(said, describe)
            if isinstance(answer, Circumstances):
                places[number] = len(circumstances)
                circumstances.append(answer)
            elif answer:
                self.leave_out(int((inverse == number).sum()), answer)
        codes = places[inverse.reshape(-1)]
        rows = np.flatnonzero(codes >= 0)
        return Described(rows, codes[rows], tuple(circumstances))

    def _describe_one(
        self,
        said: Mapping[str, str],
        describe: Callable[[Mapping[str, str]], Circumstances | str],
    ) -> Circumstances | str:
        """Return what `describe` says, nothing for rows of another device or model."""
        try:
            device = find_device(said["device"]).name
        except UnknownDeviceError as err:
            hint = "add a file for it to domain/hardware/devices, or its name to one that is there"
            raise UnknownDeviceError(
                f"{self.origin.path}: {err.message}; {hint}", **err.details
            ) from err
        wanted = self._request
        if wanted.device and find_device(wanted.device).name != device:
            return ""
        topology = find_topology(wanted.topology).name if wanted.topology else ""
        answer = describe({**said, "device": device, "topology": topology})
        wanted_model = name_model(wanted.model) if wanted.model else ""
        if isinstance(answer, Circumstances) and wanted_model not in ("", answer.model):
            return ""
        return answer

    def coded(self, name: str) -> Coded:
        """Return a column of texts as codes and the texts they stand for, empty without it."""
        if not self.origin.has(name):
            return np.zeros(self.origin.num_rows, dtype=np.int64), [""]
        column = self.origin.table.column(name)
        if name == "version" and not _is_text(column.type):
            # A CSV file's 1.10 looks like a number; the folder is named by the version.
            return np.zeros(self.origin.num_rows, dtype=np.int64), [self.origin.path.parent.name]
        if not pa.types.is_dictionary(column.type):
            column = column.cast(pa.string()).dictionary_encode()
        column = column.unify_dictionaries().combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = column.chunk(0)
        words = ["" if word is None else str(word) for word in column.dictionary.to_pylist()]
        codes = column.indices.fill_null(len(words)).to_numpy(zero_copy_only=False)
        return codes.astype(np.int64), [*words, ""]


def topology_of(said: Mapping[str, str]) -> str:
    """Return the topology asked for, else the device's own.

    Raises:
        UnknownTopologyError: no topology has the device.

    """
    return said["topology"] or topology_of_device(said["device"]).name


def open_perf_table(
    path: Path, request: ImportRequest, notes: ImportNotes, required: tuple[str, ...]
) -> PerfTable:
    """Read a file, Parquet or (in older releases) CSV whatever its suffix.

    Raises:
        InvalidRequestError: it cannot be read, or lacks a column.

    """
    source = read_source_file(path, request.path)
    parse = parse_parquet if path.suffix == ".parquet" else parse_csv
    return PerfTable(parse(source, path, (*_REQUIRED, *required)), request, notes)


def _is_text(kind: pa.DataType) -> bool:
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(value) or pa.types.is_large_string(value))
