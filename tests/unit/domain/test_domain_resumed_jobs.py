"""Jobs that were created with their request: they outlive their process, and so do their lists."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from paused_work import pause

from foretoken.domain.errors import (
    CancelledJobError,
    InterruptedJobError,
    InvalidRequestError,
    ServiceUnavailableError,
)
from foretoken.domain.job import Job, JobState
from foretoken.jobs.runner import JobLimits, JobProgress, JobRunner, Resume, Work

_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    value: int


class _Count:
    """Work that publishes numbers up to the question's size; it stops before one of them.

    There it ends if the job is cancelled.
    """

    def __init__(self, stop_before: int | None = None) -> None:
        self.has_stopped = threading.Event()
        self.may_go_on = threading.Event()
        self.asked: list[int] = []
        self._stop_before = stop_before

    def __call__(self, request: dict[str, int]) -> Work:
        def work(progress: JobProgress) -> _Answer:
            self.asked.append(request["size"])
            for number in range(request["size"]):
                if number == self._stop_before:
                    self.has_stopped.set()
                    pause(progress, self.may_go_on)
                progress.publish("numbers", str(number), {"number": number})
                progress.update((number + 1) / request["size"], f"{number}")
            return _Answer(value=request["size"])

        return work


OpenRunner = Callable[..., JobRunner]


@pytest.fixture
def open_runner(tmp_path: Path) -> Iterator[OpenRunner]:
    opened: list[JobRunner] = []

    def open_it(handler: Resume, *, resumes: bool = True, **options: Any) -> JobRunner:
        runner = JobRunner(tmp_path, **options)
        runner.open({"count": handler}, resumes=resumes)
        opened.append(runner)
        return runner

    yield open_it
    for runner in opened:
        runner.close()


def _create(runner: JobRunner, work: _Count, size: int = 4) -> Job:
    return runner.create("count", work({"size": size}), _Question(size=size))


def _stop_in_the_middle(open_runner: OpenRunner, size: int = 4, stop_before: int = 2) -> str:
    """Leave a job as a service does that is stopped gracefully; return its name."""
    work = _Count(stop_before)
    runner = open_runner(work)
    job = _create(runner, work, size)
    assert work.has_stopped.wait(_TIMEOUT_S)
    runner.close()
    return job.job_id


def _numbers(runner: JobRunner, job_id: str, first: int = 0) -> list[int]:
    return [item["number"] for item in runner.follow(job_id, "numbers", first)]


def test_a_job_of_a_stopped_service_goes_on_under_its_name(open_runner: OpenRunner) -> None:
    job_id = _stop_in_the_middle(open_runner)
    work = _Count()
    runner = open_runner(work)
    states = list(runner.watch(job_id))
    assert JobState.SUCCEEDED is states[-1].state
    assert [4] == work.asked
    assert _Answer(value=4) == runner.result(job_id, _Answer)
    # It was seen half way before, and never goes back.
    assert min(state.progress_ratio for state in states) >= 0.5
    assert [0, 1, 2, 3] == _numbers(runner, job_id)


class _Away:
    """Work of which the first tries find another service away."""

    def __init__(self, num_tries: int, **details: str) -> None:
        self.num_tries = num_tries
        self.asked = 0
        self._details = details

    def __call__(self, request: dict[str, int]) -> Work:
        def work(_: JobProgress) -> _Answer:
            self.asked += 1
            if self.asked <= self.num_tries:
                raise ServiceUnavailableError("away", **self._details)
            return _Answer(value=request["size"])

        return work


def _create_away(runner: JobRunner, work: _Away, request: _Question | None) -> Job:
    return runner.create("count", work({"size": 4}), request)


_PATIENT = JobLimits(first_retry_s=0.001)


def test_a_job_waits_for_a_service_that_is_away(open_runner: OpenRunner) -> None:
    """As long as a restart takes; what is said meanwhile names the service."""
    work = _Away(3, peer="predictor at host:1")
    runner = open_runner(work, limits=_PATIENT)
    job = _create_away(runner, work, _Question(size=4))
    assert JobState.SUCCEEDED is list(runner.watch(job.job_id))[-1].state
    assert 4 == work.asked


@pytest.mark.parametrize(
    ("num_tries", "peer", "request_", "expected"),
    [
        (99, "predictor at host:1", _Question(size=4), 8),
        (1, "predictor at host:1", None, 1),
        (1, "", _Question(size=4), 1),
    ],
    ids=["for too long", "a job that cannot go on", "no other service's error"],
)
def test_a_job_does_not_wait(
    num_tries: int,
    peer: str,
    request_: _Question | None,
    expected: int,
    open_runner: OpenRunner,
) -> None:
    work = _Away(num_tries, **({"peer": peer} if peer else {}))
    runner = open_runner(work, limits=_PATIENT)
    ended = list(runner.watch(_create_away(runner, work, request_).job_id))[-1]
    assert (JobState.FAILED, "SERVICE_UNAVAILABLE") == (ended.state, ended.error_reason)
    assert expected == work.asked


def test_a_job_that_waits_can_be_cancelled(open_runner: OpenRunner) -> None:
    work = _Away(99, peer="predictor at host:1")
    runner = open_runner(work, limits=JobLimits(first_retry_s=3600.0))
    job = _create_away(runner, work, _Question(size=4))
    states = iter(runner.watch(job.job_id))
    while "waits for the predictor" not in next(states).message:
        pass
    runner.cancel(job.job_id)
    assert JobState.CANCELLED is list(states)[-1].state


def test_who_watched_is_told_that_the_service_ends(open_runner: OpenRunner) -> None:
    """And not left waiting, nor informed that the job was cancelled."""
    work = _Count(2)
    runner = open_runner(work)
    job = _create(runner, work)
    assert work.has_stopped.wait(_TIMEOUT_S)
    seen: list[Exception] = []

    def watch() -> None:
        try:
            list(runner.watch(job.job_id))
        except ServiceUnavailableError as err:
            seen.append(err)

    watcher = threading.Thread(target=watch)
    watcher.start()
    runner.close()
    watcher.join(_TIMEOUT_S)
    assert ["goes on" in str(err) for err in seen] == [True]


def test_a_list_can_be_followed_from_any_place_while_it_grows(open_runner: OpenRunner) -> None:
    work = _Count(2)
    runner = open_runner(work)
    job = _create(runner, work)
    follower = runner.follow(job.job_id, "numbers")
    seen = [next(follower)["number"], next(follower)["number"]]
    late = runner.follow(job.job_id, "numbers", 1)
    assert 1 == next(late)["number"]
    work.may_go_on.set()
    assert [0, 1, 2, 3] == seen + [item["number"] for item in follower]
    assert [2, 3] == [item["number"] for item in late]
    assert [3] == _numbers(runner, job.job_id, 3)
    assert [] == _numbers(runner, job.job_id, 4)


def test_a_follower_that_waits_is_closed_from_another_thread(open_runner: OpenRunner) -> None:
    """It finds the end, though the job goes on; the others wait on."""
    work = _Count(2)
    runner = open_runner(work)
    job = _create(runner, work)
    closed, other = runner.follow(job.job_id, "numbers"), runner.follow(job.job_id, "numbers")
    seen: list[int] = []
    waiting = threading.Thread(target=lambda: seen.extend(item["number"] for item in closed))
    waiting.start()
    assert work.has_stopped.wait(_TIMEOUT_S)
    closed.close()
    waiting.join(_TIMEOUT_S)
    assert not waiting.is_alive()
    # What was published at the time of closing may have been read or not.
    assert [0, 1][: len(seen)] == seen
    assert not runner.get(job.job_id).state.is_final
    work.may_go_on.set()
    assert [0, 1, 2, 3] == [item["number"] for item in other]
    assert [] == list(closed)


def test_a_job_of_an_earlier_service_keeps_its_list(open_runner: OpenRunner) -> None:
    work = _Count()
    first = open_runner(work)
    job = _create(first, work)
    list(first.watch(job.job_id))
    first.close()
    assert [0, 1, 2, 3] == _numbers(open_runner(_Count()), job.job_id)


def test_an_equal_request_takes_up_what_was_left(open_runner: OpenRunner) -> None:
    """A command that was interrupted is given again; nothing goes on before it is."""
    job_id = _stop_in_the_middle(open_runner)
    work = _Count()
    runner = open_runner(work, resumes=False)
    assert JobState.QUEUED is runner.get(job_id).state
    other = _create(runner, work, size=5)
    assert job_id != other.job_id
    assert job_id == _create(runner, work, size=4).job_id
    assert JobState.SUCCEEDED is list(runner.watch(job_id))[-1].state
    assert job_id != _create(runner, work, size=4).job_id


def test_watching_what_was_left_lets_it_go_on(open_runner: OpenRunner) -> None:
    job_id = _stop_in_the_middle(open_runner)
    runner = open_runner(_Count(), resumes=False)
    assert [2, 3] == _numbers(runner, job_id, 2)
    assert JobState.SUCCEEDED is runner.get(job_id).state


def test_what_was_left_can_be_cancelled(open_runner: OpenRunner) -> None:
    job_id = _stop_in_the_middle(open_runner)
    runner = open_runner(_Count(), resumes=False)
    assert JobState.CANCELLED is runner.cancel(job_id).state
    runner.close()
    assert JobState.CANCELLED is open_runner(_Count()).get(job_id).state


def test_a_cancelled_job_does_not_go_on(open_runner: OpenRunner, tmp_path: Path) -> None:
    """It leaves what it was asked, for who resumes it."""
    work = _Count(2)
    runner = open_runner(work)
    job = _create(runner, work)
    assert work.has_stopped.wait(_TIMEOUT_S)
    runner.cancel(job.job_id)
    work.may_go_on.set()
    assert JobState.CANCELLED is list(runner.watch(job.job_id))[-1].state
    runner.close()
    later = open_runner(_Count())
    with pytest.raises(CancelledJobError):
        later.result(job.job_id, _Answer)
    assert later.request(job.job_id, _Question) is not None
    assert {"job.json", "numbers.jsonl", "request.json", "lock"} == {
        path.name.partition(".")[2] for path in tmp_path.glob(f"{job.job_id}.*")
    }


def test_a_file_is_kept_until_the_job_ends(open_runner: OpenRunner) -> None:
    has_begun, gate, paths = threading.Event(), threading.Event(), []

    def work(progress: JobProgress) -> _Answer:
        path = progress.kept_path("notes")
        paths.append(path)
        path.write_text("half", "utf-8")
        has_begun.set()
        pause(progress, gate)
        return _Answer(value=1)

    runner = open_runner(lambda _: work)
    job = runner.create("count", work, _Question(size=1))
    assert has_begun.wait(_TIMEOUT_S)
    runner.close()
    gate.set()
    assert ["half"] == [path.read_text("utf-8") for path in paths]
    second = open_runner(lambda _: work)
    assert JobState.SUCCEEDED is list(second.watch(job.job_id))[-1].state
    assert [False, False] == [path.exists() for path in paths]


def test_a_job_that_runs_in_another_process_is_left_to_it(open_runner: OpenRunner) -> None:
    """Two commands share a folder; the lock is of the first, whose job is not seen as dead."""
    work = _Count(2)
    runner = open_runner(work)
    job = _create(runner, work)
    assert work.has_stopped.wait(_TIMEOUT_S)
    other = _Count()
    assert [] == [found.job_id for found in open_runner(other).list()]
    work.may_go_on.set()
    assert JobState.SUCCEEDED is list(runner.watch(job.job_id))[-1].state
    assert [] == other.asked


def test_a_request_that_is_not_understood_any_more_fails_its_job(open_runner: OpenRunner) -> None:
    job_id = _stop_in_the_middle(open_runner)

    def refuse(_: object) -> Work:
        raise InvalidRequestError.of_field("size", "is no key any more")

    runner = open_runner(refuse)
    with pytest.raises(InvalidRequestError, match="no key any more"):
        runner.result(job_id, _Answer)


def test_kinds_with_threads_of_their_own_do_not_wait(tmp_path: Path) -> None:
    runner = JobRunner(tmp_path, num_workers_by_kind={"count": 2})
    runner.open()
    works = [_Count(0), _Count(0)]
    for work in works:
        runner.create("count", work({"size": 1}))
    assert all(work.has_stopped.wait(_TIMEOUT_S) for work in works)
    other = runner.create("other", lambda _: _Answer(value=1))
    assert JobState.SUCCEEDED is list(runner.watch(other.job_id))[-1].state
    for work in works:
        work.may_go_on.set()
    runner.close()


_DYING = """
    import os, signal, sys
    from pathlib import Path
    from foretoken.jobs.runner import JobRunner
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Question:
        size: int

    def work(progress):
        for number in range(2):
            progress.publish("numbers", str(number), {"number": number})
        progress.update(0.5, "half way")
        os.kill(os.getpid(), signal.SIGKILL)

    runner = JobRunner(Path(sys.argv[1]))
    runner.open({"count": lambda _: work})
    if not runner.list():
        print(runner.create("count", work, Question(4)).job_id, flush=True)
    list(runner.watch(runner.list()[0].job_id))
