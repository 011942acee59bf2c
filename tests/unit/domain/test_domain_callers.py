"""Callers: what each may use, how many jobs each may have, and whose turn it is."""

import threading
from pathlib import Path

import pytest

from foretoken.domain.caller import Allowance, answering, current_caller
from foretoken.domain.errors import QuotaError
from foretoken.domain.job import Job
from foretoken.jobs.job_threads import JobThreads
from foretoken.jobs.progress import JobProgress
from foretoken.jobs.runner import JobLimits, JobRunner

_TIMEOUT_S = 60.0


def test_a_caller_is_that_of_the_call_a_thread_answers() -> None:
    assert "" == current_caller()
    with answering("ada"):
        with answering("bob"):
            assert "bob" == current_caller()
        assert "ada" == current_caller()
    assert "" == current_caller()


def test_what_was_used_fades_evenly() -> None:
    now = [100.0]
    allowance = Allowance(60.0, 3600.0, "seconds of SQL an hour", lambda: now[0])
    # What begins may use more than is left, and is paid back before the next begins.
    allowance.spend("ada", 90.0)
    with pytest.raises(QuotaError, match="its 60 seconds of SQL an hour; try again in 1800 s"):
        allowance.check("ada")
    allowance.check("bob")
    now[0] += 1799.0
    with pytest.raises(QuotaError):
        allowance.check("ada")
    now[0] += 2.0
    allowance.check("ada")


def test_nobody_and_no_limit_are_not_counted() -> None:
    allowance = Allowance(1.0, 60.0, "bytes a minute")
    allowance.spend("", 5.0)
    allowance.check("")
    unlimited = Allowance(0.0, 60.0, "bytes a minute")
    unlimited.spend("ada", 5.0)
    unlimited.check("ada")


def test_callers_that_were_not_seen_for_long_are_forgotten() -> None:
    now = [0.0]
    allowance = Allowance(1.0, 60.0, "bytes a minute", lambda: now[0])
    for number in range(2_000):
        now[0] += 1.0
        allowance.spend(f"caller-{number}", 1.0)
    assert len(allowance._used) <= 1_000


def test_callers_get_threads_in_turn() -> None:
    """Who has one job waits for one of another's hundred, not for all of them."""
    threads, order = JobThreads(1, "job"), []
    has_begun, gate, is_done = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        has_begun.set()
        assert gate.wait(_TIMEOUT_S)

    threads.submit("ada", hold)
    assert has_begun.wait(_TIMEOUT_S)
    for number in range(3):
        threads.submit("ada", lambda number=number: order.append(f"ada {number}"))
    threads.submit("bob", lambda: order.append("bob"))
    threads.submit("eve", lambda: order.append("eve"))
    threads.submit("ada", is_done.set)
    gate.set()
    assert is_done.wait(_TIMEOUT_S)
    threads.close()
    assert ["ada 0", "bob", "eve", "ada 1", "ada 2"] == order


def test_a_task_that_fails_takes_no_thread_with_it() -> None:
    threads, is_done = JobThreads(1, "job"), threading.Event()
    threads.submit("ada", lambda: 1 // 0)  # type: ignore[arg-type,return-value]
    threads.submit("ada", is_done.set)
    assert is_done.wait(_TIMEOUT_S)
    threads.close()


def test_a_caller_has_so_many_jobs_at_a_time(tmp_path: Path) -> None:
    runner = JobRunner(tmp_path, num_workers=4, limits=JobLimits(max_per_caller=2))
    runner.open()
    gate = threading.Event()

    def work(_: JobProgress) -> Job:
        assert gate.wait(_TIMEOUT_S)
        return runner.list()[0]

    with answering("ada"):
        jobs = [runner.create("count", work) for _ in range(2)]
        with pytest.raises(QuotaError, match="ada has 2 jobs that have not ended"):
            runner.create("count", work)
    with answering("bob"):
        jobs.append(runner.create("count", work))
    jobs.append(runner.create("count", work))
    assert ["ada", "ada", "bob", ""] == [job.owner for job in jobs]
    gate.set()
    for job in jobs:
        list(runner.watch(job.job_id))
    with answering("ada"):
        list(runner.watch(runner.create("count", work).job_id))
    runner.close()
