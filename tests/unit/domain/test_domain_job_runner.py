"""Jobs: states, progress, cancellation, results that outlive the process."""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from paused_work import pause

from foretoken.domain.errors import (
    CancelledJobError,
    ForetokenError,
    InvalidRequestError,
    JobNotFinishedError,
    NotTrainedError,
    QueueFullError,
    ServiceUnavailableError,
    UnknownJobError,
)
from foretoken.domain.job import Job, JobState, error_of_job
from foretoken.jobs.runner import JobLimits, JobProgress, JobRunner
from foretoken.wire import trace

_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    value: int
    notes: tuple[str, ...] = ()


class _Gate:
    """Work that says when it runs and goes on when released; cancelled, it ends."""

    def __init__(self) -> None:
        self.has_started = threading.Event()
        self.may_go_on = threading.Event()

    def __call__(self, progress: JobProgress) -> _Answer:
        self.has_started.set()
        pause(progress, self.may_go_on)
        progress.update(0.5, "half way")
        return _Answer(value=1)


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[JobRunner]:
    runner = JobRunner(tmp_path, limits=JobLimits(max_queued=2))
    runner.open()
    yield runner
    runner.close()


def _wait(runner: JobRunner, job: Job) -> Job:
    return list(runner.watch(job.job_id))[-1]


def test_a_job_succeeds_and_keeps_its_result(runner: JobRunner) -> None:
    job = runner.create("train", lambda _: _Answer(value=42, notes=("a", "b")))
    done = _wait(runner, job)
    assert (JobState.SUCCEEDED, 1.0) == (done.state, done.progress_ratio)
    assert done.created_at <= done.finished_at
    assert job.job_id.startswith("train-")
    assert _Answer(value=42, notes=("a", "b")) == runner.result(job.job_id, _Answer)


def test_a_watcher_sees_progress_and_then_the_end(runner: JobRunner) -> None:
    gate = _Gate()
    job = runner.create("train", gate)
    changes = runner.watch(job.job_id)
    seen = [next(changes)]
    gate.may_go_on.set()
    seen += changes
    assert seen[0].state in (JobState.QUEUED, JobState.RUNNING)
    assert JobState.SUCCEEDED is seen[-1].state
    ratios = [state.progress_ratio for state in seen]
    assert sorted(ratios) == ratios
    assert "half way" == seen[-1].message


def test_progress_stays_between_zero_and_one(runner: JobRunner) -> None:
    def work(progress: JobProgress) -> _Answer:
        progress.update(7.0)
        progress.update(-1.0)
        raise NotTrainedError("stop here")

    job = _wait(runner, runner.create("train", work))
    assert 0.0 == job.progress_ratio


def test_a_failed_job_raises_the_error_it_ended_with(runner: JobRunner) -> None:
    def work(_: JobProgress) -> _Answer:
        raise NotTrainedError("train first")

    job = _wait(runner, runner.create("train", work))
    assert (JobState.FAILED, "NOT_TRAINED") == (job.state, job.error_reason)
    with pytest.raises(NotTrainedError, match="train first"):
        runner.result(job.job_id, _Answer)


