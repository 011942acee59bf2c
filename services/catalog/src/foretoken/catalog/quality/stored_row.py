"""Stored rows of one operator on one device, as the tests of a review see them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.catalog.array import Floats, Mask
from foretoken.catalog.dims import Columns, Indices
from foretoken.catalog.quality.bound import Subject, bounds_of
from foretoken.catalog.quality.coded import Coded, split_by_code
from foretoken.domain.operators.spec.operator import OperatorSpec

# Rows are comparable in every detail when these agree; operator and device do already.
ALIKE = ("topology", "dtype", "phase", "framework", "framework_version", "kernel", "variant")
# Rows that one tool wrote into one file.
TABLE = (*ALIKE, "run_id", "source_file")
# Differences below this are the resolution of the timers in use (Vidur's tables have 0.5-1 us).
RESOLUTION_US = 2.0
# What findings are distinguished by.
SUBJECT = ("operator", "device", "topology", "phase", "framework", "kernel")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRows:
    """Successful rows of one operator on one device, from all runs.

    They came without flags, or with that of a time no device can reach (`is_impossible`).
    `work_us` is the roofline, `floor_us` the launch or link latency. `peer_ratios` is, by device,
    how much longer the backward pass of this operator takes than the forward pass where both were
    measured.
    """

    spec: OperatorSpec
    device: str
    columns: Columns
    coded: Mapping[str, Coded]
    latency_us: Floats
    work_us: Floats
    floor_us: Floats
    is_impossible: Mask
    peer_ratios: Mapping[str, float]

    @property
    def expected_us(self) -> Floats:
        """What latencies are compared by."""
        return self.floor_us + self.work_us

    @property
    def level(self) -> Floats:
        """Logarithm of latency over the roofline and the floor: time with most of the trend out."""
        level: Floats = np.log(self.latency_us / self.expected_us)
        return level

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.latency_us)

    def take(self, rows: Indices) -> "StoredRows":
        """Return some of the rows."""
        return StoredRows(
            spec=self.spec,
            device=self.device,
            columns={name: column[rows] for name, column in self.columns.items()},
            coded={
                name: Coded(column.codes[rows], column.values)
                for name, column in self.coded.items()
            },
            latency_us=self.latency_us[rows],
            work_us=self.work_us[rows],
            floor_us=self.floor_us[rows],
            is_impossible=self.is_impossible[rows],
            peer_ratios=self.peer_ratios,
        )

    def split(self, names: Sequence[str]) -> Iterator[tuple[Indices, "StoredRows"]]:
        """Yield the rows that agree in some text columns, with their places."""
        columns = [self.coded[name] for name in names]
        for places, _ in split_by_code(columns, np.arange(len(self))):
            yield places, self.take(places)

    def value(self, name: str) -> str:
        """Return what the first row says in a text column."""
        column = self.coded[name]
        return column.values[column.codes[0]] or ""


def bound_rows(
    spec: OperatorSpec, device: str, columns: Columns, coded: Mapping[str, Coded]
) -> tuple[Floats, Floats]:
    """Return every row's roofline and floor, both in µs.

    A phase whose work is not known counts like the forward pass.
    """
    num_rows = len(next(iter(columns.values())))
    work_us, floor_us = np.empty(num_rows), np.empty(num_rows)
    names = ("topology", "dtype", "phase", "variant")
    for places, values in split_by_code([coded[name] for name in names], np.arange(num_rows)):
        topology, dtype, phase, variant = values
        known = phase if phase == "backward" and spec.backward_work_ratio else "forward"
        subject = Subject(device, topology, dtype or "", known, variant)
        bounds = bounds_of(spec, {n: c[places] for n, c in columns.items()}, subject)
        work_us[places], floor_us[places] = bounds.work_us, bounds.floor_us
    return work_us, floor_us
