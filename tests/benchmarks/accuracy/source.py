"""The shared measurements, through our importers, in a catalog of their own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.compute as pc

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.importing import ImportRequest, find_importer
from foretoken.catalog.service import CatalogService
from foretoken.domain.job import JobState
from foretoken.domain.measurements.measurement import CheckRequest, MeasurementFilter
from foretoken.predictor.series import Series
from foretoken.predictor.training_rows import read_series
from foretoken.wire.arrow import read_table


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Files to import: the importer, a folder of the data, and what narrows it."""

    importer: str
    folder: str
    device: str = ""
    options: Mapping[str, str] = field(default_factory=dict)


AICONFIGURATOR = Source(importer="aiconfigurator", folder="aiconfigurator/systems")
GPUMODELING = Source(importer="gpumodeling", folder="gpumodeling")
# The A30's tables with the corrupt rows repaired, and the two others as they are.
VIDUR_A30 = Source(
    importer="vidur", folder="vidur/profiling", device="a30", options={"folder": "a30_clean"}
)
VIDUR_A100 = Source(importer="vidur", folder="vidur/profiling", device="a100_sxm_80")
VIDUR_H100 = Source(importer="vidur", folder="vidur/profiling", device="h100_sxm")


class Measurements:
    """What a catalog holds that nothing speaks against, by source."""

    def __init__(self, catalog: CatalogService, run_ids: Mapping[str, str]) -> None:
        self._catalog = catalog
        self._run_ids = run_ids

    def read_series(self, source: Source, operator: str) -> tuple[Series, ...]:
        """Return an operator's series as a training takes them."""
        selection = MeasurementFilter(run_id=self._run_ids[repr(source)], operator=operator)
        return read_series(self._catalog.read_measurements(selection))

    def read(self, source: Source, operator: str = "", device: str = "") -> pa.Table:
        """Return the usable rows of a source, narrowed to an operator or device where given."""
        selection = MeasurementFilter(
            run_id=self._run_ids[repr(source)], operator=operator, device=device
        )
        rows = read_table(self._catalog.read_measurements(selection))
        latency = pc.coalesce(rows["latency_us_median"], rows["latency_us_mean"])
        is_usable = pc.and_(pc.is_finite(latency), pc.greater(latency, 0.0))
        return rows.filter(pc.fill_null(is_usable, fill_value=False)).combine_chunks()


@contextmanager
def import_sources(data: Path, sources: tuple[Source, ...]) -> Iterator[Measurements]:
    """Import into a temporary catalog and let it check all rows together, as users should."""
    with TemporaryDirectory() as scratch:
        catalog = CatalogService(CatalogConfig(path=f"{scratch}/catalog.duckdb"))
        catalog.open()
        try:
            run_ids: dict[str, str] = {}
            for source in sources:
                request = ImportRequest(
                    path=data / source.folder, device=source.device, options=source.options
                )
                plan = find_importer(source.importer).read(request)
                for _ in catalog.record(plan.run, plan.batches):
                    pass
                run_ids[repr(source)] = plan.run.run_id
            # One source is judged as a whole when its last rows are there.
            if len(sources) > 1:
                _check(catalog)
            yield Measurements(catalog, run_ids)
        finally:
            catalog.close()


def _check(catalog: CatalogService) -> None:
    job = catalog.create_check(CheckRequest())
    *_, last = catalog.watch_job(job.job_id)
    if last.state is not JobState.SUCCEEDED:
        raise SystemExit(f"the check of the imported rows failed: {last.error_message}")
