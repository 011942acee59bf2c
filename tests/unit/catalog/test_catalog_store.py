"""The file: opened once, made when absent, refused when it is not a catalog."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest
from catalog_rows import batches, gemms, run

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.dims import MAX_DIMS
from foretoken.catalog.service import CatalogService
from foretoken.catalog.storage.schema import check_operators
from foretoken.domain.errors import (
    CatalogBusyError,
    CorruptCatalogError,
    ForetokenError,
    InvalidRequestError,
)
from foretoken.domain.measurements.measurement import MeasurementFilter, SqlQuery
from foretoken.domain.operators.spec.operator import Dim, all_operators, find_operator
from foretoken.wire.arrow import read_table

_HOLD = """
import sys
from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
service = CatalogService(CatalogConfig(path=sys.argv[1]))
service.open()
print("open", flush=True)
sys.stdin.read()
"""


def _open_error(path: Path) -> ForetokenError:
    service = CatalogService(CatalogConfig(path=str(path)))
    with pytest.raises(ForetokenError) as caught:
        service.open()
    return caught.value


def test_a_new_file_and_its_folders_are_made(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "folder" / "catalog.duckdb"
    service = CatalogService(CatalogConfig(path=str(path)))
    service.open()
    service.close()
    assert path.stat().st_size > 0


def test_closing_twice_is_harmless(catalog: CatalogService) -> None:
    catalog.close()
    catalog.close()


def test_a_closed_catalog_says_so(catalog: CatalogService) -> None:
    catalog.close()
    with pytest.raises(CatalogBusyError, match="is not open"):
        catalog.list_runs()


def test_what_was_stored_is_there_after_reopening(catalog: CatalogService) -> None:
    list(catalog.record(run(), batches(gemms([1, 2]))))
    catalog.close()
    catalog.open()
    assert 2 == read_table(catalog.read_measurements(MeasurementFilter())).num_rows


def test_a_file_open_in_another_process_is_busy(tmp_path: Path) -> None:
    path = tmp_path / "catalog.duckdb"
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert "open\n" == holder.stdout.readline()
        error = _open_error(path)
        holder.communicate("")
    assert isinstance(error, CatalogBusyError)
    assert "open in another process" in error.message
    assert str(holder.pid) == error.details["pid"]


@pytest.mark.usefixtures("catalog")
def test_a_file_open_in_this_process_is_busy(tmp_path: Path) -> None:
    assert isinstance(_open_error(tmp_path / "catalog.duckdb"), CatalogBusyError)


@pytest.mark.parametrize("content", [b"", b"not a database" * 1000], ids=["empty", "text"])
def test_another_file_is_refused_and_left_alone(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "catalog.duckdb"
    path.write_bytes(content)
    assert isinstance(_open_error(path), CorruptCatalogError)
    assert content == path.read_bytes()


@pytest.mark.parametrize("version", ["", "(STORAGE_VERSION 'v1.5.0')"], ids=["newest", "same"])
def test_another_database_is_refused(version: str, tmp_path: Path) -> None:
    path = tmp_path / "other.duckdb"
    with duckdb.connect() as connection:
        connection.execute(f"ATTACH '{path}' AS other {version}")
        connection.execute("CREATE TABLE other.somebody_elses (x INTEGER)")
    error = _open_error(path)
    assert isinstance(error, CorruptCatalogError)
    assert "not a catalog" in error.message


def test_a_catalog_of_a_newer_version_is_refused(catalog: CatalogService, tmp_path: Path) -> None:
    catalog.close()
    path = tmp_path / "catalog.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute("INSERT INTO schema_version VALUES (9000, 'from the future')")
    error = _open_error(path)
    assert isinstance(error, CorruptCatalogError)
    assert "use a newer Foretoken" in error.message


def test_a_path_that_cannot_be_a_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert isinstance(_open_error(tmp_path), InvalidRequestError)
    assert isinstance(_open_error(tmp_path / "file" / "catalog.duckdb"), InvalidRequestError)


def test_an_empty_path_is_said() -> None:
    with pytest.raises(InvalidRequestError, match="path"):
        CatalogConfig(path="")


def test_every_operator_has_a_view_with_its_dims_as_columns(
    catalog: CatalogService, tmp_path: Path
) -> None:
    list(catalog.record(run(), batches(gemms([3, 5]))))
    catalog.close()
    with duckdb.connect(str(tmp_path / "catalog.duckdb")) as connection:
        views = {name for (name,) in connection.execute("SHOW TABLES").fetchall()}
        rows = connection.execute("SELECT m, n, k, device FROM op_gemm ORDER BY m").fetchall()
    assert set() == {f"op_{name}" for name in all_operators()} - views
    assert [(3, 4096, 4096, "a30"), (5, 4096, 4096, "a30")] == rows


def test_only_views_that_fit_their_operator_no_more_are_made_anew(catalog: CatalogService) -> None:
    """What a view says of itself tells; in a lake every change is one more version."""
    with catalog._store.transaction() as cursor:
        ((says,),) = cursor.execute(
            "SELECT comment FROM duckdb_views() WHERE view_name = 'op_silu'"
        ).fetchall()
        for name, comment in (("op_gemm", "a matrix product (0123abcd)"), ("op_silu", says)):
            cursor.execute(f"CREATE OR REPLACE VIEW {name} AS SELECT d0 AS rows FROM measurement")  # noqa: S608
            cursor.execute(f"COMMENT ON VIEW {name} IS '{comment}'")
    catalog.close()
    catalog.open()
    list(catalog.record(run(), batches(gemms([7]))))
    rows = read_table(catalog.query_sql(SqlQuery(text="SELECT m, n FROM op_gemm")))
    assert [{"m": 7, "n": 4096}] == rows.to_pylist()
    with catalog._store.cursor() as cursor:
        assert [(7,)] == cursor.execute("SELECT rows FROM op_silu").fetchall()


def test_the_file_is_of_the_older_storage_version(catalog: CatalogService) -> None:
    """So that a catalog written here can be read by the oldest DuckDB that is supported."""
    with catalog._store.cursor() as cursor:
        tags = cursor.execute(
            "SELECT tags FROM duckdb_databases() WHERE database_name = 'store'"
        ).fetchone()
    assert "v1.5" in str(tags)


def test_an_operator_of_too_many_dims_is_said() -> None:
    """The table has so many columns for dimensions; a plug-in beyond them is named."""
    many = tuple(Dim(f"x{place}", "one of many") for place in range(MAX_DIMS + 1))
    wide = dataclasses.replace(find_operator("gemm"), name="wide", dims=many)
    with pytest.raises(InvalidRequestError, match="operator wide: has 19 dimensions"):
        check_operators([wide])
    check_operators([dataclasses.replace(wide, dims=many[:-1])])
