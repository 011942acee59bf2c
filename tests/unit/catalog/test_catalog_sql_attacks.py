"""No question in SQL writes, reaches files or the network, or reads what is not its business."""

import os
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from catalog_rows import batches, gemms, run

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.catalog.sql.child import Reader
from foretoken.catalog.sql.frame import Setup
from foretoken.catalog.sql.policy import (
    _HARMLESS,
    _REVEALERS,
    _REVEALING_PREFIXES,
    _TABLE_FUNCTIONS,
)
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.measurement import SqlQuery
from foretoken.wire.arrow import read_table

# A variable of this module is a table to DuckDB, unless it is set not to look.
secret_table = pa.table({"password": ["hunter2"]})

_WRITES = [
    "INSERT INTO run SELECT * FROM run",
    "INSERT INTO measurements SELECT * FROM measurements",
    "UPDATE measurement SET latency_us_median = 1",
    "DELETE FROM batch",
    "TRUNCATE measurement",
    "MERGE INTO batch USING batch AS b USING (batch_number) WHEN MATCHED THEN DELETE",
    "WITH gone AS (DELETE FROM batch RETURNING *) SELECT * FROM gone",
    "WITH new AS (INSERT INTO schema_version VALUES (9, 'x') RETURNING *) SELECT * FROM new",
    "SELECT * FROM (WITH n AS (UPDATE run SET tool = 'x' RETURNING *) SELECT * FROM n)",
    "DROP TABLE measurement",
    "DROP VIEW measurements",
    "ALTER TABLE run ADD COLUMN x INTEGER",
    "COMMENT ON TABLE run IS 'x'",
    "CREATE TABLE mine AS SELECT 1",
    "CREATE TEMP TABLE mine AS SELECT 1",
    "CREATE TABLE memory.main.mine AS SELECT 1",
    "CREATE OR REPLACE VIEW measurements AS SELECT 1",
    "CREATE MACRO mine(x) AS x",
    "CREATE SEQUENCE mine",
    "CREATE INDEX mine ON measurement (device)",
    "CREATE SCHEMA mine",
    "CREATE TYPE mine AS ENUM ('a')",
    "CREATE SECRET (TYPE s3)",
    "EXPLAIN ANALYZE DELETE FROM batch",
    "EXPLAIN ANALYZE CREATE TABLE mine AS SELECT 1",
    "EXPLAIN EXPLAIN ANALYZE DELETE FROM batch",
    "SELECT 1; DELETE FROM batch",
    "DELETE FROM batch; SELECT 1",
    "SELECT nextval('mine')",
    "SELECT setseed(0.5)",
    "SELECT write_log('x')",
]
_SETTINGS = [
    "SET threads = 1",
    "SET GLOBAL memory_limit = '100TB'",
    "SET operator_memory_limit = '100TB'",
    "SET enable_external_access = true",
    "SET lock_configuration = false",
    "RESET memory_limit",
    "SET VARIABLE x = 1",
    "PRAGMA enable_profiling",
    "PRAGMA database_size",
    "PRAGMA table_info('run')",
    "USE memory",
    "BEGIN",
    "COMMIT",
    "ROLLBACK",
    "CHECKPOINT",
    "FORCE CHECKPOINT store",
    "VACUUM",
    "ANALYZE",
    "PREPARE mine AS SELECT 1",
    "EXECUTE mine",
    "DEALLOCATE mine",
    "CALL enable_logging()",
    "CALL force_checkpoint()",
    "SELECT * FROM force_checkpoint()",
    "SELECT * FROM enable_profiling()",
]
_ELSEWHERE = [
    "ATTACH 'other.duckdb'",
    "ATTACH ':memory:' AS other",
    "ATTACH '{file}' AS again (READ_ONLY)",
    "DETACH store",
    "INSTALL httpfs",
    "FORCE INSTALL httpfs FROM 'http://localhost:1'",
    "LOAD httpfs",
    "LOAD '{folder}/evil.duckdb_extension'",
    "COPY measurement TO '{folder}/out.csv'",
    "COPY (SELECT 1) TO '{folder}/out.parquet'",
    "COPY measurement FROM '{folder}/secret.csv'",
    "COPY FROM DATABASE store TO memory",
    "EXPORT DATABASE '{folder}/out'",
    "IMPORT DATABASE '{folder}'",
    "FROM '{folder}/secret.csv'",
    "SELECT * FROM '{folder}/secret.csv'",
    'SELECT * FROM "{folder}/secret.csv"',
    "SELECT * FROM 'http://localhost:1/x.parquet'",
    "SELECT * FROM 's3://bucket/x.parquet'",
    "DESCRIBE '{folder}/secret.csv'",
    "SUMMARIZE '{folder}/secret.csv'",
    "SELECT * FROM read_csv('{folder}/secret.csv')",
    "SELECT * FROM read_csv_auto('{folder}/secret.csv')",
    "SELECT * FROM READ_TEXT('{folder}/secret.csv')",
    "SELECT * FROM main.read_text('{folder}/secret.csv')",
    "SELECT * FROM \"read_text\"('{folder}/secret.csv')",
    "SELECT (SELECT content FROM read_text('{folder}/secret.csv'))",
    "WITH f AS (SELECT * FROM read_text('{folder}/secret.csv')) SELECT * FROM f",
    "SELECT * FROM measurements WHERE EXISTS (FROM read_text('{folder}/secret.csv'))",
    "SELECT * FROM read_blob('{file}')",
    "SELECT * FROM read_blob('{file}.wal')",
    "SELECT * FROM read_json('{folder}/secret.csv')",
    "SELECT * FROM read_parquet('{folder}/*')",
    "SELECT * FROM parquet_metadata('{folder}/x.parquet')",
    "SELECT * FROM read_duckdb('{file}')",
    "SELECT * FROM glob('{folder}/*')",
    "SELECT * FROM sniff_csv('{folder}/secret.csv')",
    "SELECT * FROM query('SELECT * FROM batch')",
    "SELECT * FROM query_table('batch')",
    "SELECT * FROM json_execute_serialized_sql('{{}}')",
    "SELECT * FROM secret_table",
    "SELECT * FROM python_arrow_scan(1, 2, 3)",
    "SELECT * FROM arrow_scan(1, 2, 3)",
    "SELECT * FROM pandas_scan(1)",
]
_REVELATIONS = [
    "SELECT getenv('HOME')",
    "SELECT getvariable('x')",
    "SELECT current_setting('temp_directory')",
    "SELECT current_query()",
    "SELECT * FROM duckdb_settings()",
    "SELECT * FROM duckdb_settings",
    "SELECT * FROM duckdb_databases()",
    "SELECT * FROM duckdb_databases",
    "SELECT * FROM duckdb_secrets()",
    "SELECT * FROM duckdb_extensions()",
    "SELECT * FROM duckdb_temporary_files()",
    "SELECT * FROM pragma_database_size()",
    "SELECT * FROM pragma_database_list",
    "SELECT * FROM sqlite_master",
    "SELECT * FROM information_schema.tables",
    "SELECT * FROM system.information_schema.columns",
    "SELECT * FROM pg_catalog.pg_settings",
    "SELECT * FROM memory.main.measurements",
    "SELECT * FROM measurement",
    "SELECT * FROM store.main.batch",
    "SHOW DATABASES",
    "SHOW SCHEMAS",
    "SHOW VARIABLES",
    "SHOW TABLES FROM memory",
    "SHOW batch",
    "DESCRIBE batch",
    "SUMMARIZE batch",
    "SELECT * FROM (DESCRIBE batch)",
    "SELECT * FROM (SHOW DATABASES)",
    "TABLE batch",
    # A name that stands for an expression does so in its own scope only.
    "WITH a AS (WITH batch AS (SELECT 1) FROM batch) SELECT * FROM a, batch",
    "WITH duckdb_databases AS (SELECT * FROM duckdb_databases) SELECT * FROM duckdb_databases",
    "WITH batch AS (SELECT 1) SELECT * FROM main.batch",
    "SELECT pg_sleep(60)",
    "SELECT sleep_ms(60000)",
]
_ATTACKS = [*_WRITES, *_SETTINGS, *_ELSEWHERE, *_REVELATIONS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("catalog")
    (folder / "secret.csv").write_text("password\nhunter2\n")
    return folder


@pytest.fixture(scope="module")
def attacked(folder: Path) -> Iterator[CatalogService]:
    service = CatalogService(CatalogConfig(path=str(folder / "catalog.duckdb"), num_threads=1))
    service.open()
    list(service.record(run(), batches(gemms([1, 2, 3]))))
    # The process that answers has a folder for what it spills.
    read_table(service.query_sql(SqlQuery(text="SELECT 1")))
    yield service
    service.close()


def _state_of(service: CatalogService, folder: Path) -> object:
    """Return all there is: files and their times (opening the catalog's would unlock it), tables.

    Settings too, but for those that DuckDB itself counts up.
    """
    files = sorted(
        (str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")
    )
    with service._store.cursor() as cursor:
        tables = cursor.execute("SELECT table_name FROM duckdb_tables() ORDER BY ALL").fetchall()
        views = cursor.execute("SELECT view_name FROM duckdb_views() ORDER BY ALL").fetchall()
        rows = [cursor.execute(f"FROM store.{name}").fetchall() for (name,) in tables]
        settings = cursor.execute("SELECT name, value FROM duckdb_settings()").fetchall()
        databases = cursor.execute("SELECT database_name FROM duckdb_databases()").fetchall()
    return files, tables, views, rows, settings, databases


@pytest.mark.slow
@pytest.mark.parametrize("attack", _ATTACKS, ids=range(len(_ATTACKS)))
def test_it_is_refused_and_nothing_changes(
    attack: str, attacked: CatalogService, folder: Path
) -> None:
    text = attack.format(folder=folder, file=folder / "catalog.duckdb")
    before = _state_of(attacked, folder)
    with pytest.raises(InvalidRequestError):
        read_table(attacked.query_sql(SqlQuery(text=text, timeout_s=20)))
    assert before == _state_of(attacked, folder)


def test_the_attacks_are_many_and_no_two_are_the_same() -> None:
    assert len(set(_ATTACKS)) == len(_ATTACKS)
    assert len(_ATTACKS) > 60


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO store.run SELECT * FROM store.run",
        "CREATE TABLE memory.main.mine AS SELECT 1",
        "COPY (SELECT 1) TO '{folder}/out.csv'",
        "ATTACH '{folder}/other.duckdb'",
        "SELECT * FROM read_text('{folder}/secret.csv')",
        "SELECT * FROM '{folder}/secret.csv'",
        "SELECT * FROM secret_table",
        "SET memory_limit = '1TB'",
        "SET enable_external_access = true",
        "INSTALL httpfs",
        "LOAD '{folder}/evil.duckdb_extension'",
        "SELECT * FROM read_text('shared://{folder}/secret.csv')",
    ],
)
@pytest.mark.usefixtures("catalog_path")
def test_what_would_slip_through_is_stopped_by_the_database(
    statement: str, folder: Path, tmp_path: Path
) -> None:
    """The search of the syntax tree is not all that stands between a question and the machine."""
    connection = _open_reader(tmp_path)
    with pytest.raises(duckdb.Error):
        connection.execute(statement.format(folder=folder)).fetchall()
    connection.close()
    assert {"catalog.duckdb", "catalog.duckdb.acknowledged", "catalog.duckdb.state"} == {
        path.name for path in tmp_path.iterdir()
    }


