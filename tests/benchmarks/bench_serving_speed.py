"""CPU time of whole serving simulations and of their engines alone, compared with other simulators.

The first 2,000 and 10,000 Splitwise requests, and up to 100,000 synthetic ones, one A100 with
Llama 2 7B. Whole is what a job does: resolve the workload, ask for the costs (of the data sheet
here, not the predictor's), run, report, tables, with every metric on. Engines alone is the compiled
kernel with flat costs. Each workload has a process of its own that loads compiled code and does not
compile; what compiling takes is said apart. Without ../shared/data only synthetic requests run.
"""

import csv
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

import numpy as np

from foretoken.domain.frameworks.engine import EngineSpec, find_engine
from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.roofline import compute_terms
from foretoken.domain.measurements.estimate import (
    LatencyColumns,
    LatencyQuery,
    LatencyReply,
    OperatorTable,
)
from foretoken.domain.models.architecture import find_model
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.ports import PredictorPort
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.slo import Slo
from foretoken.domain.requests.workload import LengthSpec, Request, WorkloadSpec
from foretoken.jobs.runner import JobProgress
from foretoken.simulator.cost.latency_surfaces import LatencySurfaces, SurfaceSpec, fetch_surfaces
from foretoken.simulator.cost.tables import flat_tables
from foretoken.simulator.serving.compilation import warm_up
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.simulation import (
    ServingResult,
    run_deployment,
    simulate_serving,
)
from foretoken.simulator.workload.requests import resolve_workload

T = TypeVar("T")
_TRACES = Path(__file__).resolve().parents[3] / "shared/data/vidur/traces"
# Requests per CPU second of others on this kind of machine, from their own timings.
_PEERS = {"Vidur": 340, "BLIS": 220}
_ENGINE = "vllm-0.19"
_NUM_ROUNDS = 3
# Costs like those of a 7B model on a data-centre GPU: 8 ms a step and more.
_TABLES = flat_tables(8_000.0, 20.0, us_per_kv_token=0.05)


class _Figures(NamedTuple):
    num_requests: int
    whole_s: float
    whole_steps: int
    engines_s: float
    engine_steps: int
    peak_mb: float


class _DataSheet:
    """A predictor of rooflines."""

    def predict(self, query: LatencyQuery) -> LatencyReply:
        tables = tuple(self._answer(query, table) for table in query.tables)
        return LatencyReply(model_version="data sheet", tables=tables)

    def _answer(self, query: LatencyQuery, table: OperatorTable) -> LatencyColumns:
        spec, device = find_operator(table.operator), find_device(query.device)
        columns = {name: np.asarray(column) for name, column in table.columns.items()}
        terms = compute_terms(spec, columns, table.dtype, table.phase, device)
        latency_us = np.maximum(terms.compute_us, terms.memory_us) + terms.floor_us
        return LatencyColumns(
            latency_us=latency_us,
            low_us=latency_us,
            high_us=latency_us,
            provenance=np.zeros(len(latency_us), dtype=np.int64),
        )


class _Silent(JobProgress):
    def __init__(self) -> None:
        """Report to nobody."""

    def update(self, ratio: float, message: str = "") -> None:
        """Report to nobody."""


def main() -> int:
    """Print times, rates, memory, ratios to other simulators, and growth with the requests."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NUMBA_CACHE_DIR"] = folder
        print(f"load average at the start: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
        print(f"compiling takes {_alone(_warm_up_s, ''):.1f} CPU s once on a machine;", end=" ")
        print(f"then loading takes {_alone(_warm_up_s, ''):.2f} CPU s in each process")
        _alone(_measure, "1000")
        for count in (2_000, 10_000):
            path = _TRACES / f"splitwise_conv_first{count}.csv"
            if path.is_file():
                _show(f"Splitwise, first {count:,}", _alone(_measure, str(path)))
            else:
                print(f"skipped {path.name}: the shared measurements are not here")
        for count in (25_000, 50_000, 100_000):
            _show(f"synthetic, {count:,}", _alone(_measure, str(count)))
    return 0


def _alone(work: Callable[[str], T], what: str) -> T:
    """Return what a function does with an argument in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, what).result()


