"""Stored rows are judged together; flags begin and end with reviews, and rows never change."""

import threading
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from catalog_rows import batches, gemms, row, run, table
from quality_rows import EVERYTHING, check, residual_adds

from foretoken.catalog.quality.review import review
from foretoken.catalog.service import CatalogService
from foretoken.domain.errors import (
    CancelledJobError,
    UnknownDeviceError,
    UnknownOperatorError,
)
from foretoken.domain.measurements.measurement import (
    CheckRequest,
    MeasurementFilter,
    QualityReport,
    RunKind,
)
from foretoken.wire.arrow import read_table

_NOW = datetime(2026, 5, 6, tzinfo=UTC)


def _record(
    catalog: CatalogService, run_id: str, *tables: pa.Table, kind: RunKind = RunKind.IMPORT
) -> None:
    list(catalog.record(run(run_id, kind), batches(*tables)))


def _flagged(
    catalog: CatalogService, selection: MeasurementFilter = EVERYTHING
) -> dict[tuple[str, int], list[str]]:
    """Return the names of flags by run and number of tokens."""
    found = {}
    for read in read_table(catalog.read_measurements(selection)).to_pylist():
        if read["flags"]:
            place = (read["run_id"], dict(read["dims"])["num_tokens"])
            found[place] = [flag.split(":")[0] for flag in read["flags"]]
    return found


def test_a_run_is_reviewed_when_it_is_complete(catalog: CatalogService) -> None:
    """The slip and its neighbours came in different batches."""
    rows = residual_adds(slip=10_000)
    _record(catalog, "run-1", table(*rows[::2]), table(*rows[1::2]))
    assert {("run-1", 10_000): ["local_outlier"]} == _flagged(catalog)


def test_a_later_run_may_cast_doubt_on_an_earlier_one(catalog: CatalogService) -> None:
    """One of them must be wrong."""
    _record(catalog, "run-1", table(residual_adds()[3]))
    _record(catalog, "run-2", table(residual_adds(slip=4000)[3]))
    doubt = ["duplicate_disagrees"]
    assert {("run-1", 4000): doubt, ("run-2", 4000): doubt} == _flagged(catalog)


def test_a_doubt_that_no_longer_holds_ends_and_snapshots_keep_it(catalog: CatalogService) -> None:
    """Two runs more agree with the slow one: that one was right."""
    _record(catalog, "run-1", table(residual_adds()[3]))
    _record(catalog, "run-2", table(residual_adds(slip=4000)[3]))
    snapshot = catalog.create_snapshot(EVERYTHING)
    for number in (3, 4):
        _record(catalog, f"run-{number}", table(residual_adds(slip=4000)[3]))
    assert {("run-1", 4000): ["duplicate_disagrees"]} == _flagged(catalog)
    kept = MeasurementFilter(
        include_failed=True, include_flagged=True, snapshot=snapshot.content_hash
    )
    assert {("run-1", 4000), ("run-2", 4000)} == set(_flagged(catalog, kept))


def test_a_check_that_finds_nothing_new_writes_no_doubt(catalog: CatalogService) -> None:
    _record(catalog, "run-1", table(*residual_adds(slip=10_000)))
    before = catalog.describe_snapshot(EVERYTHING)
    report = check(catalog)
    assert (20, 0, 1, 0, 0) == (
        report.num_rows,
        report.num_failed,
        report.num_flagged,
        report.num_new,
        report.num_withdrawn,
    )
    assert before == catalog.describe_snapshot(EVERYTHING)


def test_the_report_says_who_what_and_where(catalog: CatalogService) -> None:
    """Flags of the review, and those the rows got at ingest."""
    rows = [
        *residual_adds(slip=10_000, source_file="a.csv"),
        *gemms([4096], kernel="k").to_pylist(),
    ]
    rows[-1]["latency_us_median"] = 1.0
    failed = row(status="failed", status_reason="out of memory", latency_us_median=None)
    _record(catalog, "run-1", table(*rows, failed))
    report = check(catalog)
    assert (22, 1, 2) == (report.num_rows, report.num_failed, report.num_flagged)
    by_test = {finding.test: finding for finding in report.findings}
    slip, impossible = by_test["local_outlier"], by_test["faster_than_physics"]
    assert ("residual_add", "a30", "forward", "vllm", 20, 1, "a.csv") == (
        slip.operator,
        slip.device,
        slip.phase,
        slip.framework,
        slip.num_rows,
        slip.num_flagged,
        slip.source_file,
    )
    assert ("gemm", "k", 1) == (impossible.operator, impossible.kernel, impossible.num_flagged)
    assert "2 times what its neighbours suggest" == slip.example
    assert 0.0 < report.wall_s