"""


def _die(folder: Path) -> str:
    """Run a service that is killed in the middle of a job; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_DYING), str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert -signal.SIGKILL == done.returncode
    return done.stdout.strip()


def test_a_job_of_a_killed_service_goes_on(open_runner: OpenRunner, tmp_path: Path) -> None:
    job_id = _die(tmp_path)
    with (tmp_path / f"{job_id}.numbers.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"key": "2", "item": {"num')  # as a crash tears off a line
    runner = open_runner(_Count())
    states = list(runner.watch(job_id))
    assert JobState.SUCCEEDED is states[-1].state
    assert states[0].progress_ratio >= 0.5
    assert [0, 1, 2, 3] == _numbers(runner, job_id)


def test_a_job_that_ends_its_service_each_time_is_given_up(
    open_runner: OpenRunner, tmp_path: Path
) -> None:
    job_id = _die(tmp_path)
    for _ in range(4):
        assert "" == _die(tmp_path)
    runner = open_runner(_Count())
    with pytest.raises(InterruptedJobError, match="stopped 5 times"):
        runner.result(job_id, _Answer)


class _Keeping:
    """Work that keeps a line each time it is begun, and fails the first time."""

    def __init__(self, fails: bool) -> None:
        self.kept = ""
        self._fails = fails

    def __call__(self, request: dict[str, int]) -> Work:
        def work(progress: JobProgress) -> _Answer:
            with progress.kept_path("found").open("a+", encoding="utf-8") as file:
                file.seek(0)
                self.kept = file.read()
                file.write("found\n")
            if self._fails:
                raise ServiceUnavailableError("the workers went away")
            return _Answer(value=request["size"])

        return work


def _run(runner: JobRunner, work: _Keeping, size: int) -> Job:
    job = runner.create("count", work({"size": size}), _Question(size=size))
    return list(runner.watch(job.job_id))[-1]


@pytest.mark.parametrize("restarts", [False, True])
def test_what_a_failed_job_kept_serves_the_next_of_its_request(
    open_runner: OpenRunner, tmp_path: Path, restarts: bool
) -> None:
    """Under a name of its own, also after a restart; another request has none of it."""
    failing, other, again = _Keeping(fails=True), _Keeping(fails=False), _Keeping(fails=False)
    runner = open_runner(failing)
    assert JobState.FAILED is _run(runner, failing, 4).state
    if restarts:
        runner.close()
        runner = open_runner(again)
    assert JobState.SUCCEEDED is _run(runner, other, 5).state
    assert "" == other.kept
    assert JobState.SUCCEEDED is _run(runner, again, 4).state
    assert "found\n" == again.kept
    assert [] == [*tmp_path.glob("*.kept"), *tmp_path.glob("*.request.json")]
