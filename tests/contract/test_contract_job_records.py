"""Jobs that the processes of a service share: leased, continued, read, embedded and remote."""

import itertools
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from contract_reach import Reach

from foretoken.catalog import servicer
from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.client.services import CatalogClient
from foretoken.domain.errors import InvalidRequestError, JobLeaseError, UnknownJobError
from foretoken.domain.job import Job, JobState
from foretoken.domain.job_record import MAX_PIECE_BYTES, JobFile, JobPiece, JobRecord, JobUpdate
from foretoken.domain.ports import JobRecordsPort

MAX_KEPT_JOBS = 2
_LEASE_S = 30.0


class Clock:
    """The time, which tests move on."""

    def __init__(self) -> None:
        self._ahead = timedelta()

    def __call__(self) -> datetime:
        return datetime.now(UTC) + self._ahead

    def move(self, seconds: float) -> None:
        self._ahead += timedelta(seconds=seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service(catalog_path: str, clock: Clock) -> Iterator[CatalogService]:
    config = CatalogConfig(path=catalog_path, num_threads=1, max_kept_jobs=MAX_KEPT_JOBS)
    service = CatalogService(config, clock)
    service.open()
    yield service
    service.close()


@pytest.fixture
def port(service: CatalogService, reach: Reach) -> JobRecordsPort:
    port: JobRecordsPort = reach(service, servicer.register, CatalogClient.connect)
    return port


_numbers = itertools.count()


def _create(port: JobRecordsPort, service: str = "simulator") -> JobRecord:
    job = Job(
        job_id=f"search-{next(_numbers)}-{uuid.uuid4().hex[:6]}",
        kind="search",
        state=JobState.QUEUED,
        created_at="2026-01-01T00:00:00.000+00:00",
    )
    return port.create_job_record(
        JobRecord(service=service, job=job, request_json='{"size": 1}', version="1.0")
    )


def _update(
    port: JobRecordsPort, leased: JobRecord, state: JobState = JobState.RUNNING, **changes: object
) -> JobRecord:
    values = {"lease_s": _LEASE_S, **changes}
    job = replace(leased.job, state=state, progress_ratio=0.5)
    return port.update_job(
        JobUpdate(job=job, worker=leased.worker, num_leases=leased.num_leases, **values)  # type: ignore[arg-type]
    )


def _read(port: JobRecordsPort, record: JobRecord, name: str, first_byte: int = 0) -> bytes:
    return b"".join(port.read_job_file(record.job.job_id, name, first_byte))


def test_a_job_is_leased_with_its_request_and_ends_once(port: JobRecordsPort) -> None:
    created = _create(port)
    assert created == port.create_job_record(created)
    leased = port.lease_job(created.job.job_id, "one", _LEASE_S)
    assert ('{"size": 1}', "one", True, 1) == (
        leased.request_json, leased.worker, leased.is_leased, leased.num_leases
    )  # fmt: skip
    piece = JobPiece(name="result.json", first_byte=0, content=b"{}")
    ended = _update(port, leased, JobState.SUCCEEDED, pieces=(piece,))
    assert (JobState.SUCCEEDED, False) == (ended.job.state, ended.is_leased)
    assert (JobFile(name="result.json", num_bytes=2),) == ended.files
    # The answer was lost, and the same comes again; anything else comes too late.
    assert ended == _update(port, leased, JobState.SUCCEEDED, pieces=(piece,))
    with pytest.raises(JobLeaseError, match="succeeded already"):
        _update(port, leased, JobState.FAILED)
    with pytest.raises(JobLeaseError, match="succeeded already"):
        port.lease_job(created.job.job_id, "two", _LEASE_S)
    assert b"{}" == _read(port, ended, "result.json")
    assert replace(ended, request_json='{"size": 1}') == port.get_job_record(created.job.job_id)
    with pytest.raises(UnknownJobError):
        port.get_job_record("search-none")


def test_a_job_goes_to_another_worker_when_its_lease_is_over(
    port: JobRecordsPort, clock: Clock
) -> None:
    """And the first one, which only slept, is not listened to any more."""
    first = port.lease_job(_create(port).job.job_id, "one", _LEASE_S)
    _update(port, first)
    with pytest.raises(JobLeaseError, match="with worker one"):
        port.lease_job(first.job.job_id, "two", _LEASE_S)
    clock.move(_LEASE_S + 1)
    (listed,) = port.list_job_records("simulator")
    assert (False, "") == (listed.is_leased, listed.request_json)
    # Nobody took it: the lease is as good as before.
    _update(port, first)
    clock.move(_LEASE_S + 1)
    second = port.lease_job(first.job.job_id, "two", _LEASE_S)
    assert (2, 1) == (second.num_leases, second.num_interruptions)
    with pytest.raises(JobLeaseError, match="with worker two"):
        _update(port, first, JobState.SUCCEEDED)
    assert JobState.SUCCEEDED is _update(port, second, JobState.SUCCEEDED).job.state


def test_a_job_that_is_let_go_is_no_interrupted_one(port: JobRecordsPort) -> None:
    first = port.lease_job(_create(port).job.job_id, "one", _LEASE_S)
    left = _update(port, first, JobState.QUEUED, lease_s=0.0)
    assert ("", False) == (left.worker, left.is_leased)
    second = port.lease_job(first.job.job_id, "two", _LEASE_S)
    assert (2, 0) == (second.num_leases, second.num_interruptions)
    # Again, for the answer may have been lost.
    again = port.lease_job(first.job.job_id, "two", _LEASE_S)
    assert 2 == again.num_leases


def test_a_job_that_is_not_wanted_ends_or_its_worker_hears_of_it(port: JobRecordsPort) -> None:
    waiting, running = _create(port), _create(port)
    stopped = port.stop_job(waiting.job.job_id)
    assert (JobState.CANCELLED, True) == (stopped.job.state, bool(stopped.job.finished_at))
    leased = port.lease_job(running.job.job_id, "one", _LEASE_S)
    assert not port.stop_job(running.job.job_id).job.state.is_final
    assert _update(port, leased).is_unwanted
    ended = _update(port, leased, JobState.CANCELLED)
    assert ended == port.stop_job(running.job.job_id)


def test_what_changed_is_listed_and_what_has_not_ended(port: JobRecordsPort) -> None:
    first, second, _ = _create(port), _create(port), _create(port, "predictor")
    listed = port.list_job_records("simulator")
    assert [first.job, second.job] == [record.job for record in listed]
    leased = port.lease_job(first.job.job_id, "one", _LEASE_S)
    ended = _update(port, leased, JobState.SUCCEEDED)
    assert [second.job, ended.job] == [record.job for record in port.list_job_records("simulator")]
    last = ended.change_number
    assert [second.job] == [record.job for record in port.list_job_records("simulator", last)]
    # A lease that is renewed is no news.
    leased = port.lease_job(second.job.job_id, "one", _LEASE_S)
    once = _update(port, leased)
    assert once.change_number == _update(port, leased).change_number


def test_files_grow_and_are_written_anew_from_any_byte(port: JobRecordsPort) -> None:
    leased = port.lease_job(_create(port).job.job_id, "one", _LEASE_S)
    large = bytes(range(256)) * (MAX_PIECE_BYTES // 256)

    def write(name: str, first_byte: int, content: bytes) -> JobRecord:
        piece = JobPiece(name=name, first_byte=first_byte, content=content)
        return _update(port, leased, pieces=(piece,))

    write("a.jsonl", 0, b"")
    write("a.jsonl", 0, b"one\ntw")
    write("a.jsonl", 4, b"two\n")
    write("b.kept", 0, large)
    record = write("b.kept", len(large), large)
    assert b"one\ntwo\n" == _read(port, record, "a.jsonl")
    assert b"two\n" == _read(port, record, "a.jsonl", 4)
    assert large + large == _read(port, record, "b.kept")
    assert {"a.jsonl": 8, "b.kept": 2 * len(large)} == {
        file.name: file.num_bytes for file in record.files
    }
    record = write("b.kept", 20_000, b"end")
    assert large[:20_000] + b"end" == _read(port, record, "b.kept")
    with pytest.raises(InvalidRequestError, match=r"b\.kept has 20003 bytes"):
        write("b.kept", 20_004, b"gap")
    assert 2 == len(_update(port, leased).files)
    assert ("a.jsonl",) == tuple(f.name for f in _update(port, leased, dropped=("b.kept",)).files)
    assert b"" == _read(port, record, "b.kept")


def test_the_oldest_that_have_ended_make_room(port: JobRecordsPort) -> None:
    unfinished = _create(port)
    ended = []
    for _ in range(MAX_KEPT_JOBS + 1):
        leased = port.lease_job(_create(port).job.job_id, "one", _LEASE_S)
        ended.append(_update(port, leased, JobState.SUCCEEDED).job.job_id)
    newest = _create(port).job.job_id
    kept = {record.job.job_id for record in port.list_job_records("simulator")}
    assert {unfinished.job.job_id, *ended[1:], newest} == kept
    with pytest.raises(UnknownJobError):
        port.lease_job(ended[0], "one", _LEASE_S)


def test_what_cannot_be_is_refused(port: JobRecordsPort) -> None:
    record = _create(port)
    with pytest.raises(InvalidRequestError, match="lease_s"):
        port.lease_job(record.job.job_id, "one", 0.0)
    with pytest.raises(InvalidRequestError, match="has not ended"):
        port.create_job_record(
            replace(record, job=replace(record.job, job_id="x", state=JobState.FAILED))
        )
    with pytest.raises(UnknownJobError):
        port.stop_job("search-nowhere")
    with pytest.raises(UnknownJobError):
        list(port.read_job_file("search-nowhere", "a.jsonl"))


def test_records_outlive_the_catalog_s_process(catalog_path: str) -> None:
    config = CatalogConfig(path=catalog_path, num_threads=1)
    first = CatalogService(config)
    first.open()
    leased = first.lease_job(_create(first).job.job_id, "one", _LEASE_S)
    _update(first, leased, pieces=(JobPiece(name="a.jsonl", first_byte=0, content=b"1\n"),))
    first.close()
    second = CatalogService(config)
    second.open()
    (record,) = second.list_job_records("simulator")
    assert ("one", True, b"1\n") == (
        record.worker, record.is_leased, _read(second, record, "a.jsonl")
    )  # fmt: skip
    second.close()
