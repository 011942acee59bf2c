"""A search whose service dies goes on where it was; searches share workers; they can be cancelled.

The searches here do small tasks; that those of the simulator behave alike is tested with it.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from search_service import NUM_ITEMS, Answer, Question, SearchService

from foretoken.domain import schema
from foretoken.domain.job import JobState
from foretoken.domain.requests.search import Finalist
from foretoken.jobs.executors.inline import InlineExecutor
from foretoken.jobs.executors.local import LocalExecutor
from foretoken.simulator.search.context import FINALISTS
from foretoken.simulator.search.journal import Journal


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    folder = tmp_path / "calls"
    folder.mkdir()
    return folder


@pytest.fixture
def service(tmp_path: Path) -> Iterator[SearchService]:
    service = SearchService(tmp_path / "jobs", LocalExecutor(2))
    yield service
    service.close()


def _num_calls(folder: Path) -> dict[int, int]:
    return {int(path.name): len(path.read_text("ascii")) for path in folder.iterdir()}


def _finalists(service: SearchService, job_id: str, first: int = 0) -> list[int]:
    found = service.runner.follow(job_id, FINALISTS, first)
    return [schema.decode(Finalist, plain).candidate for plain in found]


def _kill_in_the_middle(folder: Path, calls: Path) -> str:
    """Kill a service with SIGKILL in the middle of its search; return the name of the job."""
    command = [sys.executable, "-m", "search_service", str(folder), str(calls)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        # The job may print its first item before the main thread prints the name.
        lines = [process.stdout.readline().strip() for _ in range(21)]
        process.kill()
    return next(line for line in lines if not line.isdigit())


@pytest.mark.slow
def test_a_killed_search_is_finished_by_the_next_process(
    service: SearchService, tmp_path: Path, calls: Path
) -> None:
    """With the results of one that was never killed, and nothing that was kept done again."""
    job_id = _kill_in_the_middle(tmp_path / "jobs", calls)
    with Journal(tmp_path / "jobs" / f"{job_id}.journal.kept") as journal:
        num_kept = len(journal)
    before = _num_calls(calls)
    assert 20 <= num_kept < NUM_ITEMS
    assert num_kept <= len(before)

    service.open()
    assert JobState.SUCCEEDED is list(service.runner.watch(job_id))[-1].state
    expected = tuple(item * item + 1 for item in range(NUM_ITEMS))
    assert Answer(results=expected) == service.runner.result(job_id, Answer)
    after = _num_calls(calls)
    assert set(range(NUM_ITEMS)) == set(after)
    # Only what was done when the service died, and not yet kept, was done a second time.
    num_repeated = sum(after[item] > 1 for item in after)
    assert num_repeated <= len(before) - num_kept + 2
    assert NUM_ITEMS + num_repeated == sum(after.values())
    assert sorted(_finalists(service, job_id)) == list(range(NUM_ITEMS))


@pytest.mark.slow
def test_a_resumed_search_shows_each_finalist_once_and_in_the_same_place(
    service: SearchService, tmp_path: Path, calls: Path
) -> None:
    """Who had read some before the crash goes on with the number of those."""
    job_id = _kill_in_the_middle(tmp_path / "jobs", calls)
    path = tmp_path / "jobs" / f"{job_id}.{FINALISTS}.jsonl"
    shown = path.read_text("utf-8")
    service.open()
    late = _finalists(service, job_id, 15)
    everything = _finalists(service, job_id)
    assert path.read_text("utf-8").startswith(shown[: shown.rindex("\n") + 1])
    assert everything[15:] == late
    assert NUM_ITEMS == len(set(everything)) == len(everything)


def test_searches_of_two_clients_share_the_workers(service: SearchService, tmp_path: Path) -> None:
    """The later one does not wait for the earlier one's end."""
    service.open()
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    first = service.create(Question(num_items=150, calls=str(folders[0])))
    watched = service.runner.follow(first, FINALISTS)
    next(watched)
    second = service.create(Question(num_items=20, calls=str(folders[1])))
    for job_id in (first, second):
        assert JobState.SUCCEEDED is list(service.runner.watch(job_id))[-1].state
    names = [job_id for job_id, _ in service.order]
    assert (150, 20) == (names.count(first), names.count(second))
    last_of_second = max(place for place, name in enumerate(names) if name == second)
    assert first in names[last_of_second:]


def test_a_search_that_is_cancelled_in_the_middle_stops(
    service: SearchService, tmp_path: Path, calls: Path
) -> None:
    service.open()
    job_id = service.create(Question(num_items=5000, calls=str(calls)))
    watched = service.runner.follow(job_id, FINALISTS)
    next(watched)
    service.runner.cancel(job_id)
    assert JobState.CANCELLED is list(service.runner.watch(job_id))[-1].state
    assert len(list(watched)) < 5000
    assert len(_num_calls(calls)) < 5000
    # What it found is there for who resumes it.
    assert [job_id] == [path.name.partition(".")[0] for path in (tmp_path / "jobs").glob("*.kept")]


def test_a_search_gives_the_same_in_this_thread(tmp_path: Path, calls: Path) -> None:
    service = SearchService(tmp_path / "jobs", InlineExecutor())
    service.open()
    job_id = service.create(Question(num_items=5, calls=str(calls)))
    assert JobState.SUCCEEDED is list(service.runner.watch(job_id))[-1].state
    assert Answer(results=(1, 2, 5, 10, 17)) == service.runner.result(job_id, Answer)
    assert [0, 1, 2, 3, 4] == _finalists(service, job_id)
    service.close()
