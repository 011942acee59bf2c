"""Searches in processes of this machine: the same results, whatever happens to the workers."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import search_tasks
from search_simulations import Load, simulate

from foretoken.domain.errors import (
    CancelledJobError,
    FieldViolation,
    InvalidRequestError,
    ServiceUnavailableError,
)
from foretoken.jobs.executors.inline import InlineExecutor
from foretoken.jobs.executors.local import LocalExecutor
from foretoken.jobs.executors.observed import ObservedExecutor
from foretoken.simulator.cost.tables import flat_tables
from foretoken.simulator.statistics import SimulatorStatistics

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def executor() -> Iterator[LocalExecutor]:
    executor = LocalExecutor(2)
    yield executor
    executor.close()


def test_processes_give_what_one_thread_gives(executor: LocalExecutor) -> None:
    """Simulations, bit for bit."""
    loads = [Load(seed=seed, rate_rps=20.0 * (1 + seed % 4)) for seed in range(12)]
    expected = dict(InlineExecutor().run(simulate, loads, flat_tables()))
    found = dict(executor.run(simulate, loads, flat_tables()))
    assert sorted(expected) == sorted(found)
    for index, times in expected.items():
        np.testing.assert_array_equal(times, found[index], strict=True)


def test_every_worker_is_a_process_of_its_own(executor: LocalExecutor, tmp_path: Path) -> None:
    pids = {pid for _, pid in executor.run(search_tasks.meet, range(2), str(tmp_path))}
    assert 2 == len(pids)
    assert set(executor.worker_pids) == pids
    assert os.getpid() not in pids
    assert {"1"} == {threads for _, threads in executor.run(search_tasks.num_threads, [0], None)}


def test_who_answers_callers_goes_before_workers(executor: LocalExecutor) -> None:
    found = {niceness for _, niceness in executor.run(search_tasks.find_niceness, range(2), None)}
    assert {min(os.nice(0) + 5, 19)} == found


def test_what_workers_spend_is_counted_and_what_this_process_spends_is_not(
    executor: LocalExecutor,
) -> None:
    """Both workers did some, and their start is in it, so it is more than the tasks' alone."""
    spent = [0.05] * 4
    here = ObservedExecutor(InlineExecutor(), SimulatorStatistics().observe_search_task)
    there = ObservedExecutor(executor, SimulatorStatistics().observe_search_task)
    for observed in (here, there):
        assert spent == [cpu_s for _, cpu_s in observed.run(search_tasks.spend, spent, None)]
    assert 0.0 == here.worker_cpu_s
    assert there.worker_cpu_s >= sum(spent)


def test_nothing_to_do_is_done_at_once(executor: LocalExecutor) -> None:
    assert [] == list(executor.run(search_tasks.add, [], 1))


def test_a_killed_worker_s_item_is_done_again(executor: LocalExecutor, tmp_path: Path) -> None:
    results = dict(executor.run(search_tasks.die_once, range(10), str(tmp_path)))
    assert {item: item * item for item in range(10)} == results
    assert (tmp_path / "died").exists()


def test_a_worker_killed_from_outside_is_replaced(executor: LocalExecutor, tmp_path: Path) -> None:
    """Both wait in the middle of an item when one is killed."""
    gate = tmp_path / "go"
    results = executor.run(search_tasks.wait_for_file, range(6), str(gate))
    found: dict[int, int] = {}
    consumer = threading.Thread(target=lambda: found.update(results))
    consumer.start()
    while len(list(tmp_path.glob("go.waits-*"))) < 2:
        time.sleep(0.01)
    victim = executor.worker_pids[0]
    os.kill(victim, signal.SIGKILL)
    gate.touch()
    consumer.join(120)
    assert {item: item for item in range(6)} == found
    assert victim not in executor.worker_pids


def test_an_item_that_kills_every_worker_is_given_up(executor: LocalExecutor) -> None:
    with pytest.raises(ServiceUnavailableError, match=r"item 1 was killed .* 3 times"):
        list(executor.run(search_tasks.die, range(4), None))
    assert {0: 5} == dict(executor.run(search_tasks.add, [2], 3))
    # There are two workers, so the third attempt was another one's.
    assert executor.workers.num_restarts >= 1


