"""Jobs that processes share by way of the catalog: each is done once, by whoever is there."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from paused_work import pause

from foretoken import __version__
from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.job_records.keeping import KeepsJobRecords
from foretoken.domain.errors import (
    CancelledJobError,
    InterruptedJobError,
    InvalidRequestError,
    ServiceUnavailableError,
    UnknownJobError,
)
from foretoken.domain.job import Job, JobState
from foretoken.domain.job_record import JobRecord, JobUpdate
from foretoken.jobs.runner import JobProgress, JobRunner, Work
from foretoken.jobs.sharing import SharedJobs

_TIMEOUT_S = 60.0
_PERIOD_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    value: int
    by: str


class _Count:
    """Work that publishes numbers and keeps them, and stops before one until it may go on.

    There it ends if the job is cancelled.
    """

    def __init__(self, name: str, stop_before: int | None = None) -> None:
        self.name = name
        self.has_stopped = threading.Event()
        self.may_go_on = threading.Event()
        self.found: list[str] = []
        self._stop_before = stop_before

    def __call__(self, request: dict[str, int]) -> Work:
        def work(progress: JobProgress) -> _Answer:
            kept = progress.kept_path("found")
            self.found = kept.read_text("utf-8").split() if kept.exists() else []
            for number in range(request["size"]):
                if number == self._stop_before:
                    self.has_stopped.set()
                    pause(progress, self.may_go_on)
                progress.publish("numbers", str(number), {"number": number})
                if str(number) not in self.found:
                    with kept.open("a", encoding="utf-8") as file:
                        file.write(f"{number}\n")
                progress.update((number + 1) / request["size"], f"{number}")
            with progress.attach("table.bin") as path:
                path.write_bytes(b"\0" * 3_000_000)
            return _Answer(value=request["size"], by=self.name)

        return work


class _Line:
    """The catalog as a process reaches it, or does not."""

    def __init__(self, catalog: KeepsJobRecords) -> None:
        self._catalog = catalog
        self.is_cut = False

    def __getattr__(self, name: str) -> Any:
        if self.is_cut:
            raise ServiceUnavailableError("cut off")
        return getattr(self._catalog, name)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[KeepsJobRecords]:
    config = CatalogConfig(path=str(tmp_path / "catalog.duckdb"))
    keeper = KeepsJobRecords(config, lambda: datetime.now(UTC))
    yield keeper
    keeper.close_records()


OpenRunner = Callable[..., JobRunner]


@pytest.fixture
def open_runner(tmp_path: Path, catalog: KeepsJobRecords) -> Iterator[OpenRunner]:
    opened: list[JobRunner] = []

    def open_it(
        handler: Callable[[Any], Work], line: Any = None, lease_s: float = 30.0, **options: Any
    ) -> JobRunner:
        sharing = SharedJobs(line or catalog, "test", lease_s=lease_s, period_s=_PERIOD_S)
        runner = JobRunner(tmp_path / "jobs", sharing=sharing, **options)
        runner.open({"count": handler})
        opened.append(runner)
        return runner

    yield open_it
    for runner in opened:
        runner.close()


def _create(runner: JobRunner, work: _Count, size: int = 4) -> Job:
    return runner.create("count", work({"size": size}), _Question(size=size))


def _numbers(runner: JobRunner, job_id: str, first: int = 0) -> list[int]:
    return [item["number"] for item in runner.follow(job_id, "numbers", first)]


def _end(runner: JobRunner, job_id: str) -> Job:
    return list(runner.watch(job_id))[-1]


def test_a_job_is_known_watched_and_read_in_every_process(open_runner: OpenRunner) -> None:
    work = _Count("one", 2)
    one, two = open_runner(work), open_runner(_Count("two"), num_workers=0)
    job = _create(one, work)
    assert work.has_stopped.wait(_TIMEOUT_S)
    assert job.job_id == two.get(job.job_id).job_id
    follower = two.follow(job.job_id, "numbers", 1)
    assert 1 == next(follower)["number"]
    work.may_go_on.set()
    assert [2, 3] == [item["number"] for item in follower]
    assert JobState.SUCCEEDED is _end(two, job.job_id).state
    for runner in (one, two):
        assert _Answer(value=4, by="one") == runner.result(job.job_id, _Answer)
        assert 3_000_000 == runner.attachment(job.job_id, "table.bin").stat().st_size
        assert [job.job_id] == [known.job_id for known in runner.list()]
    with pytest.raises(UnknownJobError):
        two.get("count-nowhere")


def test_a_process_that_ends_leaves_its_job_to_another(open_runner: OpenRunner) -> None:
    """At once, with what it kept; whoever watched is sent elsewhere."""
    work, heir = _Count("one", 2), _Count("two")
    one = open_runner(work)
    job = _create(one, work)
    assert work.has_stopped.wait(_TIMEOUT_S)
    two = open_runner(heir)
    one.close()
    assert JobState.SUCCEEDED is _end(two, job.job_id).state
    assert ["0", "1"] == heir.found
    assert [0, 1, 2, 3] == _numbers(two, job.job_id)
    assert _Answer(value=4, by="two") == two.result(job.job_id, _Answer)
    with pytest.raises(ServiceUnavailableError, match="goes on"):
        list(one.watch(job.job_id))


def test_a_process_that_is_not_heard_of_loses_its_job(
    open_runner: OpenRunner, catalog: KeepsJobRecords
) -> None:
    """It goes on with what the other kept, and only one result counts."""
    line, lost, heir = _Line(catalog), _Count("one", 3), _Count("two")
    ended: list[str] = []
    one = open_runner(lost, line, 0.3, on_success=lambda job: ended.append(f"one {job.job_id}"))
    job = _create(one, lost)
    assert lost.has_stopped.wait(_TIMEOUT_S)
    _wait(lambda: _sizes(catalog).get("found.kept") == len("0\n1\n2\n"))
    line.is_cut = True
    two = open_runner(heir, on_success=lambda job: ended.append(f"two {job.job_id}"))
    assert JobState.SUCCEEDED is _end(two, job.job_id).state
    line.is_cut = False
    lost.may_go_on.set()
    assert JobState.SUCCEEDED is _end(one, job.job_id).state
    one.close()
    assert ["0", "1", "2"] == heir.found
    assert [f"two {job.job_id}"] == ended
    assert _Answer(value=4, by="two") == two.result(job.job_id, _Answer)
    assert [0, 1, 2, 3] == _numbers(two, job.job_id)


def test_the_end_of_a_job_waits_for_the_catalog(
    open_runner: OpenRunner, catalog: KeepsJobRecords
) -> None:
    line, work = _Line(catalog), _Count("one", 3)
    runner = open_runner(work, line)
    job = _create(runner, work)
    assert work.has_stopped.wait(_TIMEOUT_S)
    line.is_cut = True
    with pytest.raises(ServiceUnavailableError):
        _create(runner, work)
    work.may_go_on.set()
    time.sleep(0.1)
    assert not runner.get(job.job_id).state.is_final
    line.is_cut = False
    assert JobState.SUCCEEDED is _end(runner, job.job_id).state
    # Nothing of what only the work needed is left.
    assert {"numbers.jsonl", "result.json", "table.bin"} == set(_sizes(catalog))


def test_jobs_go_to_whoever_has_a_thread_free(open_runner: OpenRunner) -> None:
    busy = _Count("one", 0)
    one = open_runner(busy, num_workers=1)
    first = _create(one, busy)
    assert busy.has_stopped.wait(_TIMEOUT_S)
    two = open_runner(_Count("two"), num_workers=1)
    second = one.create("count", _Count("never")({"size": 1}), _Question(size=1))
    assert JobState.SUCCEEDED is _end(one, second.job_id).state
    assert _Answer(value=1, by="two") == one.result(second.job_id, _Answer)
    busy.may_go_on.set()
    assert JobState.SUCCEEDED is _end(two, first.job_id).state


@pytest.mark.parametrize("is_running", [True, False])
def test_a_job_is_cancelled_from_any_process(open_runner: OpenRunner, is_running: bool) -> None:
    work = _Count("one", 0)
    one, two = open_runner(work, num_workers=1), open_runner(_Count("two"), num_workers=0)
    job = _create(one, work)
    assert work.has_stopped.wait(_TIMEOUT_S)
    wanted = job if is_running else _create(one, work)
    two.cancel(wanted.job_id)
    if is_running:
        _wait(one._cancelled[job.job_id].is_set)
    else:
        assert JobState.CANCELLED is two.get(wanted.job_id).state
    work.may_go_on.set()
    for runner in (one, two):
        assert JobState.CANCELLED is _end(runner, wanted.job_id).state
        with pytest.raises(CancelledJobError):
            runner.result(wanted.job_id, _Answer)


def test_what_a_cancelled_job_found_serves_an_equal_one_in_another_process(
    open_runner: OpenRunner,
) -> None:
    """Also where the process that ran it is gone; a job that ended well keeps nothing."""
    work, again = _Count("one", 2), _Count("two")
    one = open_runner(work)
    job = _create(one, work)
    assert work.has_stopped.wait(_TIMEOUT_S)
    one.cancel(job.job_id)
    work.may_go_on.set()
    assert JobState.CANCELLED is _end(one, job.job_id).state
    one.close()
    two = open_runner(again)
    assert _Question(size=4) == two.request(job.job_id, _Question)
    next_job = _create(two, again)
    assert JobState.SUCCEEDED is _end(two, next_job.job_id).state
    assert ["0", "1"] == again.found
    three = open_runner(_Count("three"))
    assert three.get(next_job.job_id).state is JobState.SUCCEEDED
    assert three.request(next_job.job_id, _Question) is None


def test_a_job_that_ends_each_process_is_given_up(
    open_runner: OpenRunner, catalog: KeepsJobRecords
) -> None:
    job = Job(job_id="count-1", kind="count", state=JobState.QUEUED, created_at="2026-01-01")
    record = JobRecord(service="test", job=job, request_json='{"size": 1}')
    catalog.create_job_record(record)
    for number in range(5):
        leased = catalog.lease_job("count-1", f"dead-{number}", 0.001)
        _run_for_ever(catalog, leased)
    runner = open_runner(_Count("one"))
    assert JobState.FAILED is _end(runner, "count-1").state
    with pytest.raises(InterruptedJobError, match="stopped 5 times"):
        runner.result("count-1", _Answer)


def test_a_request_of_another_version_is_left_to_that(
    open_runner: OpenRunner, catalog: KeepsJobRecords
) -> None:
    """While a version is rolled out; one of this very version cannot be done by anybody."""
    for name, version in (("count-new", "99.0"), ("count-bad", "")):
        job = Job(job_id=name, kind="count", state=JobState.QUEUED, created_at="2026-01-01")
        catalog.create_job_record(
            JobRecord(service="test", job=job, request_json="{}", version=version or __version__)
        )

    def refuse(_: object) -> Work:
        raise InvalidRequestError.of_field("size", "is missing")

    runner = open_runner(refuse)
    assert "INVALID_REQUEST" == _end(runner, "count-bad").error_reason
    assert JobState.QUEUED is runner.get("count-new").state
    other = open_runner(lambda _: _Count("two")({"size": 1}))
    assert JobState.SUCCEEDED is _end(other, "count-new").state


def _run_for_ever(catalog: KeepsJobRecords, leased: JobRecord) -> None:
    job = replace(leased.job, state=JobState.RUNNING)
    catalog.update_job(
        JobUpdate(job=job, worker=leased.worker, num_leases=leased.num_leases, lease_s=0.001)
    )
    time.sleep(0.002)


def _sizes(catalog: KeepsJobRecords) -> dict[str, int]:
    return {f.name: f.num_bytes for f in catalog.list_job_records("test")[0].files}


def _wait(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + _TIMEOUT_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(_PERIOD_S)
