"""One `*_perf` file: its columns, checked, and what the rows have in common."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import MappingProxyType

import numpy as np
import pyarrow as pa

from foretoken.catalog.dims import Floats, Integers, Mask
from foretoken.catalog.importers.aiconfigurator.formats import ENGINES, LIBRARIES
from foretoken.catalog.importing import ImportNotes, ImportRequest, name_model
from foretoken.catalog.sources.file import SourceFile
from foretoken.catalog.sources.table import SourceTable, parse_csv, parse_parquet
from foretoken.domain.alias import canonical_device
from foretoken.domain.errors import UnknownDeviceError
from foretoken.domain.hardware.device import all_devices, find_device
from foretoken.domain.hardware.topology import find_topology, topology_of_device
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.operators.spec.variant import format_variant
from foretoken.domain.units import US_PER_MS

# A column of texts: a code for every row, and the texts that the codes stand for.
Coded = tuple[Integers, list[str]]

# The others, where a file lacks them, are what its folders say.
_REQUIRED = ("kernel_source",)
_COMMON_TEXTS = ("framework", "version", "device", "op_name", "kernel_source")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What the folders of a table say: `.../<system>/[<family>/]<backend>/<version>/<table>`.

    Empty where they are not named so; the device by its own name.
    """

    device: str = ""
    framework: str = ""
    version: str = ""

    @classmethod
    def of(cls, path: PurePath) -> "Place":
        """Return what the folders above a table say."""
        *above, framework, version, _ = ("",) * 4 + path.parts
        systems = (canonical_device(name) for name in reversed(above[-2:]))
        device = next((name for name in systems if name in all_devices()), "")
        if framework not in (*ENGINES, *LIBRARIES):
            return cls(device=device)
        return cls(device=device, framework=framework, version=version)


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


# What older tables call 16 bits, which are bfloat16 in all of them.
# Source: ai-dynamo/aiconfigurator pull request 895, which renamed it.
_OLD_WORDS = MappingProxyType({"float16": "bfloat16"})
_NO_WORDS: Mapping[str, str] = MappingProxyType({})
# How the version of a build from source begins; which release it is, the folder says.
_BUILD = "0.0.0."


class PerfTable:
    """A file in memory; what cannot be used is an error that names the file and row."""

    def __init__(
        self,
        origin: SourceTable,
        place: Place,
        request: ImportRequest,
        notes: ImportNotes,
        words: Mapping[str, str] = _NO_WORDS,
    ) -> None:
        self.origin = origin
        self._words = words
        self._place = place
        self._request = request
        self._notes = notes

    @property
    def latency_us(self) -> Floats:
        """Times by row, NaN where the file has none.

        Raises:
            InvalidRequestError: a time is not a number.

        """
        return self.origin.numbers("latency") * US_PER_MS

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
        self._notes.leave_out(self.origin.source.name, num_rows, reason)

    def without(self, described: Described, is_bad: Mask, reason: str) -> Described:
        """Return the rows for which a value per row of the file is false, and note the others."""
        kept = described.where(~is_bad)
        self.leave_out(len(described.rows) - len(kept.rows), reason)
        return kept

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
            else:
                self._notes.num_passed += int((inverse == number).sum())
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
            return f"{err.message}; add a file for it, or its name to one that is there"
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
        column = self.origin.table.column(name) if self.origin.has(name) else None
        # In a CSV file a version of 1.10 looks like a number.
        if column is None or (name == "version" and not _is_text(column.type)):
            word = str(getattr(self._place, name, ""))
            return np.zeros(self.origin.num_rows, dtype=np.int64), [word]
        if not pa.types.is_dictionary(column.type):
            column = column.cast(pa.string()).dictionary_encode()
        column = column.unify_dictionaries().combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = column.chunk(0)
        words = ["" if word is None else str(word) for word in column.dictionary.to_pylist()]
        words = [self._words.get(word, word) for word in words]
        if name == "version" and self._place.version:
            words = [self._place.version if word.startswith(_BUILD) else word for word in words]
        codes = column.indices.fill_null(len(words)).to_numpy(zero_copy_only=False)
        return codes.astype(np.int64), [*words, ""]


def topology_of(said: Mapping[str, str]) -> str:
    """Return the topology asked for, else the device's own.

    Raises:
        UnknownTopologyError: no topology has the device.

    """
    return said["topology"] or topology_of_device(said["device"]).name


def open_perf_table(
    source: SourceFile,
    path: Path,
    required: tuple[str, ...],
    request: ImportRequest,
    notes: ImportNotes,
) -> PerfTable:
    """Read a file, Parquet or (in older releases) CSV whatever its suffix.

    Raises:
        InvalidRequestError: it cannot be read, or lacks a column that its folders do not make up.

    """
    place = Place.of(path)
    needed = [name for name in ("framework", "version", "device") if not getattr(place, name)]
    is_old = path.suffix != ".parquet"
    parse = parse_csv if is_old else parse_parquet
    origin = parse(source, path, (*needed, *_REQUIRED, *required))
    return PerfTable(origin, place, request, notes, _OLD_WORDS if is_old else _NO_WORDS)


def _is_text(kind: pa.DataType) -> bool:
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(value) or pa.types.is_large_string(value))
