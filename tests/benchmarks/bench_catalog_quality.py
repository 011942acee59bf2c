"""Which known defects of the shared measurements a check finds by itself, and its false alarms.

Prints for every known defect how many rows of its table are flagged and by which tests, for every
sound table set how many are, and the seconds that judging takes at ingest and in a full check. Runs
on `../shared/data`; `python bench_catalog_quality.py skew` checks the skew tables as sums only.
"""

import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.compute as pc
from bench_catalog_ingest import make_rows

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.dims import split_by_operator
from foretoken.catalog.importing import ImportRequest, find_importer
from foretoken.catalog.quality import judge
from foretoken.catalog.quality.ingest import INGEST_TESTS
from foretoken.catalog.quality.test_definition import all_tests
from foretoken.catalog.service import CatalogService
from foretoken.domain.measurements.measurement import (
    CheckRequest,
    MeasurementBatch,
    MeasurementFilter,
    QualityReport,
    Run,
    RunKind,
)
from foretoken.wire.arrow import read_table

_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
_TESTS = {*INGEST_TESTS, *(test.name for test in all_tests())}
_BATCH_ROWS = 100_000
_ALL = MeasurementFilter(include_failed=True, include_flagged=True)
_A30 = "compute/a30/Qwen/Qwen-2-7B/mlp.csv"


@dataclass(frozen=True, slots=True)
class _Source:
    """Files to import; the key it has in `_SOURCES` is its run."""

    format: str
    path: str
    device: str = ""
    options: Mapping[str, str] = field(default_factory=dict)


_SOURCES = {
    "vidur": _Source("vidur", "vidur/profiling"),
    "a30_clean": _Source("vidur", "vidur/profiling", "a30", {"folder": "a30_clean"}),
    "llmservingsim": _Source("llmservingsim", "llmservingsim"),
    "gpumodeling": _Source("gpumodeling", "gpumodeling"),
    "aiconfigurator": _Source("aiconfigurator", "aiconfigurator/systems"),
}


@dataclass(frozen=True, slots=True)
class _Defect:
    """A known defect: rows of one pass of a file, by the end of its name, and how many are bad."""

    name: str
    run: str
    file: str
    phase: str = "forward"
    num_bad: int | None = None


_DEFECTS = (
    _Defect("A30 attn_pre_proj: 2 us rows", "vidur", _A30, num_bad=76),
    _Defect("A100 linear2: mp=1 only", "gpumodeling", "A100-SXM4-80GB_linear2_fp16.csv"),
    _Defect("A100 linear2: mp=1 only", "gpumodeling", "SXM4-80GB_linear2_fp16.csv", "backward"),
    _Defect("GH200 flash backward", "gpumodeling", "120GB_flash_atten_fp16.csv", "backward"),
    _Defect("GH200 layernorm backward", "gpumodeling", "120GB_layernorm_fp16.csv", "backward"),
    _Defect("GH200 first optimizer", "gpumodeling", "120GB_firstStage_optimizer_fp16.csv"),
    _Defect("GH200 middle optimizer", "gpumodeling", "120GB_middleStage_optimizer_fp16.csv"),
    _Defect("GH200 last optimizer", "gpumodeling", "120GB_lastStage_optimizer_fp16.csv"),
    _Defect("Vista all-gather 4x1", "gpumodeling", "120GB_allgather_large_fp16_4_1.csv"),
    _Defect("Vista all-gather 8x1", "gpumodeling", "120GB_allgather_large_fp16_8_1.csv"),
    _Defect("Perlmutter all-gather 1x2", "gpumodeling", "80GB_allgather_large_fp16_1_2.csv"),
    _Defect("Perlmutter all-gather 1x4", "gpumodeling", "80GB_allgather_large_fp16_1_4.csv"),
    _Defect("Perlmutter all-reduce 1x4", "gpumodeling", "80GB_allreduce_large_fp16_1_4.csv"),
    _Defect("A100 flash: not causal", "gpumodeling", "80GB_flash_atten_fp16.csv"),
    _Defect("GH200 flash: not causal", "gpumodeling", "120GB_flash_atten_fp16.csv"),
)
# A backward pass nobody listed: it takes as long as the forward pass, whatever the size.
_FOUND_HERE = (
    _Defect("GH200 embedding backward", "gpumodeling", "120GB_embedding_fp16.csv", "backward"),
)


@dataclass(frozen=True, slots=True)
class _Table:
    """Rows of one pass of one file: how many, how many flagged, and by which tests."""

    run: str
    device: str
    file: str
    phase: str
    num_rows: int
    num_flagged: int
    tests: Mapping[str, int]

    def shows(self, defect: _Defect) -> bool:
        """Return whether the defect is in this table."""
        named = (self.run, self.phase) == (defect.run, defect.phase)
        return named and self.file.endswith(defect.file)


def read_source(source: _Source) -> pa.Table:
    """Return all rows of a source."""
    request = ImportRequest(
        path=_DATA / source.path, device=source.device, options=dict(source.options)
    )
    plan = find_importer(source.format).read(request)
    return pa.concat_tables([pa.table(batch.rows) for batch in plan.batches])


