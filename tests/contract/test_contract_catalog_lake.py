"""The catalog with its tables in PostgreSQL and Parquet files behaves as the one in a file.

The tests are those of the file, collected here again with another `port`.
"""

from collections.abc import Iterator

import pytest
from lake_servers import find_missing, serve_postgres
from test_contract_catalog import *  # noqa: F403
from test_contract_catalog_admin import *  # noqa: F403
from test_contract_catalog_artifacts import *  # noqa: F403
from test_contract_catalog_artifacts import MAX_ARTIFACT_BYTES
from test_contract_job_records import *  # noqa: F403
from test_contract_job_records import MAX_KEPT_JOBS, Clock

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.domain.ports import CatalogAdminPort

_TABLES = (
    "measurement",
    "batch",
    "run",
    "review",
    "doubt",
    "snapshot",
    "snapshot_holder",
    "artifact",
    "artifact_chunk",
)

_JOB_TABLES = ("job_record", "job_piece")

if missing := find_missing():
    pytest.skip(missing, allow_module_level=True)


_clock = Clock()


@pytest.fixture
def clock() -> Clock:
    return _clock


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CatalogService]:
    folder = tmp_path_factory.mktemp("lake")
    with serve_postgres() as postgres:
        lake = postgres.lake(str(folder / "rows"), "catalog")
        path = str(folder / "catalog.duckdb")
        config = CatalogConfig(
            path=path,
            num_threads=1,
            sql_max_rows=10_000,
            max_artifact_bytes=MAX_ARTIFACT_BYTES,
            max_kept_jobs=MAX_KEPT_JOBS,
            lake=lake,
        )
        service = CatalogService(config, _clock)
        service.open()
        yield service
        service.close()


@pytest.fixture
def port(service: CatalogService) -> Iterator[CatalogAdminPort]:
    """A catalog without rows. What is between it and a remote caller is tested with a file."""
    yield service
    with service._store.transaction() as cursor:
        for table in _TABLES:
            cursor.execute(f"DELETE FROM {table}")  # noqa: S608 - our own tables
    with service._records.transaction() as cursor:
        for table in _JOB_TABLES:
            cursor.execute(f"DELETE FROM {table}")  # noqa: S608 - our own tables
