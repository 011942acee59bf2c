"""Answers of calls that are no jobs: kept in the catalog without the caller waiting for it."""

import json
import logging
import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import pytest
from artifact_shelf import ArtifactShelf

from foretoken.client.results import list_results, read_result
from foretoken.domain.errors import ServiceUnavailableError
from foretoken.domain.measurements.measurement import Artifact
from foretoken.domain.ports import CatalogPort
from foretoken.domain.requests.training_run import TrainingRunReport
from foretoken.domain.results.report import Feasibility
from foretoken.domain.results.result import TRAINING_RUN_KIND
from foretoken.simulator.results import ResultKeeper

_REQUEST = {
    "scenario": {"name": "big", "model": {"name": "llama-2-7b"}, "device": "a100_sxm_80"},
}
_REPORT = TrainingRunReport(
    num_tokens=1e12,
    num_devices=16,
    days=46.5,
    usd=35_712.0,
    request_json=json.dumps(_REQUEST),
)
_PATIENCE_S = 30.0


class _SlowShelf(ArtifactShelf):
    """Stores nothing before it may, and then fails with an error where it has one."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.may_store = threading.Event()
        self.error = error

    def store_artifact(self, artifact: Artifact, content: Iterable[bytes]) -> Artifact:
        assert self.may_store.wait(_PATIENCE_S)
        if self.error is not None:
            raise self.error
        return super().store_artifact(artifact, content)


def _keeper(shelf: ArtifactShelf) -> ResultKeeper:
    return ResultKeeper(cast("CatalogPort", shelf), 100)


def test_an_answer_is_listed_and_read_whole() -> None:
    shelf = ArtifactShelf()
    keeper = _keeper(shelf)
    report = keeper.keep_answer(TRAINING_RUN_KIND, _REPORT)
    keeper.close()
    catalog = cast("CatalogPort", shelf)
    (known,) = list_results(catalog)
    assert (known.job_id, known.kind) == (report.job_id, TRAINING_RUN_KIND)
    assert known.title == "big: llama-2-7b on 16 a100_sxm_80"
    assert known.headline == "1e+12 tokens in 46.5 days, 35,712 USD"
    assert read_result(catalog, "latest") == (known, replace(_REPORT, job_id=report.job_id))


def test_an_answer_that_cannot_be_is_kept_too() -> None:
    shelf = ArtifactShelf()
    keeper = _keeper(shelf)
    refused = Feasibility(is_feasible=False, reason="no memory")
    keeper.keep_answer(TRAINING_RUN_KIND, replace(_REPORT, feasibility=refused))
    keeper.close()
    (known,) = list_results(cast("CatalogPort", shelf))
    assert known.headline == "cannot run"


def test_nobody_waits_for_a_slow_catalog() -> None:
    """The answers are there before the first is stored, and all are stored before the end."""
    shelf = _SlowShelf()
    keeper = _keeper(shelf)
    reports = [keeper.keep_answer(TRAINING_RUN_KIND, _REPORT) for _ in range(3)]
    assert list_results(cast("CatalogPort", shelf)) == ()
    shelf.may_store.set()
    keeper.close()
    kept = {known.job_id for known in list_results(cast("CatalogPort", shelf))}
    assert kept == {report.job_id for report in reports}
    assert len(kept) == 3


def test_not_many_answers_pile_up(caplog: pytest.LogCaptureFixture) -> None:
    """One that is not kept has no name, by which nobody could find it."""
    shelf = _SlowShelf()
    keeper = _keeper(shelf)
    reports = [keeper.keep_answer(TRAINING_RUN_KIND, _REPORT) for _ in range(100)]
    shelf.may_store.set()
    keeper.close()
    named = {report.job_id for report in reports if report.job_id}
    assert {known.job_id for known in list_results(cast("CatalogPort", shelf))} == named
    assert 0 < len(named) < len(reports)
    assert reports[-1] == _REPORT
    assert "too many wait" in caplog.text


@pytest.mark.parametrize("error", [ServiceUnavailableError("away"), OSError("broken")])
def test_a_catalog_that_fails_is_logged(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """The answer is the caller's all the same."""
    shelf = _SlowShelf(error)
    shelf.may_store.set()
    keeper = _keeper(shelf)
    with caplog.at_level(logging.WARNING):
        report = keeper.keep_answer(TRAINING_RUN_KIND, _REPORT)
        keeper.close()
    assert report.days == _REPORT.days
    assert f"job_id={report.job_id}" in caplog.text