def _show(name: str, figures: _Figures) -> None:
    rate = figures.num_requests / figures.whole_s
    peers = ", ".join(f"{rate / peer:,.0f} x {name}" for name, peer in _PEERS.items())
    print(f"{name}: whole {figures.whole_s:.2f} CPU s, {rate:,.0f} requests/s ({peers})")
    whole_rate = figures.whole_steps / figures.whole_s
    engine_rate = figures.engine_steps / figures.engines_s
    print(
        f"  {figures.whole_steps:,} iterations, {whole_rate:,.0f}/s; peak {figures.peak_mb:.0f} MB"
    )
    print(f"  engines alone {figures.engines_s:.3f} CPU s, {engine_rate:,.0f} iterations/s", end="")
    print(f", {1e6 * figures.engines_s / figures.num_requests:.2f} us a request")


def _warm_up_s(_what: str) -> float:
    started = time.process_time()
    warm_up(_setup(), _TABLES)
    return time.process_time() - started


def _setup() -> DeploymentSetup:
    return DeploymentSetup(profile=find_engine(_ENGINE), num_kv_blocks=30_000)


def _measure(what: str) -> _Figures:
    """Return the medians for a trace or a number of synthetic requests."""
    scenario = ServingScenario(
        model=find_model("llama-2-7b"),
        device="a100_sxm_80",
        engine=EngineSpec(profile=_ENGINE),
        workload=_workload(what),
        slo=Slo(ttft_ms=500, itl_ms=50),
        device_idle_w=100,
        device_busy_w=400,
    )
    warm_up(_setup(), _TABLES)
    _simulate(scenario)
    peak_mb = _peak_mb()
    result, whole_s = _time(lambda: _simulate(scenario))
    plan = resolve_workload(scenario.workload, (), scenario.seed)
    record, engines_s = _time(lambda: run_deployment(plan, _setup(), _TABLES, lambda _: None))
    return _Figures(
        num_requests=plan.num_requests,
        whole_s=whole_s,
        whole_steps=result.report.num_serving_steps,
        engines_s=engines_s,
        engine_steps=len(record.steps[0].end_ns),
        peak_mb=peak_mb,
    )


def _time(work: Callable[[], T]) -> tuple[T, float]:
    """Return what work does and the median CPU time of some rounds of it."""
    cpu_s = []
    for _ in range(_NUM_ROUNDS):
        started = time.process_time()
        done = work()
        cpu_s.append(time.process_time() - started)
    return done, sorted(cpu_s)[_NUM_ROUNDS // 2]


def _simulate(scenario: ServingScenario) -> ServingResult:
    def fetch(spec: SurfaceSpec) -> LatencySurfaces:
        return fetch_surfaces(spec, cast("PredictorPort", _DataSheet()))

    return simulate_serving(scenario, fetch, _Silent())


def _workload(what: str) -> WorkloadSpec:
    if what.isdecimal():
        return WorkloadSpec(
            rate_rps=8.0,
            num_requests=int(what),
            prefill=LengthSpec(kind="lognormal", mean=500, spread=1.0),
            decode=LengthSpec(kind="lognormal", mean=200, spread=1.0),
        )
    with Path(what).open(encoding="utf-8") as lines:
        rows = [[float(value) for value in row.values()] for row in csv.DictReader(lines)]
    requests = tuple(
        Request(
            arrival_s=arrival_s,
            num_prefill_tokens=int(prompt),
            num_decode_tokens=max(int(answer), 1),
        )
        for arrival_s, prompt, answer in rows
    )
    return WorkloadSpec(arrival="trace", trace_requests=requests)


def _peak_mb() -> float:
    """Return the most memory this process had, without what started it."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


if __name__ == "__main__":
    sys.exit(main())