@pytest.mark.usefixtures("catalog_path")
def test_the_file_is_seen_as_its_tables_alone(tmp_path: Path) -> None:
    """DuckDB allows whatever is attached; the bytes of the file are more than its views show."""
    connection = _open_reader(tmp_path)
    file = f"shared://{tmp_path / 'catalog.duckdb'}"
    assert [] == connection.execute(f"SELECT * FROM read_blob('{file}')").fetchall()  # noqa: S608
    connection.close()


def _open_reader(folder: Path) -> duckdb.DuckDBPyConnection:
    """Return a connection as the process has it that answers questions."""
    connection = Reader(_setup(folder / "catalog.duckdb"))._open("1")
    connection.execute("BEGIN TRANSACTION READ ONLY")
    return connection


def _setup(path: Path) -> Setup:
    return Setup(
        path=str(path),
        lake=None,
        views={},
        num_threads=1,
        memory_bytes=2**27,
        spill_folder=str(path.parent / "spill"),
        max_spill_bytes=2**20,
        max_rows=10,
        max_result_bytes=2**20,
    )


def test_no_function_of_this_duckdb_was_overlooked() -> None:
    """A newer DuckDB may bring functions that change something, or reveal the process."""
    with duckdb.connect() as connection:
        volatile = connection.execute(
            "SELECT DISTINCT function_name FROM duckdb_functions()"
            " WHERE (stability = 'VOLATILE' OR has_side_effects)"
            " AND function_type IN ('scalar', 'aggregate', 'macro')"
        ).fetchall()
    known = _REVEALERS | _HARMLESS
    harmless = {
        "gen_random_uuid",
        "get_current_time",
        "get_current_timestamp",
        "now",
        "random",
        "today",
        "transaction_timestamp",
        "uuid",
        "uuidv4",
        "uuidv7",
    }
    names = {name for (name,) in volatile if not name.startswith(_REVEALING_PREFIXES)}
    assert set() == names - known - harmless
    assert {"generate_series", "range", "unnest"} == _TABLE_FUNCTIONS


def test_the_file_stays_locked(attacked: CatalogService, folder: Path) -> None:
    """A process loses its lock on a file when it closes that once: none of it may open the file."""
    list(attacked.backup())
    attacked.compact()
    read_table(attacked.query_sql(SqlQuery(text="FROM measurements")))
    path = folder / "catalog.duckdb"
    assert os.getpid() in _holders_of(path)


def _holders_of(path: Path) -> set[int]:
    inode = path.stat().st_ino
    locks = Path("/proc/locks")
    if not locks.exists():
        pytest.skip("this system does not list its locks")
    return {int(line.split()[4]) for line in locks.read_text().splitlines() if f":{inode} " in line}
