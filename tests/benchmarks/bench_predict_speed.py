"""How fast the predictor answers: one call, whole tables and surfaces, in process and over gRPC.

Run: python tests/benchmarks/bench_predict_speed.py [DATA_FOLDER]

Trains on GEMMs that follow the roofline, or, with a folder of data, on Vidur's A30 tables. Rates
are estimates per second of CPU time of the whole process; over gRPC that is client and server
together. Points asked first are new to the predictor, and the same are then asked again.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow.compute as pc

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.importing import ImportRequest, find_importer
from foretoken.catalog.service import CatalogService
from foretoken.client.services import PredictorClient
from foretoken.domain.hardware.device import find_device
from foretoken.domain.job import JobState
from foretoken.domain.measurements.estimate import DType, LatencyQuery, OperatorTable
from foretoken.domain.measurements.latency_models import TrainRequest
from foretoken.domain.measurements.measurement import (
    MeasurementBatch,
    MeasurementFilter,
    Run,
    RunKind,
)
from foretoken.domain.measurements.surface import SurfaceAxis, SurfaceQuery
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.ports import PredictorPort
from foretoken.predictor import servicer as predictor_servicer
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.roofline import Target, compute_limits
from foretoken.predictor.service import PredictorService
from foretoken.wire.arrow import dims_to_columns, read_table, rows_to_table

sys.path.append(str(Path(__file__).resolve().parents[1] / "contract"))

from loopback import serve

Q = TypeVar("Q")

_DEVICE = "a30"
_NUM_SINGLE_CALLS = 1_000
_NUM_BULK_ROWS = 100_000
# A dimension that takes no more values is a property of models or of a cluster, not a size.
_MAX_CHOICES = 20
_SINGLE_GOAL_MS = 2.0
_BULK_GOAL_PER_S = {"in process": 200_000, "gRPC": 120_000}
# LightGBM, 500 trees of 31 leaves, one thread: µs for one row, rows/s in bulk.
# Source: measured on a 2-core machine with Python 3.11.
_ENGINES = (
    ("Booster.predict", 53, 52_000),
    ("C API, single row fast", 22, None),
    ("ONNX Runtime", 20, 97_000),
    ("numba walker", 16, 81_000),
    ("tl2cgen", None, 92_000),
    ("lleaves", None, 317_000),
    ("Booster.predict, 200 trees", None, 147_000),
)
# Source: as above; an empty unary call.
_GRPC_CALL_MS = 0.25


@dataclass(frozen=True, slots=True)
class _Subject:
    """An operator that was measured in a format, and the values its dimensions had."""

    operator: str
    dtype: DType
    values: dict[str, np.ndarray]

    def draw(self, num_rows: int, seed: int) -> LatencyQuery:
        """Return a question about random points, each dimension near a measured value."""
        rng = np.random.default_rng(seed)
        columns = {}
        for dim in find_operator(self.operator).dims:
            near = rng.choice(self.values[dim.name], num_rows)
            is_size = len(self.values[dim.name]) > _MAX_CHOICES
            spread = rng.uniform(0.9, 1.0, num_rows) if is_size else 1.0
            columns[dim.name] = np.maximum((near * spread).astype(np.int64), dim.minimum)
        table = OperatorTable(operator=self.operator, dtype=self.dtype, columns=columns)
        return LatencyQuery(device=_DEVICE, tables=(table,))


def main(data: Path | None) -> None:
    """Train and print."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _print_engines()
    with (
        _open_predictor(data) as (predictor, subjects),
        serve(predictor_servicer.register, predictor) as options,
        PredictorClient.connect(options) as client,
    ):
        ways = {"in process": predictor, "gRPC": client}
        _print_single(ways, subjects)
        _print_bulk(ways, subjects)
        _print_surfaces(ways, subjects)


@contextmanager
def _open_predictor(data: Path | None) -> Iterator[tuple[PredictorService, list[_Subject]]]:
    with tempfile.TemporaryDirectory() as scratch:
        catalog = CatalogService(CatalogConfig(path=f"{scratch}/catalog.duckdb", num_threads=1))
        catalog.open()
        _record(catalog, data)
        predictor = PredictorService(PredictorConfig(state_folder=f"{scratch}/p"), catalog)
        predictor.open()
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        *_, job = predictor.watch_job(predictor.create_training(TrainRequest()).job_id)
        if job.state is not JobState.SUCCEEDED:
            raise SystemExit(f"training failed: {job.error_message}")
        wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
        subjects = list(_find_subjects(catalog))
        print(f"trained {len(subjects)} operators in {wall_s:.1f} s, {cpu_s:.1f} CPU s")
        yield predictor, subjects
        predictor.close()
        catalog.close()


def _record(catalog: CatalogService, data: Path | None) -> None:
    if data is None:
        run = Run(run_id="synthetic", kind=RunKind.PROFILE, tool="bench")
        batches = [
            MeasurementBatch(batch_index=0, rows=rows_to_table(_synthetic_rows()), is_last=True)
        ]
        list(catalog.record(run, batches))
        return
    request = ImportRequest(
        path=data / "vidur" / "profiling", device=_DEVICE, options={"folder": "a30_clean"}
    )
    plan = find_importer("vidur").read(request)
    list(catalog.record(plan.run, plan.batches))


