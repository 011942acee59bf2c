"""Configuration of the catalog service."""

from dataclasses import dataclass

from foretoken.domain.errors import InvalidRequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogConfig:
    """Where the catalog lies and what it may use.

    `path` is the DuckDB file, made when absent. `num_threads` and `memory_limit` ("4GB") bound
    the database; 0 and empty leave them to DuckDB. A batch is one transaction of at most
    `max_batch_rows`.
    """

    path: str
    num_threads: int = 0
    memory_limit: str = ""
    max_batch_rows: int = 1_000_000

    def __post_init__(self) -> None:
        """Check what no database could be opened with."""
        if not self.path:
            raise InvalidRequestError.of_field("path", "name the catalog's file")
        if self.num_threads < 0:
            raise InvalidRequestError.of_field("num_threads", "must not be negative")
        if self.max_batch_rows < 1:
            raise InvalidRequestError.of_field("max_batch_rows", "must be at least 1")