def test_an_error_of_a_task_is_the_run_s(executor: LocalExecutor) -> None:
    with pytest.raises(InvalidRequestError, match="is 2") as caught:
        list(executor.run(search_tasks.refuse, range(4), None))
    assert (FieldViolation("layout.tp", "is 2"),) == caught.value.violations
    with pytest.raises(ZeroDivisionError) as odd:
        list(executor.run(search_tasks.divide, [0], 1))
    assert "in divide" in odd.value.__notes__[0]


def test_what_cannot_be_sent_is_an_error_and_not_a_wait(executor: LocalExecutor) -> None:
    with pytest.raises(TypeError, match="pickle"):
        list(executor.run(search_tasks.add, [threading.Lock()], 1))  # type: ignore[list-item]


def test_a_function_that_no_other_process_knows_is_refused(executor: LocalExecutor) -> None:
    with pytest.raises(TypeError, match="top of a module"):
        list(executor.run(lambda item, _: item, [1], None))


def test_what_a_task_prints_stays_apart(executor: LocalExecutor) -> None:
    assert {0: 0, 1: 1} == dict(executor.run(search_tasks.print_much, [0, 1], None))


def test_searches_get_equal_turns(tmp_path: Path) -> None:
    """The second run's items are done between those of the first, not after them."""
    executor, done = LocalExecutor(1), tmp_path / "done"
    with ThreadPoolExecutor(2) as pool:
        for name, num_waiting in (("first", 4), ("second", 4 + 5)):
            pool.submit(list, executor.run(search_tasks.log, [name] * 5, str(done)))
            while num_waiting != sum(len(run.waiting) for run in tuple(executor._runs)):
                time.sleep(0.01)
        done.touch()
    executor.close()
    # One of the first was under way when the second came.
    assert ["first", *["first", "second"] * 4, "second"] == done.read_text("utf-8").split()


def test_a_closed_run_drops_what_waits(executor: LocalExecutor, tmp_path: Path) -> None:
    results = executor.run(search_tasks.count_call, range(1000), str(tmp_path))
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert {0: 2} == dict(executor.run(search_tasks.add, [1], 1))
    assert len(list(tmp_path.iterdir())) < 1000


def test_a_run_that_waits_can_be_cancelled(executor: LocalExecutor, tmp_path: Path) -> None:
    """It does not wait for the items that are being done."""
    gate = tmp_path / "go"
    wanted = threading.Event()
    wanted.set()

    def check() -> None:
        if not wanted.is_set():
            raise CancelledJobError("enough")

    threading.Timer(0.1, wanted.clear).start()
    with pytest.raises(CancelledJobError):
        list(executor.run(search_tasks.wait_for_file, range(4), str(gate), check))
    gate.touch()


def test_a_closed_executor_fails_what_waits(tmp_path: Path) -> None:
    executor = LocalExecutor(1)
    results = executor.run(search_tasks.wait_for_file, range(2), str(tmp_path / "never"))
    closing = threading.Timer(0.2, executor.close)
    closing.start()
    with pytest.raises(ServiceUnavailableError, match="ending"):
        list(results)
    closing.join()
    with pytest.raises(ServiceUnavailableError, match="ending"):
        list(executor.run(search_tasks.add, [1], 1))
    assert () == executor.worker_pids


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """And none of its modules was run a second time in them."""
    program = textwrap.dedent(
        """
        import search_tasks, sys, time
        from foretoken.jobs.executors.local import LocalExecutor
        executor = LocalExecutor(2)
        list(executor.run(search_tasks.meet, range(2), sys.argv[1]))
        print(*executor.worker_pids, flush=True)
        time.sleep(60)
        """
    )
    (tmp_path / "seen").mkdir()
    script = tmp_path / "unguarded.py"
    script.write_text(program, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "seen")],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
    assert 2 == len(pids)
    deadline = time.monotonic() + 20
    while any(_is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [] == [pid for pid in pids if _is_running(pid)]


def _is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except OSError:
        return False
    # The state stands after the name in brackets; a zombie waits for whoever adopted it.
    return status.rsplit(")", 1)[1].split()[0] != "Z"