def _synthetic_rows() -> list[dict[str, object]]:
    """Return GEMMs of 25 sizes and 16 shapes at 60 % of their roofline."""
    sizes = np.unique(np.geomspace(1, 8192, 25).astype(np.int64))
    shapes = (1024, 2048, 4096, 14336)
    grid = np.meshgrid(sizes, shapes, shapes, indexing="ij")
    columns = {name: axis.reshape(-1) for name, axis in zip("mnk", grid, strict=True)}
    target = Target(device=find_device(_DEVICE), dtype=DType.BF16)
    latency_us = compute_limits(find_operator("gemm"), columns, target).base_us / 0.6
    return [
        {
            "operator": "gemm",
            "phase": "forward",
            "dtype": "bf16",
            "dims": {name: int(column[index]) for name, column in columns.items()},
            "device": _DEVICE,
            "latency_us_median": float(latency_us[index]),
            "status": "ok",
        }
        for index in range(len(latency_us))
    ]


def _find_subjects(catalog: CatalogService) -> Iterator[_Subject]:
    rows = read_table(catalog.read_measurements(MeasurementFilter(device=_DEVICE)))
    rows = rows.filter(pc.equal(rows["phase"], "forward"))
    for name in sorted(set(rows["operator"].to_pylist())):
        spec = find_operator(name)
        if spec.is_collective:
            continue
        own = rows.filter(pc.equal(rows["operator"], name))
        columns = dims_to_columns(own, spec.dim_names)
        dtype = DType[own["dtype"][0].as_py().upper()]
        yield _Subject(name, dtype, {dim: np.unique(column) for dim, column in columns.items()})


def _print_engines() -> None:
    print(f"{'engine alone, 500 trees of 31 leaves':40}{'one row µs':>12}{'rows/s':>12}")
    for name, single_us, bulk_per_s in _ENGINES:
        print(f"{name:40}{single_us or '-':>12}{bulk_per_s or '-':>12}")
    print(f"an empty call over gRPC: {_GRPC_CALL_MS} ms\n")


def _print_single(ways: dict[str, PredictorPort], subjects: list[_Subject]) -> None:
    print(f"\none row a call, ms (goal: p50 under {_SINGLE_GOAL_MS} over gRPC)")
    print(f"{'operator':22}{'':12}{'new p50':>9}{'p99':>9}{'again p50':>11}{'p99':>9}")
    for number, subject in enumerate(subjects):
        for way, port in ways.items():
            seed = 10_000 * (number + 1) + (5_000 if way == "gRPC" else 0)
            queries = [subject.draw(1, seed + i) for i in range(_NUM_SINGLE_CALLS)]
            port.predict(queries.pop())
            new, again = _time_calls(port, queries), _time_calls(port, queries)
            print(
                f"{subject.operator:22}{way:12}{statistics.median(new):9.3f}{_p99(new):9.3f}"
                f"{statistics.median(again):11.3f}{_p99(again):9.3f}"
            )


def _print_bulk(ways: dict[str, PredictorPort], subjects: list[_Subject]) -> None:
    goals = ", ".join(f"{goal:,} {way}" for way, goal in _BULK_GOAL_PER_S.items())
    print(f"\n{_NUM_BULK_ROWS:,} rows a call, estimates per CPU second (goal: {goals})")
    print(f"{'operator':22}{'':12}{'new':>11}{'of goal':>9}{'again':>11}")
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for number, subject in enumerate(subjects):
        for way, port in ways.items():
            query = subject.draw(_NUM_BULK_ROWS, 2 * number + (way == "gRPC"))
            new, again = (_rate(port.predict, query, _NUM_BULK_ROWS) for _ in range(2))
            rates[way].append(new)
            ratio = new / _BULK_GOAL_PER_S[way]
            print(f"{subject.operator:22}{way:12}{new:11,.0f}{ratio:9.2f}{again:11,.0f}")
    for way, found in rates.items():
        # Each operator asked for as often: the mean of times, not of rates.
        mean = statistics.harmonic_mean(found)
        print(f"{'all together':22}{way:12}{mean:11,.0f}{mean / _BULK_GOAL_PER_S[way]:9.2f}")


def _print_surfaces(ways: dict[str, PredictorPort], subjects: list[_Subject]) -> None:
    print("\nsurfaces, points per CPU second")
    for subject in subjects:
        axes = tuple(_axis(dim, values) for dim, values in subject.values.items())
        query = SurfaceQuery(
            device=_DEVICE, operator=subject.operator, dtype=subject.dtype, axes=axes
        )
        for way, port in ways.items():
            rate = _rate(port.tabulate, query, query.num_points)
            print(f"{subject.operator:22}{way:12}{query.num_points:9,} points{rate:12,.0f}")


def _axis(dim: str, values: np.ndarray) -> SurfaceAxis:
    """Return about 24 sizes from the smallest to the largest, or at most 4 of a few choices."""
    if len(values) > _MAX_CHOICES:
        values = np.unique(np.geomspace(max(values[0], 1), values[-1], 24).astype(np.int64))
    else:
        values = values[:4]
    return SurfaceAxis(dim=dim, values=tuple(values.tolist()))


def _time_calls(port: PredictorPort, queries: list[LatencyQuery]) -> list[float]:
    times_ms = []
    for query in queries:
        started_s = time.perf_counter()
        port.predict(query)
        times_ms.append((time.perf_counter() - started_s) * 1e3)
    return times_ms


def _rate(call: Callable[[Q], object], query: Q, num_rows: int) -> float:
    started_s = time.process_time()
    call(query)
    return num_rows / (time.process_time() - started_s)


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[-1]


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
