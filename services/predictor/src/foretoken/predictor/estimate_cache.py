"""Estimates given before: the same table asked of the same models is answered from memory."""

import hashlib
import threading
from collections import OrderedDict
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from foretoken.domain.measurements.estimate import LatencyColumns, LatencyQuery, OperatorTable

# What keeping a table costs in addition to its rows, in rows: 2 KiB against 73 bytes.
_TABLE_ROWS = 27


class Observe(Protocol):
    """Notified of every question, and whether it was answered from memory."""

    def __call__(self, *, is_hit: bool) -> None:
        """Take note."""


class EstimateCache:
    """Estimates by model version and question, the least recently asked forgotten first."""

    def __init__(self, max_rows: int, observe: Observe) -> None:
        """Keep at most so many rows of estimates, every table counting 27 more; 0 keeps none."""
        self._max_rows = max_rows
        self._observe = observe
        self._num_rows = 0
        self._entries: OrderedDict[bytes, LatencyColumns] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: bytes) -> LatencyColumns | None:
        """Return what was kept under a key."""
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
        self._observe(is_hit=found is not None)
        return found

    def keep(self, key: bytes, estimates: LatencyColumns) -> None:
        """Keep estimates; more rows than there is room for are not kept."""
        num_rows = _count_rows(estimates)
        if num_rows > self._max_rows:
            return
        # A caller that repeats a query must not get what somebody else wrote into the columns.
        for column in (*estimates.nearest.values(), *_columns(estimates)):
            column.setflags(write=False)
        with self._lock:
            if key not in self._entries:
                self._entries[key] = estimates
                self._num_rows += num_rows
            while self._num_rows > self._max_rows:
                _, dropped = self._entries.popitem(last=False)
                self._num_rows -= _count_rows(dropped)


def _count_rows(estimates: LatencyColumns) -> int:
    return len(estimates.latency_us) + _TABLE_ROWS


def _columns(estimates: LatencyColumns) -> tuple[npt.NDArray[Any], ...]:
    return (
        estimates.latency_us,
        estimates.low_us,
        estimates.high_us,
        estimates.provenance,
        estimates.nearest_us,
        estimates.nearest_octaves,
    )


def cache_key(model_version: str, query: LatencyQuery, table: OperatorTable) -> bytes:
    """Return the identity of a question: models, circumstances and every value of every column."""
    # What is looked at after the estimate, whether to refuse or correct it, is no part of it.
    bare_table = replace(table, columns={})
    bare = replace(query, tables=(bare_table,), refuse_extrapolation=False, correction="")
    digest = hashlib.blake2b(repr((model_version, bare)).encode(), digest_size=16)
    for name, column in sorted(table.columns.items()):
        values = np.ascontiguousarray(column)
        digest.update(f"{name}|{values.dtype}|{values.shape}|".encode())
        digest.update(values.data)
    return digest.digest()