def test_a_dry_run_says_what_it_would_write_and_writes_nothing(catalog: CatalogService) -> None:
    _record(catalog, "run-1", table(*residual_adds(slip=10_000)), kind=RunKind.PROFILE)
    with catalog._store.transaction() as cursor:
        cursor.execute("DELETE FROM doubt")
    assert (1, 1) == _counts(check(catalog, is_dry_run=True))
    assert {} == _flagged(catalog)
    assert (1, 1) == _counts(check(catalog))
    assert {("run-1", 10_000): ["local_outlier"]} == _flagged(catalog)
    assert (1, 0) == _counts(check(catalog))


def _counts(report: QualityReport) -> tuple[int, int]:
    return report.num_flagged, report.num_new


def test_a_check_of_one_run_judges_it_among_all_others(catalog: CatalogService) -> None:
    _record(catalog, "run-1", table(*residual_adds()[:9], *residual_adds()[10:]))
    _record(catalog, "run-2", table(residual_adds(slip=10_000)[9]))
    report = check(catalog, run_id="run-2")
    assert (1, 1) == (report.num_rows, report.num_flagged)


@pytest.mark.parametrize(
    ("fields", "num_rows"),
    [({}, 40), ({"operator": "gelu"}, 0), ({"device": "a30"}, 20), ({"run_id": "run-2"}, 20)],
)
def test_a_check_looks_at_what_was_asked_for(
    fields: dict[str, str], num_rows: int, catalog: CatalogService
) -> None:
    _record(catalog, "run-1", table(*residual_adds()))
    _record(catalog, "run-2", table(*residual_adds(device="a40")))
    assert num_rows == check(catalog, **fields).num_rows


def test_an_import_under_way_is_not_judged(catalog: CatalogService) -> None:
    list(
        catalog.record(
            run(kind=RunKind.IMPORT), batches(table(*residual_adds()), is_complete=False)
        )
    )
    assert QualityReport(wall_s=0.0) == _without_time(check(catalog))


def _without_time(report: QualityReport) -> QualityReport:
    return QualityReport(num_rows=report.num_rows, findings=report.findings)


def test_unknown_names_are_said_at_once(catalog: CatalogService) -> None:
    with pytest.raises(UnknownOperatorError):
        catalog.create_check(CheckRequest(operator="gem"))
    with pytest.raises(UnknownDeviceError):
        catalog.create_check(CheckRequest(device="a31"))


def test_a_cancelled_check_writes_nothing(catalog: CatalogService) -> None:
    _record(catalog, "run-1", table(*residual_adds(slip=10_000)))
    with catalog._store.transaction() as cursor:
        cursor.execute("DELETE FROM doubt")

    def cancel(_ratio: float, _message: str) -> None:
        raise CancelledJobError("enough")

    with pytest.raises(CancelledJobError):
        review(catalog._store, CheckRequest(), _NOW, cancel)
    assert {} == _flagged(catalog)


def test_rows_may_be_recorded_while_others_are_judged(catalog: CatalogService) -> None:
    _record(catalog, "run-1", table(*residual_adds()))
    started, may_go_on = threading.Event(), threading.Event()

    def wait(_ratio: float, _message: str) -> None:
        started.set()
        assert may_go_on.wait(60)

    thread = threading.Thread(target=review, args=(catalog._store, CheckRequest(), _NOW, wait))
    thread.start()
    assert started.wait(60)
    _record(catalog, "run-2", table(*residual_adds(slip=10_000)))
    may_go_on.set()
    thread.join()
    assert "run-2" in {run_id for run_id, _ in _flagged(catalog)}
