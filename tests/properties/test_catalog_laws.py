"""Laws of the catalog: what a snapshot depends on, what a retry changes, what dims survive."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.dims import (
    columns_to_dims,
    dims_to_places,
    map_to_places,
    places_to_dims,
    split_by_operator,
)
from foretoken.catalog.quality.line import deviations_from_lines
from foretoken.catalog.service import CatalogService
from foretoken.domain.measurements.measurement import (
    MeasurementBatch,
    MeasurementFilter,
    Run,
    RunKind,
)
from foretoken.wire.arrow import read_table, rows_to_table

_NUMBERS = itertools.count()

_ROWS = st.lists(
    st.builds(
        lambda m, latency_us, kernel: {
            "operator": "gemm",
            "phase": "forward",
            "dtype": "fp16",
            "dims": {"m": m, "n": 256, "k": 256},
            "device": "a30",
            "kernel": kernel,
            "latency_us_median": latency_us,
            "status": "ok",
        },
        st.integers(1, 2**20),
        st.floats(allow_nan=True, allow_infinity=True),
        st.none() | st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=5),
    ),
    min_size=1,
    max_size=12,
)
_SLOW = settings(max_examples=15)


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CatalogService]:
    path = tmp_path_factory.mktemp("laws") / "catalog.duckdb"
    service = CatalogService(CatalogConfig(path=str(path), num_threads=1))
    service.open()
    yield service
    service.close()


def _new_run() -> Run:
    return Run(run_id=f"run-{next(_NUMBERS)}", kind=RunKind.PROFILE, tool="laws")


def _rows_of(run: Run) -> MeasurementFilter:
    return MeasurementFilter(run_id=run.run_id, include_failed=True, include_flagged=True)


def _batches(rows: list[dict[str, Any]], size: int) -> list[MeasurementBatch]:
    return [
        MeasurementBatch(batch_index=index, rows=rows_to_table(rows[start : start + size]))
        for index, start in enumerate(range(0, len(rows), size))
    ]


@_SLOW
@given(rows=_ROWS, size=st.integers(1, 4), data=st.data())
def test_a_retry_of_any_part_changes_nothing(
    rows: list[dict[str, Any]], size: int, data: st.DataObject, catalog: CatalogService
) -> None:
    run, batches = _new_run(), _batches(rows, size)
    retried = data.draw(st.lists(st.sampled_from(range(len(batches)))))
    list(catalog.record(run, batches))
    before = read_table(catalog.read_measurements(_rows_of(run)))
    again = list(catalog.record(run, [batches[index] for index in retried]))
    assert all(receipt.was_duplicate for receipt in again)
    assert before == read_table(catalog.read_measurements(_rows_of(run)))
    assert len(rows) == before.num_rows


@_SLOW
@given(rows=_ROWS, seed=st.integers(0, 99))
def test_a_snapshot_does_not_depend_on_the_order_of_rows(
    rows: list[dict[str, Any]], seed: int, catalog: CatalogService
) -> None:
    shuffled = [rows[index] for index in np.random.default_rng(seed).permutation(len(rows))]
    snapshots = []
    for ordered in (rows, shuffled):
        run = _new_run()
        list(catalog.record(run, _batches(ordered, len(rows))))
        snapshots.append(catalog.describe_snapshot(_rows_of(run)))
    assert [len(rows)] * 2 == [snapshot.num_rows for snapshot in snapshots]
    assert snapshots[0].content_hash == snapshots[1].content_hash


@given(st.lists(st.permutations([("m", 1), ("n", 2), ("k", 3)]), min_size=1, max_size=9))
def test_dims_keep_their_values_in_any_order(dims: list[list[tuple[str, int]]]) -> None:
    place = {"operator": "gemm", "phase": "forward", "dtype": "fp16", "device": "a30"}
    table = rows_to_table([{**place, "dims": pairs, "status": "ok"} for pairs in dims])
    stored, groups = split_by_operator(table)
    assert [[("m", 1), ("n", 2), ("k", 3)]] * len(dims) == stored.column("dims").to_pylist()
    assert stored.column("dims").combine_chunks().to_pylist() == (
        columns_to_dims(groups[0].columns, len(dims)).to_pylist()
    )


_SIZES = st.integers(1, 2**63 - 1)
_GEMMS = st.fixed_dictionaries({"m": _SIZES, "n": _SIZES, "k": _SIZES})
_NORMS = st.fixed_dictionaries({"hidden": _SIZES, "num_tokens": _SIZES})


@given(st.lists(_GEMMS | _NORMS, min_size=1, max_size=9))
def test_dims_of_several_operators_keep_their_values_by_place(dims: list[dict[str, int]]) -> None:
    place = {"phase": "forward", "dtype": "fp16", "device": "a30", "status": "ok"}
    operators = ["gemm" if "m" in row else "rms_norm" for row in dims]
    rows = [
        {**place, "operator": name, "dims": row} for name, row in zip(operators, dims, strict=True)
    ]
    stored, groups = split_by_operator(rows_to_table(rows))
    places = dims_to_places(groups, len(dims))
    found = places_to_dims(stored.column("operator").combine_chunks(), places)
    assert stored.column("dims").to_pylist() == found.to_pylist()
    assert dims == [dict(row) for row in found.to_pylist()]
    assert places == map_to_places(found)


@given(
    exponent=st.floats(-2, 2),
    scale=st.floats(0.1, 1e6),
    sizes=st.sets(st.integers(1, 10**6), min_size=1, max_size=40),
)
def test_no_point_of_a_power_law_is_an_outlier(
    exponent: float, scale: float, sizes: set[int]
) -> None:
    column = np.array(sorted(sizes))
    latency_us = scale * column.astype(float) ** exponent
    ratios = deviations_from_lines({"m": column}, latency_us, latency_us)
    assert pytest.approx(np.ones(len(column))) == ratios
