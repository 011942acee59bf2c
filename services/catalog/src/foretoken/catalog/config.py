"""Configuration of the catalog service."""

import re
from dataclasses import dataclass

from foretoken.domain.errors import InvalidRequestError, at_least, positive

_PASSWORD = re.compile(r"\bpassword\s*=|://[^/@]*:[^/@]*@", re.IGNORECASE)
# Some 500,000 rows of small batches, which take a second to read at the opening after a crash.
DEFAULT_MAX_LOG_BYTES = 128_000_000
_POSITIVE = (
    "max_log_bytes",
    "max_log_age_s",
    "sql_timeout_s",
    "sql_max_rows",
    "sql_max_result_bytes",
    "sql_max_disk_bytes",
    "sql_max_running",
    "max_artifact_bytes",
    "max_kept_jobs",
)
_SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class LakeConfig:
    """A catalog that several processes write: metadata in PostgreSQL, rows as Parquet files.

    `data_path` is the place of the Parquet files, `s3://bucket/folder` or a folder all processes
    share. `postgres` is a connection string (`host=db dbname=foretoken` or a URI); what it leaves
    out PostgreSQL's own variables say (PGHOST, PGUSER, ...), and the password always comes from
    PGPASSWORD or PGPASSFILE. The tables lie in the schema `schema_name`. Keys of the object store
    come from where AWS's tools look for them (AWS_ACCESS_KEY_ID, a profile, the pod's role).
    `s3_endpoint` is another store than Amazon's (`https://minio:9000`; http is unencrypted).
    """

    data_path: str
    postgres: str = ""
    schema_name: str = "foretoken"
    s3_endpoint: str = ""
    s3_region: str = ""

    def __post_init__(self) -> None:
        """Check what no lake could be opened with."""
        if not self.data_path:
            raise InvalidRequestError.of_field("data_path", "name a folder or s3://bucket/folder")
        if _PASSWORD.search(self.postgres):
            raise InvalidRequestError.of_field(
                "postgres", "holds a password, which SQL users could read; set PGPASSWORD instead"
            )
        if not _SCHEMA_NAME.fullmatch(self.schema_name):
            raise InvalidRequestError.of_field(
                "schema_name", "is lower-case letters, digits and underscores"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogConfig:
    """Where the catalog lies and what it may use.

    `path` is the DuckDB file, made when absent. `num_threads` and `memory_limit` ("4GB") bound
    the database; 0 and empty leave them to DuckDB. A batch is one transaction of at most
    `max_batch_rows`. Jobs keep their state in `state_folder`; empty means a folder next to the
    file. With `lake` the tables are there instead, and only the state of jobs is next to `path`.

    What is recorded goes to a log first. It is merged into the tables when it has `max_log_bytes`,
    and whatever is in it at the latest after `max_log_age_s`. A lake leaves both to PostgreSQL.

    A query in SQL runs in a process of its own with `sql_memory_limit` ("500MB"; empty: a tenth of
    the database's) and as much again as the program needs, 256 MiB. It may take `sql_timeout_s` and
    return `sql_max_rows` of `sql_max_result_bytes`; `sql_max_running` are answered at a time, and
    put together `sql_max_disk_bytes` on disk for what does not fit the memory.

    A file kept for another service, such as a trained model, has at most `max_artifact_bytes`. Of
    jobs that services share, the newest `max_kept_jobs` of each that have ended are kept.

    Of each caller this process takes up to `max_recorded_bytes_per_caller` of Arrow data a day, and
    answers queries for up to `sql_s_per_caller` seconds an hour (0: any amount).
    """

    path: str
    state_folder: str = ""
    num_threads: int = 0
    memory_limit: str = ""
    max_batch_rows: int = 1_000_000
    lake: LakeConfig | None = None
    max_log_bytes: int = DEFAULT_MAX_LOG_BYTES
    max_log_age_s: float = 60.0
    sql_timeout_s: float = 30.0
    sql_max_rows: int = 1_000_000
    sql_max_result_bytes: int = 2**30
    sql_max_disk_bytes: int = 10 * 2**30
    sql_memory_limit: str = ""
    sql_max_running: int = 4
    max_artifact_bytes: int = 512 * 2**20
    max_kept_jobs: int = 200
    max_recorded_bytes_per_caller: int = 0
    sql_s_per_caller: float = 0.0

    def __post_init__(self) -> None:
        """Check what no database could be opened with."""
        if not self.path:
            raise InvalidRequestError.of_field("path", "name the catalog's file")
        names = ("num_threads", "max_recorded_bytes_per_caller", "sql_s_per_caller")
        checks = at_least(self, 0, *names), at_least(self, 1, "max_batch_rows")
        InvalidRequestError.check("", {**checks[0], **checks[1], **positive(self, *_POSITIVE)})
