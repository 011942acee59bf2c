"""The simulations of a search of about 1,000 points on two worker processes against one.

The question: Llama-3.1-8B on up to 8 H200, isl 4000, osl 1000; the best points are simulated
request by request. The search is run once in this thread, and what it gives its workers to do is
kept; then the same tasks are given to one worker and to two, and must give the same, bit for bit.
Printed are wall times, which mean something on a machine that does nothing else: efficiency is one
worker's time over twice that of two, with the start of the workers and once they have started. CPU
times next to them show on a busy machine, too, what workers and the feeding of them add to the
work.

Steps cost what data sheets say, or with `--home` what a trained predictor does: that folder of
bench_search.py, for example.
"""

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from foretoken.app.compose import Composition
from foretoken.app.config import AppConfig
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.models.architecture import find_model
from foretoken.domain.ports import PredictorPort
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import (
    LatencyLimit,
    ServingSearchRequest,
    ServingSpace,
    ServingTargets,
)
from foretoken.domain.requests.workload import LengthSpec, WorkloadSpec
from foretoken.jobs.executor import Executor, R, S, T, keep_going
from foretoken.jobs.executors.inline import InlineExecutor
from foretoken.jobs.executors.local import LocalExecutor
from foretoken.simulator.search.context import InlineContext
from foretoken.simulator.search.journal import fingerprint
from foretoken.simulator.search.serving.search import ServingSearch
from foretoken.simulator.serving.compilation import compile_engines

_TARGETS = ServingTargets(
    limits=(
        LatencyLimit(metric="ttft_ms", percentile=0, limit_ms=2000),
        LatencyLimit(metric="tpot_ms", percentile=0, limit_ms=30),
    )
)
_REQUEST = ServingSearchRequest(
    scenario=ServingScenario(
        model=find_model("llama-3.1-8b"),
        device="h200_sxm",
        engine=EngineSpec(profile="vllm-0.20"),
        workload=WorkloadSpec(prefill=LengthSpec(mean=4000), decode=LengthSpec(mean=1000)),
    ),
    space=ServingSpace(
        max_devices=8,
        modes=("aggregated",),
        max_num_batched_tokens=(1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384),
    ),
    targets=_TARGETS,
)


class _Call(NamedTuple):
    """What a search asked its workers for once."""

    function: Callable[[Any, Any], Any]
    items: Sequence[Any]
    shared: Any


class _Recorder(InlineExecutor):
    """Works in this thread and keeps what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def run(
        self,
        function: Callable[[T, S], R],
        items: Sequence[T],
        shared: S,
        check: Callable[[], None] = keep_going,
    ) -> Iterator[tuple[int, R]]:
        """Yield the results, and remember the question."""
        self.calls.append(_Call(function, items, shared))
        return super().run(function, items, shared, check)


class _Figures(NamedTuple):
    """One way to do all tasks: CPU time, wall time of the start and of the tasks, and results."""

    name: str
    cpu_s: float
    start_s: float
    wall_s: float
    results: tuple[bytes, ...]


def main() -> None:
    """Print the figures."""
    options = _parse_options()
    compile_engines()
    with tempfile.TemporaryDirectory() as scratch:
        home = options.home or Path(scratch)
        with Composition(AppConfig(home=str(home))) as services:
            calls = _record(services.predictor, options.finalists)
    print(f"{sum(len(call.items) for call in calls)} simulations")
    ways = [
        _measure("this thread", InlineExecutor(), calls),
        _measure("1 worker", LocalExecutor(1), calls),
        _measure("2 workers", LocalExecutor(2), calls),
    ]
    print(f"load average: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for way in ways:
        share = ways[0].cpu_s / way.cpu_s
        print(
            f"{way.name:12} CPU {way.cpu_s:6.2f} s, of it the work itself {share:6.1%};"
            f" wall {way.start_s:5.2f} s to start and {way.wall_s:6.2f} s"
        )
    _, one, two = ways
    started, whole = (
        one_s / (2 * two_s)
        for one_s, two_s in (
            (one.wall_s, two.wall_s),
            (one.start_s + one.wall_s, two.start_s + two.wall_s),
        )
    )
    print(
        f"wall-clock efficiency of 2 workers against 1: {started:.1%}, with the start {whole:.1%}"
    )
    equal = all(way.results == ways[0].results for way in ways)
    print(f"equal results: {equal}")
    if not equal:
        raise SystemExit("the executors give other results")


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--home", type=Path, help="folder of a trained predictor")
    parser.add_argument("--finalists", type=int, default=24, help="candidates to simulate")
    return parser.parse_args()


def _record(predictor: PredictorPort, num_finalists: int) -> list[_Call]:
    recorder = _Recorder()
    request = replace(_REQUEST, num_finalists=num_finalists)
    report = ServingSearch(predictor).run(request, InlineContext(recorder))
    print(
        f"{report.num_points:,} points, {report.num_distinct:,} distinct, best {report.best};"
        f" {report.num_simulated} simulated request by request"
    )
    return recorder.calls


def _measure(name: str, executor: Executor, calls: Sequence[_Call]) -> _Figures:
    before_s, began_s = _cpu_s(), time.perf_counter()
    # Workers start together, so each takes one of as many tasks.
    first = calls[0]
    list(executor.run(first.function, [first.items[0]] * executor.num_workers, first.shared))
    started_s = time.perf_counter()
    results = []
    for call in calls:
        found = dict(executor.run(call.function, call.items, call.shared))
        results += [fingerprint(found[index]) for index in range(len(found))]
    wall_s = time.perf_counter() - started_s
    # Children count when they have ended.
    executor.close()
    return _Figures(name, _cpu_s() - before_s, started_s - began_s, wall_s, tuple(results))


def _cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    main()
