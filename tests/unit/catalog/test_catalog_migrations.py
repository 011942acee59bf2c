"""A file that an older Foretoken wrote is brought up to date when it is opened."""

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import duckdb
import pytest
from catalog_rows import batches, gemms, run

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.domain.measurements.measurement import MeasurementFilter
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.wire.arrow import read_table

_ALL = MeasurementFilter(include_failed=True, include_flagged=True)
_FIRST = "0001_measurements.sql"
_ROWS = (
    # run, batch, row, operator, dims, latency, status, flags
    ("old", 0, 0, "gemm", {"m": 3, "n": 5, "k": 7}, 11.5, "ok", None),
    ("old", 0, 1, "rms_norm", {"num_tokens": 5, "hidden": 6}, 2.0, "ok", ["odd: by hand"]),
    ("old", 1, 0, "gemm", {"m": 4, "n": 5, "k": 7}, None, "failed", None),
    ("partial", 0, 0, "gemm", {"m": 9, "n": 5, "k": 7}, 12.5, "ok", None),
)


def _fill(connection: duckdb.DuckDBPyConnection) -> None:
    runs = "INSERT INTO run VALUES (?, ?, 'test', '', '', '', map(), '2025-01-01 10:00:00')"
    connection.executemany(runs, [["old", "profile"], ["partial", "import"]])
    connection.execute(
        "INSERT INTO batch VALUES ('old', 0, 2, 1, 0, false, '2025-01-01 10:00:01'),"
        " ('partial', 0, 1, 0, 0, false, '2025-01-01 10:00:02'),"
        " ('old', 1, 1, 0, 1, true, '2025-01-01 10:00:03')"
    )
    connection.executemany(
        "INSERT INTO measurement BY NAME SELECT ? AS run_id, ? AS batch_index, ? AS row_index,"
        " ? AS operator, 'forward' AS phase, 'fp16' AS dtype,"
        " map(?::VARCHAR[], ?::BIGINT[]) AS dims, 'a30' AS device, ?::DOUBLE AS latency_us_median,"
        " ? AS status, ?::VARCHAR[] AS flags",
        [[*row[:4], list(row[4]), list(row[4].values()), *row[5:]] for row in _ROWS],
    )


@pytest.fixture
def old_file(tmp_path: Path) -> Path:
    """A catalog of the first schema, with a finished profile and an import cut short."""
    path = tmp_path / "old.duckdb"
    script = files("foretoken.catalog").joinpath("migrations", _FIRST)
    with duckdb.connect() as connection:
        connection.execute(f"ATTACH '{path}' AS old (STORAGE_VERSION 'v1.5.0'); USE old")
        connection.execute(script.read_text(encoding="utf-8"))
        connection.execute("CREATE TABLE schema_version (version INTEGER, name VARCHAR)")
        name = _FIRST.removesuffix(".sql")
        connection.execute("INSERT INTO schema_version VALUES (1, ?)", [name])
        _fill(connection)
    return path


@pytest.fixture
def migrated(old_file: Path) -> Iterator[CatalogService]:
    service = CatalogService(CatalogConfig(path=str(old_file), num_threads=1))
    service.open()
    yield service
    service.close()


def _rows(service: CatalogService) -> list[tuple[Any, ...]]:
    return [
        (
            *(row[name] for name in ("run_id", "batch_index", "row_index", "operator")),
            dict(row["dims"]),
            *(row[name] for name in ("latency_us_median", "status", "flags")),
        )
        for row in read_table(service.read_measurements(_ALL)).to_pylist()
    ]


def test_rows_of_the_first_schema_are_read_as_they_were(migrated: CatalogService) -> None:
    """The dimensions of the old map come back in order, and an import cut short stays hidden."""
    assert [row for row in _ROWS if row[0] == "old"] == _rows(migrated)
    assert all(tuple(row[4]) == find_operator(row[3]).dim_names for row in _rows(migrated))


def test_a_batch_stored_before_the_migration_is_not_stored_again(migrated: CatalogService) -> None:
    receipts = list(migrated.record(run("old"), batches(gemms([1, 2]), gemms([4]))))
    assert [True, True] == [receipt.was_duplicate for receipt in receipts]
    assert 3 == len(_rows(migrated))


def test_a_migrated_file_takes_new_rows(migrated: CatalogService) -> None:
    list(migrated.record(run("new"), batches(gemms([8]))))
    assert ("new", 8) == (_rows(migrated)[-1][0], _rows(migrated)[-1][4]["m"])


def test_runs_keep_when_they_were_completed(migrated: CatalogService) -> None:
    found = {summary.run.run_id: summary.completed_at for summary in migrated.list_runs()}
    assert {"old": "2025-01-01T10:00:03Z", "partial": ""} == found


def test_a_file_is_migrated_once(migrated: CatalogService, old_file: Path) -> None:
    before = _rows(migrated)
    migrated.close()
    with duckdb.connect(str(old_file)) as connection:
        versions = connection.execute("SELECT version FROM schema_version ORDER BY 1").fetchall()
    migrated.open()
    assert before == _rows(migrated)
    assert list(range(1, len(versions) + 1)) == [version for (version,) in versions]