def test_an_unexpected_exception_fails_the_job_with_its_name(runner: JobRunner) -> None:
    job = _wait(runner, runner.create("train", lambda _: 1 // 0))
    assert (JobState.FAILED, "INTERNAL") == (job.state, job.error_reason)
    assert job.error_message.startswith("ZeroDivisionError")
    with pytest.raises(ForetokenError, match="ZeroDivisionError"):
        runner.result(job.job_id, _Answer)


def test_a_job_for_which_there_is_no_memory_says_that_it_wants_too_much(runner: JobRunner) -> None:
    def work(_: JobProgress) -> _Answer:
        raise MemoryError("308 GiB")

    job = _wait(runner, runner.create("train", work))
    assert (JobState.FAILED, "INVALID_REQUEST") == (job.state, job.error_reason)
    assert "more memory than there is" in job.error_message


def test_the_error_of_an_unexpected_exception_is_no_other_kind(runner: JobRunner) -> None:
    """Least of all one of an unknown name, which a caller would take for its own mistake."""
    job = _wait(runner, runner.create("train", lambda _: 1 // 0))
    assert ForetokenError is type(error_of_job(job))


def test_a_running_job_stops_at_its_next_progress_when_cancelled(runner: JobRunner) -> None:
    gate = _Gate()
    job = runner.create("train", gate)
    assert gate.has_started.wait(_TIMEOUT_S)
    runner.cancel(job.job_id)
    gate.may_go_on.set()
    assert JobState.CANCELLED is _wait(runner, job).state
    with pytest.raises(CancelledJobError):
        runner.result(job.job_id, _Answer)


def test_a_waiting_job_is_cancelled_at_once_and_never_runs(runner: JobRunner) -> None:
    gate, ran = _Gate(), threading.Event()
    first = runner.create("train", gate)
    assert gate.has_started.wait(_TIMEOUT_S)
    second = runner.create("train", lambda _: ran.set())
    assert JobState.CANCELLED is runner.cancel(second.job_id).state
    gate.may_go_on.set()
    assert JobState.SUCCEEDED is _wait(runner, first).state
    assert JobState.CANCELLED is runner.get(second.job_id).state
    assert not ran.is_set()


def test_cancelling_a_finished_job_changes_nothing(runner: JobRunner) -> None:
    done = _wait(runner, runner.create("train", lambda _: _Answer(value=1)))
    assert done == runner.cancel(done.job_id)


def test_a_full_queue_refuses_work(runner: JobRunner) -> None:
    gate = _Gate()
    runner.create("train", gate)
    assert gate.has_started.wait(_TIMEOUT_S)
    waiting = [runner.create("train", lambda _: _Answer(value=1)) for _ in range(2)]
    with pytest.raises(QueueFullError):
        runner.create("train", lambda _: _Answer(value=1))
    gate.may_go_on.set()
    assert [JobState.SUCCEEDED] * 2 == [_wait(runner, job).state for job in waiting]


def test_a_result_that_is_not_there_yet_is_an_error(runner: JobRunner) -> None:
    gate = _Gate()
    job = runner.create("train", gate)
    assert gate.has_started.wait(_TIMEOUT_S)
    with pytest.raises(JobNotFinishedError, match="running"):
        runner.result(job.job_id, _Answer)
    gate.may_go_on.set()


def test_a_file_that_a_job_attached_is_kept_beside_its_result(runner: JobRunner) -> None:
    def work(progress: JobProgress) -> _Answer:
        with progress.attach("notes.txt") as path:
            path.write_text("all of it", encoding="utf-8")
        return _Answer(value=1)

    job = runner.create("test", work)
    list(runner.watch(job.job_id))
    assert "all of it" == runner.attachment(job.job_id, "notes.txt").read_text(encoding="utf-8")
    with pytest.raises(InvalidRequestError, match="kept no"):
        runner.attachment(job.job_id, "other.txt")


def test_a_file_that_was_not_written_to_its_end_is_not_left_behind(
    runner: JobRunner, tmp_path: Path
) -> None:
    def work(progress: JobProgress) -> _Answer:
        with progress.attach("notes.txt") as path:
            path.write_text("half", encoding="utf-8")
            raise CancelledJobError("enough")

    job = runner.create("test", work)
    assert JobState.CANCELLED is list(runner.watch(job.job_id))[-1].state
    assert [f"{job.job_id}.job.json"] == [path.name for path in tmp_path.iterdir()]


def test_an_unknown_job_is_an_error(runner: JobRunner) -> None:
    with pytest.raises(UnknownJobError):
        runner.get("train-0")


def test_every_job_is_listed(runner: JobRunner) -> None:
    jobs = [_wait(runner, runner.create("train", lambda _: _Answer(value=1))) for _ in range(3)]
    assert {job.job_id for job in jobs} == {job.job_id for job in runner.list()}
    created = [job.created_at for job in runner.list()]
    assert sorted(created, reverse=True) == created


def test_a_result_outlives_its_process(tmp_path: Path) -> None:
    first = JobRunner(tmp_path)
    first.open()
    done = _wait(first, first.create("train", lambda _: _Answer(value=42)))
    first.close()
    second = JobRunner(tmp_path)
    second.open()
    assert (done,) == second.list()
    assert _Answer(value=42) == second.result(done.job_id, _Answer)
    second.close()


def test_a_job_whose_process_died_is_found_failed(tmp_path: Path) -> None:
    first, gate = JobRunner(tmp_path), _Gate()
    first.open()
    job = first.create("train", gate)
    assert gate.has_started.wait(_TIMEOUT_S)
    # Another process leaves alone what the first one runs,
    other = JobRunner(tmp_path)
    other.open()
    assert other.list() == ()
    # and fails what a dead one ran, whose locks are gone.
    (tmp_path / f"{job.job_id}.lock").unlink()
    second = JobRunner(tmp_path)
    second.open()
    found = second.get(job.job_id)
    assert (JobState.FAILED, "INTERRUPTED") == (found.state, found.error_reason)
    with pytest.raises(ForetokenError, match="create it again"):
        second.result(job.job_id, _Answer)
    second.close()
    other.close()
    gate.may_go_on.set()
    first.close()


def test_a_job_works_for_the_request_that_made_it(runner: JobRunner) -> None:
    """In its own thread, also in its calls of other services."""
    seen: list[trace.TraceContext | None] = []

    def work(_progress: JobProgress) -> _Answer:
        seen.append(trace.current())
        return _Answer(value=1)

    request = trace.TraceContext.new()
    with trace.entered(request):
        job = runner.create("train", work)
    assert JobState.SUCCEEDED is _wait(runner, job).state
    assert JobState.SUCCEEDED is _wait(runner, runner.create("train", work)).state
    assert [request, None] == seen


def test_closing_cancels_what_runs_and_what_waits(tmp_path: Path) -> None:
    """Or else whoever watches a job that never ran would wait for ever."""
    runner, gate = JobRunner(tmp_path), _Gate()
    runner.open()
    jobs = [runner.create("train", gate), runner.create("train", gate)]
    assert gate.has_started.wait(_TIMEOUT_S)
    runner.close()
    assert [JobState.CANCELLED] * 2 == [_wait(runner, job).state for job in jobs]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
    size: int = 2


class _Counting:
    """Work that publishes two numbers; cancelled it says so, and stops when it may."""

    def __init__(self) -> None:
        self.is_told_to_stop = threading.Event()
        self.may_stop = threading.Event()

    def __call__(self, progress: JobProgress) -> _Answer:
        for number in range(2):
            progress.publish("numbers", str(number), {"number": number})
        try:
            while True:
                progress.update(0.5, "counted")
                time.sleep(0.001)
        finally:
            self.is_told_to_stop.set()
            assert self.may_stop.wait(_TIMEOUT_S)


class _Follower:
    """Reads what a job publishes in a thread of its own, and keeps how that ended."""

    def __init__(self, runner: JobRunner, job: Job) -> None:
        self.watch = runner.follow(job.job_id, "numbers")
        self.seen: list[int] = []
        self.errors: list[ServiceUnavailableError] = []
        self.has_two = threading.Event()
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            for item in self.watch:
                self.seen.append(item["number"])
                if len(self.seen) == 2:
                    self.has_two.set()
        except ServiceUnavailableError as err:
            self.errors.append(err)


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_follower_is_told_that_the_service_ends_unless_it_closed_first(
    tmp_path: Path, is_closed: bool
) -> None:
    """It has all that was published by then, and does not wait for more that does not come."""
    work = _Counting()
    runner = JobRunner(tmp_path)
    runner.open({"count": lambda _request: work})
    follower = _Follower(runner, runner.create("count", work, _Question()))
    assert follower.has_two.wait(_TIMEOUT_S)
    if is_closed:
        follower.watch.close()
        follower.thread.join(_TIMEOUT_S)
    closing = threading.Thread(target=runner.close)
    closing.start()
    assert work.is_told_to_stop.wait(_TIMEOUT_S)
    work.may_stop.set()
    closing.join(_TIMEOUT_S)
    follower.thread.join(_TIMEOUT_S)
    assert not follower.thread.is_alive()
    assert [0, 1] == follower.seen
    assert ([] if is_closed else [True]) == ["goes on" in str(err) for err in follower.errors]


def test_only_ended_states_are_final() -> None:
    final = {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}
    assert final == {state for state in JobState if state.is_final}


def test_a_torn_file_of_a_job_keeps_nobody_from_the_others(
    runner: JobRunner, tmp_path: Path
) -> None:
    """As a crash of the machine may leave it."""
    job = _wait(runner, runner.create("train", lambda _: _Answer(value=1)))
    (tmp_path / "train-torn.job.json").write_text("")
    (tmp_path / "train-odd.job.json").write_text("[]")
    second = JobRunner(tmp_path)
    second.open()
    assert (job,) == second.list()
    second.close()


@pytest.mark.parametrize("job_id", ["../../other/x", "train-other", "*", ""])
def test_a_file_that_says_to_be_another_job_is_left_aside(
    runner: JobRunner, tmp_path: Path, job_id: str
) -> None:
    """Its id would become the path of files that are removed."""
    job = _wait(runner, runner.create("train", lambda _: _Answer(value=1)))
    state = {"job_id": job_id, "kind": "train", "state": "running"}
    (tmp_path / "train-false.job.json").write_text(json.dumps(state))
    second = JobRunner(tmp_path)
    second.open()
    assert (job,) == second.list()
    second.close()
    assert (tmp_path / "train-false.job.json").exists()


def test_a_job_id_is_looked_up_before_it_is_a_path(runner: JobRunner) -> None:
    for job_id in ("../../etc/passwd", "a" * 5000, "\0"):
        for ask in (runner.get, runner.cancel, lambda job_id: list(runner.follow(job_id, "x"))):
            with pytest.raises(UnknownJobError):
                ask(job_id)


def test_a_job_ends_for_who_watches_it_though_nothing_can_be_saved(
    runner: JobRunner, tmp_path: Path
) -> None:
    """The folder is gone, as good as on a full disk."""
    gate = _Gate()
    job = runner.create("train", gate)
    assert gate.has_started.wait(_TIMEOUT_S)
    shutil.rmtree(tmp_path)
    gate.may_go_on.set()
    done = _wait(runner, job)
    assert (JobState.FAILED, "STORAGE_FULL") == (done.state, done.error_reason)


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequestError, match="state_folder"):
        JobRunner(tmp_path / "file" / "jobs").open()
