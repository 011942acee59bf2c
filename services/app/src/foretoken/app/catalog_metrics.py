"""Prometheus metrics of a catalog that runs in this process, read when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from foretoken.catalog.service import CatalogService

_PREFIX = "foretoken_catalog"


class CatalogMetrics(Collector):
    """What was recorded, refused and asked since the catalog was opened, and what it takes now."""

    def __init__(self, catalog: CatalogService) -> None:
        self._catalog = catalog

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: registering must not open the catalog."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they stand."""
        yield from self._collect_ingest()
        yield from self._collect_sql()
        yield GaugeMetricFamily(
            f"{_PREFIX}_users", "Reads and writes under way", value=self._catalog.num_readers
        )
        yield GaugeMetricFamily(
            f"{_PREFIX}_storage_bytes", "Size of the catalog", value=self._catalog.size_bytes()
        )

    def _collect_ingest(self) -> Iterator[Metric]:
        ingest = self._catalog.statistics()
        counts = (
            ("rows", "New rows on disk", ingest.num_rows),
            ("ingest_bytes", "Arrow data of new rows", ingest.num_bytes),
            ("batches", "New batches on disk", ingest.num_batches),
            ("duplicate_batches", "Batches that were there already", ingest.num_duplicates),
            ("ingest_seconds", "Time from arrival to receipt", ingest.ingest_s),
        )
        for name, meaning, value in counts:
            yield CounterMetricFamily(f"{_PREFIX}_{name}", meaning, value=value)
        rejects = CounterMetricFamily(
            f"{_PREFIX}_rejects", "Batches that were refused", labels=("reason",)
        )
        for reason, count in ingest.rejects.items():
            rejects.add_metric((reason,), count)
        yield rejects

    def _collect_sql(self) -> Iterator[Metric]:
        sql = self._catalog.sql_statistics()
        yield CounterMetricFamily(
            f"{_PREFIX}_sql_queries", "SQL queries asked", value=sql.num_asked
        )
        yield GaugeMetricFamily(
            f"{_PREFIX}_sql_queries_running", "SQL queries under way", value=sql.num_running
        )
        limits = CounterMetricFamily(
            f"{_PREFIX}_sql_limits", "SQL queries that a limit ended", labels=("limit",)
        )
        for limit, count in sql.limits_hit.items():
            limits.add_metric((limit,), count)
        yield limits
