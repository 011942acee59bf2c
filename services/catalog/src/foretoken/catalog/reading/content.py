"""What rows say, as numbers: a hash of every row, and of any collection of rows.

Columns are hashed one by one and added, so the work is done by column and a column that is null
throughout is nothing. A collection is the sum of its rows, so their order does not matter and a
repeated row counts twice. Two lanes of 64 bits tell any rows apart that come about by accident;
they are no defence against rows made to collide.
"""

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from foretoken.catalog.dims import DIM_COLUMNS
from foretoken.wire.arrow import MEASUREMENT_SCHEMA

Hashes = npt.NDArray[np.uint64]

# Where a row came from is no part of what it says.
_ORIGIN = ("source_file", "source_hash", "source_row")
CONTENT_COLUMNS = tuple(
    name
    for field in MEASUREMENT_SCHEMA.names
    if field not in _ORIGIN
    for name in (DIM_COLUMNS if field == "dims" else (field,))
)
# Changes when equal rows would get another hash than before.
_FORMAT = "foretoken rows 1"
_LANES = 2
_LANE_MASK = 2**64 - 1
# The finalizer of SplitMix64. Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number
# Generators", OOPSLA 2014, in Stafford's variant 13.
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_MIX_LAST_BITS = 31


class ContentHash:
    """The hash of a collection of rows, as they come."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._sums = [0] * _LANES

    def add(self, rows: pa.RecordBatch) -> None:
        """Add rows with the columns `CONTENT_COLUMNS`."""
        self.num_rows += rows.num_rows
        for lane, hashes in enumerate(hash_rows(rows)):
            self._sums[lane] = (self._sums[lane] + int(hashes.sum(dtype=np.uint64))) & _LANE_MASK

    def hexdigest(self) -> str:
        """Return the hash as 64 hexadecimal digits."""
        text = f"{_FORMAT} {self.num_rows} {' '.join(f'{total:016x}' for total in self._sums)}"
        return hashlib.sha256(text.encode()).hexdigest()


def hash_rows(rows: pa.RecordBatch) -> Hashes:
    """Return a hash of each row, (2, rows): null is nothing, every other value counts exactly."""
    sums = np.zeros((_LANES, rows.num_rows), dtype=np.uint64)
    for name in CONTENT_COLUMNS:
        column = rows.column(name)
        if column.null_count == len(column):
            continue
        if pa.types.is_list(column.type):
            _add_lists(sums, name, column)
        elif pa.types.is_string(column.type):
            _add_texts(sums, name, column)
        else:
            _add_numbers(sums, name, column)
    return np.stack([_mix(lane) for lane in sums])


def _add_numbers(sums: Hashes, name: str, column: pa.Array) -> None:
    import pyarrow.compute as pc  # takes long to load

    values = pc.fill_null(column, 0).to_numpy(zero_copy_only=False).view(np.uint64)
    is_null = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
    for lane, seed in enumerate(_hash_text(name, "")):
        hashes = _mix(values + seed)
        if is_null is not None:
            hashes[is_null] = 0
        sums[lane] += hashes


def _add_texts(sums: Hashes, name: str, column: pa.Array) -> None:
    coded = column.dictionary_encode()
    texts = coded.dictionary.to_pylist()
    # One more at the end for null, which is nothing.
    hashes = np.array([*(_hash_text(name, text) for text in texts), (0, 0)], dtype=np.uint64)
    if len(texts) == 1 and not column.null_count:
        sums += hashes[0][:, None]
        return
    codes = coded.indices.fill_null(len(texts)).to_numpy(zero_copy_only=False)
    sums += hashes.T[:, codes]


def _add_lists(sums: Hashes, name: str, column: pa.Array) -> None:
    """Add lists as collections: an empty one is nothing, their order does not matter."""
    import pyarrow.compute as pc  # takes long to load

    items = column.flatten()
    rows = np.asarray(pc.list_parent_indices(column))
    hashes = np.array([_hash_text(name, text) for text in items.to_pylist()], dtype=np.uint64)
    for lane in range(_LANES):
        np.add.at(sums[lane], rows, hashes.reshape(-1, _LANES)[:, lane])


def _hash_text(name: str, text: str) -> list[np.uint64]:
    digest = hashlib.blake2b(f"{name}\0{text}".encode(), digest_size=8 * _LANES).digest()
    return [np.uint64(int.from_bytes(digest[8 * i : 8 * i + 8])) for i in range(_LANES)]


def _mix(values: Any) -> Hashes:
    mixed = values.copy()
    for bits, factor in _MIX:
        mixed ^= mixed >> np.uint64(bits)
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(_MIX_LAST_BITS)
    found: Hashes = mixed
    return found
