"""The interval of a capacity is found by workers as in this thread, and once only."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from capacity_fakes import drawn_scenario, limits, load_of

from foretoken.jobs.executor import Executor, R, S, T, keep_going
from foretoken.jobs.executors.inline import InlineExecutor
from foretoken.jobs.executors.local import LocalExecutor
from foretoken.jobs.runner import JobProgress
from foretoken.simulator.search.capacity.bracket import fit_curve
from foretoken.simulator.search.capacity.load_search import (
    Basis,
    LoadSearch,
    OtherLoad,
    find_highest_rate,
)
from foretoken.simulator.search.capacity.probe import resample_loads
from foretoken.simulator.search.context import InlineContext, JobContext
from foretoken.simulator.statistics import SimulatorStatistics

_TARGETS = limits(("e2e_latency_ms", 90, 400.0))


def _questions() -> tuple[list[OtherLoad], Basis]:
    """Return a search's other requests, and its own ones, all made anew."""
    scenario = drawn_scenario(80)
    load = load_of(scenario, _TARGETS)
    search = LoadSearch(load, 0.05, 0.95, InlineContext())
    search.find_bracket(6.0)
    others = [
        OtherLoad(name="", num_runs=2, plan=each.plan, plan_rps=each.plan_rps)
        for each in resample_loads(scenario, load).loads[:3]
    ]
    others.append(OtherLoad(name="", num_runs=4, tolerance=0.05))
    return others, Basis(loads={"": load}, curve=fit_curve(search.probes))


class _Counting(InlineExecutor):
    """Counts what it does."""

    num_done = 0

    def run(
        self,
        function: Callable[[T, S], R],
        items: Sequence[T],
        shared: S,
        check: Callable[[], None] = keep_going,
    ) -> Iterator[tuple[int, R]]:
        self.num_done += len(items)
        return super().run(function, items, shared, check)


@pytest.fixture
def workers() -> Iterator[Executor]:
    executor = LocalExecutor(2)
    yield executor
    executor.close()


@pytest.mark.slow
def test_workers_find_the_same_bit_for_bit(workers: Executor) -> None:
    others, basis = _questions()
    expected = [find_highest_rate(other, basis) for other in others]
    found = dict(workers.run(find_highest_rate, others, basis))
    assert [found[index] for index in range(len(others))] == expected


def test_a_search_that_goes_on_repeats_no_runs(tmp_path: Path) -> None:
    """What a process kept is known again by questions that another one made anew."""
    found = []
    statistics = SimulatorStatistics()
    executors = [_Counting(), _Counting()]
    for executor in executors:
        progress = JobProgress(lambda *_: None, threading.Event(), "capacity-1", tmp_path)
        with JobContext(executor, progress, statistics) as context:
            found.append(dict(context.run(find_highest_rate, *_questions())))
    assert found[0] == found[1]
    assert [executor.num_done for executor in executors] == [4, 0]
    counts = statistics.read()
    assert (counts.num_simulated, counts.num_kept) == (4, 4)
    assert sum(counts.search_task_s.counts) == 4
