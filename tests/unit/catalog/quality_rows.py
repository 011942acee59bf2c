"""Rows on a line, one of them flagged, and how a test has them checked."""

from typing import Any

from catalog_rows import row

from foretoken.catalog.service import CatalogService
from foretoken.domain.job import JobState
from foretoken.domain.measurements.measurement import CheckRequest, MeasurementFilter, QualityReport

EVERYTHING = MeasurementFilter(include_failed=True, include_flagged=True)
_SIZES = range(1000, 21_000, 1000)


def residual_adds(slip: int = 0, **changes: Any) -> list[dict[str, Any]]:
    """Return residual adds on a line, the one of `slip` tokens twice too slow."""
    rows = []
    for num_tokens in _SIZES:
        time_us = (7 + num_tokens * 4096 * 6 / 500e3) * (2 if num_tokens == slip else 1)
        dims = {"num_tokens": num_tokens, "hidden": 4096}
        rows.append(row(operator="residual_add", dims=dims, latency_us_median=time_us, **changes))
    return rows


def check(catalog: CatalogService, **fields: Any) -> QualityReport:
    """Check the catalog and wait for the report."""
    job = catalog.create_check(CheckRequest(**fields))
    assert JobState.SUCCEEDED is list(catalog.watch_job(job.job_id))[-1].state
    return catalog.get_check_report(job.job_id)
