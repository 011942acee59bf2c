"""Filters, coverage and snapshots."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from catalog_rows import batches, gemms, row, run, table

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.catalog.storage.store import next_moment
from foretoken.domain.measurements.measurement import (
    Coverage,
    MeasuredSubject,
    MeasurementFilter,
    RunKind,
    Snapshot,
)
from foretoken.wire.arrow import STORED_SCHEMA, read_table

_ALL = MeasurementFilter(include_failed=True, include_flagged=True)


def _sizes(catalog: CatalogService, **selection: str) -> list[int]:
    found = read_table(catalog.read_measurements(MeasurementFilter(**selection)))
    return [dict(dims)["m"] for dims in found.column("dims").to_pylist()]


@pytest.fixture(scope="module")
def recorded(
    tmp_path_factory: pytest.TempPathFactory, make_catalog_path: Callable[[Path], str]
) -> Iterator[CatalogService]:
    """A catalog of four rows that differ in what filters select by; tests only read it."""
    path = make_catalog_path(tmp_path_factory.mktemp("recorded"))
    catalog = CatalogService(CatalogConfig(path=path, num_threads=1))
    catalog.open()
    rows = table(
        row(1, model="llama-3.1-8b"),
        row(2, device="a40"),
        row(3, framework="sglang", framework_version=None),
        row(4, framework_version="0.190"),
    )
    list(catalog.record(run(), batches(rows)))
    yield catalog
    catalog.close()


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        ({}, [1, 2, 3, 4]),
        ({"operator": "gemm"}, [1, 2, 3, 4]),
        ({"operator": "rope"}, []),
        ({"device": "a40"}, [2]),
        ({"run_id": "run-1"}, [1, 2, 3, 4]),
        ({"run_id": "run-2"}, []),
        ({"framework": "vllm"}, [1, 2, 4]),
        ({"framework": "vllm 0.19"}, [1, 2]),
        ({"framework": "vllm 0.19.0"}, [1, 2]),
        ({"framework": "vllm 0.1"}, []),
        ({"framework": "sglang"}, [3]),
        ({"framework": ".*"}, []),
        ({"framework": "vllm\u202e/.."}, []),
        ({"model": "llama-3.1-8b"}, [1]),
        ({"model": "llama"}, []),
    ],
)
def test_a_filter_selects(
    selection: dict[str, str], expected: list[int], recorded: CatalogService
) -> None:
    assert expected == _sizes(recorded, **selection)


def test_rows_come_in_the_order_they_were_recorded_over_all_runs(catalog: CatalogService) -> None:
    first, second = (batches(gemms([m, m + 1]), gemms([m + 4])) for m in (1, 3))
    for place in (0, 1):
        list(catalog.record(run("run-1"), [first[place]]))
        list(catalog.record(run("run-2"), [second[place]]))
    assert [1, 2, 3, 4, 5, 7] == _sizes(catalog)


@pytest.mark.slow
def test_a_run_among_many_others_is_read_alone(catalog: CatalogService) -> None:
    """More gaps between the batches of a run than one condition lists."""
    mine, others = (batches(*[gemms([m])] * 150, is_complete=False) for m in (1, 2))
    receipts = zip(
        catalog.record(run("mine"), mine), catalog.record(run("others"), others), strict=True
    )
    assert 150 == len(list(receipts))
    assert [1] * 150 == _sizes(catalog, run_id="mine")


def test_a_stream_is_of_one_moment_whatever_is_recorded_meanwhile(
    catalog: CatalogService,
) -> None:
    list(catalog.record(run("run-1"), batches(gemms([1]))))
    stream = catalog.read_measurements(_ALL)
    list(catalog.record(run("run-2"), batches(gemms([2]))))
    assert 1 == read_table(stream).num_rows


def test_a_stream_that_is_given_up_holds_nothing(catalog: CatalogService) -> None:
    list(catalog.record(run("run-1"), batches(gemms([1]), gemms([2]))))
    stream = catalog.read_measurements(_ALL)
    del stream
    gc.collect()
    assert 0 == catalog._store.num_users


def test_dimensions_are_exact_beside_operators_that_have_fewer(catalog: CatalogService) -> None:
    k = 2**53 + 1
    normed = row(operator="rms_norm", dims={"num_tokens": 8, "hidden": 16})
    rows = table(row(dims={"m": 1, "n": 2, "k": k}, latency_us_median=1e12), normed)
    list(catalog.record(run(), batches(rows)))
    found = read_table(catalog.read_measurements(MeasurementFilter()))
    assert [[("m", 1), ("n", 2), ("k", k)], [("num_tokens", 8), ("hidden", 16)]] == (
        found.column("dims").to_pylist()
    )


def test_nothing_selected_has_the_columns_too(catalog: CatalogService) -> None:
    list(catalog.record(run(), batches(gemms([1]))))
    found = read_table(catalog.read_measurements(MeasurementFilter(device="a40")))
    assert (STORED_SCHEMA, 0) == (found.schema, found.num_rows)


def _doubt(catalog: CatalogService, *places: tuple[int, int]) -> None:
    with catalog._store.transaction() as cursor:
        number = next_moment(cursor)
        for place in places:
            cursor.execute(
                "INSERT INTO doubt VALUES (?, ?, 'late: doubt', ?, NULL)", [*place, number]
            )


def test_devices_and_models_are_listed_by_name(catalog: CatalogService) -> None:
    normed = {"operator": "rms_norm", "dims": {"num_tokens": 8, "hidden": 16}}
    rows = table(
        row(1, model="b"),
        row(2, device="a40", model="b"),
        row(3, device="a40", model="a", **normed),
        row(4, status="failed", status_reason="x", flags=["mine: odd"]),
    )
    list(catalog.record(run("run-1"), batches(rows, is_complete=False)))
    list(catalog.record(run("run-2"), batches(gemms([5], model="b"), is_complete=False)))
    _doubt(catalog, (1, 0), (1, 3))
    counts = {"num_failed": 0, "num_flagged": 0}
    failed = {"num_failed": 1, "num_flagged": 2}
    doubted = {"num_failed": 0, "num_flagged": 1}
    assert (
        MeasuredSubject(name="a30", num_rows=3, num_operators=1, num_runs=2, **failed),
        MeasuredSubject(name="a40", num_rows=2, num_operators=2, num_runs=1, **counts),
    ) == catalog.list_devices()
    assert (
        MeasuredSubject(name="a", num_rows=1, num_operators=1, num_runs=1, **counts),
        MeasuredSubject(name="b", num_rows=3, num_operators=1, num_runs=2, **doubted),
    ) == catalog.list_models()


def test_a_run_counts_what_was_doubted_since_it_was_recorded(catalog: CatalogService) -> None:
    rows = table(row(1), row(2, flags=["mine: odd"]), row(3))
    list(catalog.record(run("run-1"), batches(rows, is_complete=False)))
    _doubt(catalog, (1, 0), (1, 1))
    (found,) = catalog.list_runs()
    (covered,) = catalog.describe_coverage()
    assert (2, 2) == (found.num_flagged, covered.num_flagged)


def test_coverage_counts_by_operator_device_dtype_and_phase(catalog: CatalogService) -> None:
    rows = table(
        row(1),
        row(2, framework="sglang", framework_version=None),
        row(4096, latency_us_median=2.0),
        row(8, status="failed", status_reason="x"),
        row(1, dtype="bf16", framework=None, framework_version=None),
    )
    list(catalog.record(run(), batches(rows)))
    place = {"operator": "gemm", "device": "a30", "topology": "", "phase": "forward"}
    expected = (
        Coverage(**place, dtype="bf16", num_rows=1, num_flagged=0, num_failed=0),
        Coverage(
            **place,
            dtype="fp16",
            num_rows=4,
            num_flagged=1,
            num_failed=1,
            frameworks=("sglang", "vllm 0.19.0"),
        ),
    )
    assert expected == catalog.describe_coverage()


def test_an_empty_catalog_answers_with_nothing(catalog: CatalogService) -> None:
    assert (0, (), ()) == (
        read_table(catalog.read_measurements(_ALL)).num_rows,
        catalog.describe_coverage(),
        catalog.list_runs(),
    )
    assert 0 == catalog.describe_snapshot(_ALL).num_rows


def _snapshot(path: str, *tables: object, run_id: str = "run-1") -> Snapshot:
    service = CatalogService(CatalogConfig(path=path, num_threads=1))
    service.open()
    list(service.record(run(run_id, RunKind.IMPORT, "hash"), batches(*tables)))
    snapshot = service.describe_snapshot(_ALL)
    service.close()
    return snapshot


@pytest.fixture
def path_of(tmp_path: Path, make_catalog_path: Callable[[Path], str]) -> Callable[[str], str]:
    """Return a function that puts an empty catalog into a folder of that name."""
    return lambda name: make_catalog_path(tmp_path / name)


def test_a_snapshot_is_the_content_not_how_it_came(path_of: Callable[[str], str]) -> None:
    first = _snapshot(path_of("a"), gemms([1, 2]), gemms([3]))
    second = _snapshot(path_of("b"), gemms([3, 2, 1], source_file="x.csv"), run_id="other")
    assert first == second


@pytest.mark.parametrize(
    "changes",
    [
        {"latency_us_median": 65.00000001},
        {"kernel": "another"},
        {"framework_version": None},
        {"flags": ["mine: odd"]},
        {"dims": {"m": 1, "n": 4096, "k": 4095}},
    ],
)
def test_a_snapshot_changes_with_the_content(
    changes: dict[str, object], path_of: Callable[[str], str]
) -> None:
    first = _snapshot(path_of("a"), table(row(25)))
    assert first.content_hash != _snapshot(path_of("b"), table(row(25, **changes))).content_hash


def test_a_repeated_row_counts_twice(path_of: Callable[[str], str]) -> None:
    once, twice = (_snapshot(path_of(str(n)), gemms([1] * n)) for n in (1, 2))
    thrice = _snapshot(path_of("3"), gemms([1] * 3))
    assert 3 == len({once.content_hash, twice.content_hash, thrice.content_hash})
