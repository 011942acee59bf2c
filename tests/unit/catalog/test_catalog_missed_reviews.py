"""A crash between the commit that completes a run and its review leaves no run unjudged."""

from pathlib import Path

import pytest
from catalog_rows import batches, gemms, run, table
from quality_rows import EVERYTHING, residual_adds

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.dataset import DATASET_TOOL
from foretoken.catalog.service import CatalogService
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.job import JobState
from foretoken.domain.measurements.measurement import REVIEW_JOB, CheckRequest, Run, RunKind
from foretoken.wire.arrow import read_table


def _record(catalog: CatalogService, of: Run, *, is_complete: bool = True) -> None:
    rows = table(*residual_adds(slip=10_000))
    list(catalog.record(of, batches(rows, is_complete=is_complete)))


def _forget_reviews(catalog: CatalogService) -> None:
    """Leave the tables as a crash does after the last commit of a run."""
    with catalog._store.transaction() as cursor:
        cursor.execute("DELETE FROM review; DELETE FROM doubt")


def _reviewed(catalog: CatalogService) -> list[str]:
    with catalog._store.cursor() as cursor:
        rows = cursor.execute("SELECT run_id FROM review ORDER BY 1").fetchall()
    return [run_id for (run_id,) in rows]


def _num_flagged(catalog: CatalogService) -> int:
    flags = read_table(catalog.read_measurements(EVERYTHING)).column("flags").to_pylist()
    return sum(bool(found) for found in flags)


def _reopen(catalog: CatalogService) -> None:
    catalog.close()
    catalog.open()


def test_runs_without_review_are_reviewed_at_the_next_opening_once(
    catalog: CatalogService,
) -> None:
    for number in (1, 2):
        _record(catalog, run(f"run-{number}", RunKind.IMPORT))
    _forget_reviews(catalog)
    for _ in range(2):
        _reopen(catalog)
        assert ["run-1", "run-2"] == _reviewed(catalog)
        assert 2 == _num_flagged(catalog)


def test_the_review_of_an_import_is_a_job_that_others_may_watch(catalog: CatalogService) -> None:
    """A profile is small, and its review is over before anyone looks."""
    _record(catalog, run("profile", RunKind.PROFILE))
    assert () == catalog.list_jobs()
    _record(catalog, run("import", RunKind.IMPORT))
    (job,) = catalog.list_jobs()
    assert (REVIEW_JOB, JobState.SUCCEEDED) == (job.kind, job.state)
    assert ["import", "profile"] == _reviewed(catalog)


def test_what_was_reviewed_or_is_not_complete_is_left_alone(catalog: CatalogService) -> None:
    """The rows of a dataset were judged where they are from."""
    _record(catalog, run("done", RunKind.IMPORT))
    _record(catalog, run("growing"), is_complete=False)
    _record(catalog, Run(run_id="dataset", kind=RunKind.IMPORT, tool=DATASET_TOOL, content_hash=""))
    _reopen(catalog)
    assert ["done"] == _reviewed(catalog)


def test_a_check_of_a_part_does_not_stand_for_the_review_of_the_run(
    catalog: CatalogService,
) -> None:
    _record(catalog, run("run-1", RunKind.IMPORT))
    _forget_reviews(catalog)
    for request in (CheckRequest(run_id="run-1", operator="gemm"), CheckRequest()):
        job = catalog.create_check(request)
        list(catalog.watch_job(job.job_id))
    _reopen(catalog)
    assert ["", "run-1", "run-1"] == _reviewed(catalog)


def test_a_run_recorded_again_after_it_was_pruned_is_reviewed_again(
    catalog: CatalogService,
) -> None:
    """The review of the first one has its name, too."""
    _record(catalog, run("run-1", RunKind.IMPORT))
    with catalog._store.transaction() as cursor:
        cursor.execute("DELETE FROM measurement; DELETE FROM batch; DELETE FROM run")
    _record(catalog, run("run-1", RunKind.IMPORT))
    with catalog._store.transaction() as cursor:
        cursor.execute("DELETE FROM review WHERE review_number > 2; DELETE FROM doubt")
    assert ["run-1"] == _reviewed(catalog)
    _reopen(catalog)
    assert ["run-1", "run-1"] == _reviewed(catalog)


def test_a_review_that_fails_keeps_nobody_from_opening(
    catalog: CatalogService, caplog: pytest.LogCaptureFixture
) -> None:
    """The rows are there, of an operator that this program does not know perhaps."""
    list(catalog.record(run("run-1", RunKind.IMPORT), batches(gemms([1, 2]))))
    _forget_reviews(catalog)
    with catalog._store.transaction() as cursor:
        cursor.execute("UPDATE measurement SET operator = 'of_a_plugin'")
    _reopen(catalog)
    assert ["run-1"] == [summary.run.run_id for summary in catalog.list_runs()]
    assert "the review failed" in caplog.text


def test_an_opening_that_fails_gives_the_file_back(tmp_path: Path) -> None:
    """The folder of jobs cannot be made; the next try must not find the file taken."""
    path = str(tmp_path / "catalog.duckdb")
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    service = CatalogService(CatalogConfig(path=path, state_folder=str(blocked)))
    with pytest.raises(InvalidRequestError, match="blocked"):
        service.open()
    whole = CatalogService(CatalogConfig(path=path))
    whole.open()
    whole.close()
