"""Filters, coverage and snapshots."""

from pathlib import Path

import pytest
from catalog_rows import batches, gemms, row, run, table

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.domain.measurement import Coverage, MeasurementFilter, RunKind, Snapshot
from foretoken.wire.arrow import read_table

_ALL = MeasurementFilter(include_failed=True, include_flagged=True)


def _sizes(catalog: CatalogService, **selection: str) -> list[int]:
    found = read_table(catalog.read_measurements(MeasurementFilter(**selection)))
    return [dict(dims)["m"] for dims in found.column("dims").to_pylist()]


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
    ],
)
def test_a_filter_selects(
    selection: dict[str, str], expected: list[int], catalog: CatalogService
) -> None:
    rows = table(
        row(1),
        row(2, device="a40"),
        row(3, framework="sglang", framework_version=None),
        row(4, framework_version="0.190"),
    )
    list(catalog.record(run(), batches(rows)))
    assert expected == _sizes(catalog, **selection)


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


def _snapshot(path: Path, *tables: object, run_id: str = "run-1") -> Snapshot:
    service = CatalogService(CatalogConfig(path=str(path), num_threads=1))
    service.open()
    list(service.record(run(run_id, RunKind.IMPORT, "hash"), batches(*tables)))
    snapshot = service.describe_snapshot(_ALL)
    service.close()
    return snapshot


def test_a_snapshot_is_the_content_not_how_it_came(tmp_path: Path) -> None:
    first = _snapshot(tmp_path / "a", gemms([1, 2]), gemms([3]))
    second = _snapshot(tmp_path / "b", gemms([3, 2, 1], source_file="x.csv"), run_id="other")
    assert first == second


@pytest.mark.parametrize(
    "changes",
    [
        {"latency_us_median": 65.00000001},
        {"kernel": "another"},
        {"framework_version": None},
        {"flags": ["mine: a doubt"]},
        {"dims": {"m": 1, "n": 4096, "k": 4095}},
    ],
)
def test_a_snapshot_changes_with_the_content(changes: dict[str, object], tmp_path: Path) -> None:
    first = _snapshot(tmp_path / "a", table(row(25)))
    assert first.content_hash != _snapshot(tmp_path / "b", table(row(25, **changes))).content_hash


def test_a_repeated_row_counts_twice(tmp_path: Path) -> None:
    once, twice = (_snapshot(tmp_path / str(n), gemms([1] * n)) for n in (1, 2))
    thrice = _snapshot(tmp_path / "3", gemms([1] * 3))
    assert 3 == len({once.content_hash, twice.content_hash, thrice.content_hash})
