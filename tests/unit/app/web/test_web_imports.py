"""Imports of the pages: one that is cancelled stops between batches, and goes on when resumed."""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from foretoken.app.web.imports import Imports, RunningImport
from foretoken.catalog.importing import ImportNotes, ImportPlan
from foretoken.catalog.installing import Heard
from foretoken.domain.errors import InvalidRequestError, UnknownJobError
from foretoken.domain.measurements.measurement import BatchReceipt, Run, RunKind, RunSummary
from foretoken.domain.ports import CatalogAdminPort

_RUN = Run(run_id="run-1", kind=RunKind.IMPORT, tool="test")
_NUM_BATCHES = 3


class _Catalog:
    """Stores batches of a row each; one that it has is acknowledged as a duplicate."""

    def __init__(self) -> None:
        self.stored: list[int] = []

    def record(self, run: Run, batches: Iterable[int]) -> Iterator[BatchReceipt]:
        for index in batches:
            was_there = index in self.stored
            if not was_there:
                self.stored.append(index)
            yield BatchReceipt(
                run_id=run.run_id, batch_index=index, num_rows=1, was_duplicate=was_there
            )

    def list_runs(self) -> tuple[RunSummary, ...]:
        return (RunSummary(run=_RUN, started_at="", num_rows=len(self.stored)),)

    def list_jobs(self) -> tuple[Any, ...]:
        return ()


class _Source:
    """A plan whose second batch is read when it is let go."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.is_at_second = threading.Event()

    @contextmanager
    def open(self, _hear: Heard) -> Iterator[ImportPlan]:
        def batches() -> Iterator[Any]:
            for index in range(_NUM_BATCHES):
                if index == 1:
                    self.is_at_second.set()
                    assert self.may_go_on.wait(60)
                yield index

        yield ImportPlan(run=_RUN, batches=batches(), num_rows=_NUM_BATCHES, remarks=ImportNotes())


def _wait(imports: Imports, job_id: str) -> RunningImport:
    deadline = time.monotonic() + 60
    while not (found := imports.get(job_id)).is_final and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def test_a_cancelled_import_stops_and_a_resumed_one_stores_the_rest() -> None:
    imports, catalog, source = Imports(), _Catalog(), _Source()
    port = cast("CatalogAdminPort", catalog)
    begun = imports.start("some rows", port, source.open)
    assert source.is_at_second.wait(60)
    imports.cancel(begun.job_id)
    assert "stops when" in imports.get(begun.job_id).message
    with pytest.raises(InvalidRequestError, match="is running"):
        imports.resume(begun.job_id, port)
    source.may_go_on.set()
    stopped = _wait(imports, begun.job_id)
    assert ("cancelled", True, [0, 1]) == (stopped.state, stopped.can_resume, catalog.stored)
    imports.cancel(begun.job_id)

    resumed = imports.resume(begun.job_id, port)
    done = _wait(imports, resumed.job_id)
    assert ("succeeded", [0, 1, 2]) == (done.state, catalog.stored)
    assert "some rows" == done.title
    with pytest.raises(InvalidRequestError, match="is succeeded"):
        imports.resume(resumed.job_id, port)
    with pytest.raises(UnknownJobError):
        imports.cancel("import-none")


def test_an_import_that_is_cancelled_while_it_downloads_stops_at_once() -> None:
    imports, is_downloading = Imports(), threading.Event()

    @contextmanager
    def download(hear: Heard) -> Iterator[ImportPlan]:
        while True:
            hear(0.5, "downloading: 1 of 2 MB")
            is_downloading.set()
            time.sleep(0.01)
        yield

    begun = imports.start("a wheel", cast("CatalogAdminPort", _Catalog()), download)
    assert is_downloading.wait(60)
    assert (0.5, "downloading: 1 of 2 MB") == (
        imports.get(begun.job_id).progress_ratio,
        imports.get(begun.job_id).message,
    )
    imports.cancel(begun.job_id)
    stopped = _wait(imports, begun.job_id)
    assert ("cancelled", True) == (stopped.state, stopped.can_resume)
    assert stopped.message == "cancelled; it was at: downloading: 1 of 2 MB"