def record(catalog: CatalogService, run_id: str, rows: pa.Table) -> None:
    """Store rows as one import."""
    starts = range(0, rows.num_rows, _BATCH_ROWS)
    batches = [
        MeasurementBatch(
            batch_index=index,
            rows=rows.slice(start, _BATCH_ROWS),
            is_last=start + _BATCH_ROWS >= rows.num_rows,
        )
        for index, start in enumerate(starts)
    ]
    run = Run(run_id=run_id, kind=RunKind.IMPORT, tool=run_id, content_hash=run_id)
    for _ in catalog.record(run, batches):
        pass


def check(catalog: CatalogService) -> QualityReport:
    """Return the report of a full check."""
    job = catalog.create_check(CheckRequest())
    for _ in catalog.watch_job(job.job_id):
        pass
    return catalog.get_check_report(job.job_id)


def count_flags(catalog: CatalogService) -> Iterator[_Table]:
    """Yield how many rows of each table our tests flag."""
    rows = read_table(catalog.read_measurements(_ALL))
    keys = ("run_id", "device", "source_file", "phase")
    totals = rows.group_by(keys).aggregate([([], "count_all")]).to_pylist()
    has_flags = pc.greater(pc.fill_null(pc.list_value_length(rows.column("flags")), 0), 0)
    flagged: dict[tuple[str, ...], list[set[str]]] = {}
    for row in rows.select([*keys, "flags"]).filter(has_flags).to_pylist():
        tests = {flag.split(":")[0] for flag in row["flags"]} & _TESTS
        if tests:
            flagged.setdefault(tuple(row[key] for key in keys), []).append(tests)
    for total in totals:
        place = tuple(total[key] for key in keys)
        found = flagged.get(place, [])
        tests = Counter(test for names in found for test in names)
        yield _Table(*place, total["count_all"], len(found), tests)


def say_defect(defect: _Defect, tables: list[_Table]) -> str:
    """Return a line that says whether a defect was found."""
    table = next(found for found in tables if found.shows(defect))
    num_bad = defect.num_bad or table.num_rows
    share = table.num_flagged / num_bad
    verdict = "found" if share > 0.95 else "part" if share > 0.02 else "not found"
    tests = ", ".join(f"{test} {number}" for test, number in sorted(table.tests.items()))
    return f"{defect.name:28} {verdict:10} {table.num_flagged:>6}/{num_bad:<6} {tests}\n"


def say_rate(name: str, tables: list[_Table]) -> str:
    """Return a line with the part of some tables that is flagged."""
    num_rows = sum(table.num_rows for table in tables)
    num_flagged = sum(table.num_flagged for table in tables)
    return f"{name:40} {num_flagged:>6}/{num_rows:<8} {num_flagged / num_rows:.2%}\n"


def report_all(folder: Path) -> None:
    """Import every source into one catalog, check it, and print what was found."""
    catalog = CatalogService(CatalogConfig(path=str(folder / "all.duckdb"), num_threads=1))
    catalog.open()
    for name, source in _SOURCES.items():
        record(catalog, name, read_source(source))
    report = check(catalog)
    tables = list(count_flags(catalog))
    catalog.close()
    write = sys.stdout.write
    write(f"{report.num_rows:,} rows checked in {report.wall_s:.1f} s, one thread\n\n")
    bad = (*_DEFECTS, *_FOUND_HERE)
    for defect in bad:
        write(say_defect(defect, tables))
    write("\nflagged among sound tables (those above left out)\n")
    sound = [table for table in tables if not any(table.shows(defect) for defect in bad)]
    for name in _SOURCES:
        devices = sorted({table.device for table in sound if table.run == name})
        for device in devices:
            chosen = [t for t in sound if (t.run, t.device) == (name, device)]
            write(say_rate(f"{name} {device}", chosen))
        write(say_rate(name, [table for table in sound if table.run == name]))


def report_skew(folder: Path) -> None:
    """Import the skew tables as the sums of three iterations that their files hold."""
    rows = read_source(_SOURCES["llmservingsim"])
    is_skew = pc.ends_with(rows.column("source_file"), "skew.csv")
    times = rows.column("latency_us_median")
    summed = pc.if_else(is_skew, pc.multiply(times, 3.0), times)
    position = rows.schema.get_field_index("latency_us_median")
    catalog = CatalogService(CatalogConfig(path=str(folder / "skew.duckdb"), num_threads=1))
    catalog.open()
    record(catalog, "sums", rows.set_column(position, "latency_us_median", summed))
    tables = list(count_flags(catalog))
    catalog.close()
    skewed = [table for table in tables if table.file.endswith("skew.csv")]
    others = [table for table in tables if not table.file.endswith("skew.csv")]
    sys.stdout.write("\n" + say_rate("skew tables, not divided by 3: found", skewed))
    sys.stdout.write(say_rate("all other tables: false alarms", others))


def report_ingest() -> None:
    """Print the seconds that judging a batch takes."""
    for num_rows in (100_000, 10_000, 1_000):
        table, groups = split_by_operator(make_rows(num_rows, 0))
        times = []
        for _ in range(30):
            start_s = time.perf_counter()
            judge(table, groups)
            times.append(time.perf_counter() - start_s)
        sys.stdout.write(f"judge {num_rows:>7} rows: {1e3 * min(times):.2f} ms, best of 30\n")


def main() -> None:
    """Print all of it, or what was asked for."""
    with TemporaryDirectory() as folder:
        if sys.argv[1:] != ["skew"]:
            report_ingest()
            report_all(Path(folder))
        report_skew(Path(folder))


if __name__ == "__main__":
    main()
