"""Everything at once for long: recordings, predictions, searches, SQL and watches on four services.

Prints the p99 of predictions while searches run, and what each process holds at the beginning and
at the end: memory, threads, descriptors. With --faults a service is killed now and then, and what
was acknowledged is counted at the end. All is on loopback.
"""

import argparse
import itertools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from foretoken.client.channel_options import ChannelOptions
from foretoken.client.job_wait import wait_for_job
from foretoken.client.services import CatalogClient, PredictorClient, SimulatorClient
from foretoken.domain.errors import ForetokenError
from foretoken.domain.measurements.estimate import DType, LatencyQuery, OperatorTable, Phase
from foretoken.domain.measurements.measurement import (
    MeasurementBatch,
    MeasurementFilter,
    Run,
    RunKind,
    SqlQuery,
)
from foretoken.domain.models.architecture import find_model
from foretoken.domain.ports import TrainRequest
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import TrainingSearchRequest
from foretoken.wire.arrow import read_table, rows_to_table

_SERVICES = ("catalog", "predictor", "simulator")
_NUM_ROWS = 100
_SAMPLE_S = 2.0
_SEARCH = TrainingSearchRequest(
    scenario=TrainingScenario(
        model=find_model("tiny-llama"),
        device="a30",
        dtype=DType.BF16,
        sequence_length=128,
        global_batch_size=8,
        layout=ParallelLayout(dp=4),
    ),
    num_finalists=8,
)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds: memory in MB, threads, open descriptors."""

    memory_mb: float
    num_threads: int
    num_files: int

    @classmethod
    def by(cls, pid: int) -> "Held | None":
        """Return what a process holds now, nothing where it has ended."""
        try:
            status = Path(f"/proc/{pid}/status").read_text("ascii")
            found = dict(line.split(":", 1) for line in status.splitlines())
            # One that has just ended has none.
            memory_mb, num_threads = int(found["VmRSS"].split()[0]) / 1e3, int(found["Threads"])
            num_files = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - quicker, and counted
        except (OSError, ValueError, KeyError):
            return None
        return cls(memory_mb, num_threads, num_files)


class Fleet:
    """A process of each service, started again where it was killed."""

    def __init__(self, folder: Path) -> None:
        """Start them, the catalog first."""
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._ports = {name: _free_port() for name in _SERVICES}
        self.address = {name: f"127.0.0.1:{port}" for name, port in self._ports.items()}
        for name in _SERVICES:
            self._start(name)

    @property
    def pids(self) -> dict[str, int]:
        """The numbers of the processes."""
        return {name: process.pid for name, process in self._processes.items()}

    def close(self) -> None:
        """End them all."""
        for process in self._processes.values():
            with process:
                process.kill()

    def _start(self, name: str) -> None:
        others = {other: self.address[other] for other in _SERVICES if other < name}
        config = {
            "home": str(self._folder / name),
            "endpoints": others,
            "server": {"port": self._ports[name], "metrics_port": -1},
            "log": {"level": "ERROR"},
            "catalog": {"num_threads": 1} if name == "catalog" else {},
            "predictor": {
                "shares_jobs": True,
                "job_lease_s": 5.0,
                "starter": "",
                "train_on_demand": False,
            },
            "simulator": {"shares_jobs": True, "job_lease_s": 5.0, "num_search_workers": 1},
        }
        path = self._folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        command = [sys.executable, "-m", "foretoken.app", "--config", str(path), "serve", name]
        said = ""
        # What a killed one had started ends a moment later, and has its files open until then.
        while not said.startswith("serving "):
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            said = process.stdout.readline()
        self._processes[name] = process

    def kill(self, name: str) -> None:
        """Kill a service in the middle of all, and start it again."""
        with self._processes[name] as process:
            process.kill()
        self._start(name)

    def options(self, name: str) -> ChannelOptions:
        """Return how to reach a service."""
        # A stream open to a killed process may wait for its deadline, and counts as an error.
        return ChannelOptions(
            address=self.address[name], reconnect_delay_s=0.1, stream_deadline_s=30.0
        )


@dataclass
class Tally:
    """What was done, by all threads."""

    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    # Of predictions in ms: while a search ran, and else.
    busy_ms: list[float] = field(default_factory=list)
    quiet_ms: list[float] = field(default_factory=list)
    num_searching: int = 0
    samples: dict[str, list[Held]] = field(default_factory=dict)


def _rows(first: int) -> Any:
    """Return rows of GEMMs whose time is what an A30 might take."""
    return rows_to_table(
        [
            {
                "operator": "gemm",
                "phase": "forward",
                "dtype": "bf16",
                "dims": {"m": 1 + (first + place) % 4096, "n": 4096, "k": 4096},
                "device": "a30",
                "latency_us_median": 50.0 + 0.3 * ((first + place) % 4096),
                "status": "ok",
            }
            for place in range(_NUM_ROWS)
        ]
    )


def _record(fleet: Fleet, tally: Tally) -> Callable[[], None]:
    catalog = CatalogClient.connect(fleet.options("catalog"))
    numbers = itertools.count()

    def act() -> None:
        number = next(numbers)
        run = Run(run_id=f"soak-{os.getpid()}-{number}", kind=RunKind.PROFILE, tool="soak")
        batches = [
            MeasurementBatch(batch_index=index, rows=_rows(number * 400 + index * 100),
                             is_last=index == 3)
            for index in range(4)
        ]  # fmt: skip
        tally.counts["rows acknowledged"] += _NUM_ROWS * len(list(catalog.record(run, batches)))
        time.sleep(0.1)

    return act


def _predict(fleet: Fleet, tally: Tally) -> Callable[[], None]:
    predictor = PredictorClient.connect(fleet.options("predictor"))
    sizes = np.arange(1, 65, dtype=np.int64)
    draws = np.random.default_rng(3)

    def act() -> None:
        columns = {"m": sizes * draws.integers(1, 50), "n": sizes * 0 + 4096, "k": sizes * 0 + 4096}
        table = OperatorTable(
            operator="gemm", dtype=DType.BF16, phase=Phase.FORWARD, columns=columns
        )
        begun_s = time.perf_counter()
        predictor.predict(LatencyQuery(device="a30", tables=(table,)))
        elapsed_ms = 1e3 * (time.perf_counter() - begun_s)
        (tally.busy_ms if tally.num_searching else tally.quiet_ms).append(elapsed_ms)
        tally.counts["predictions"] += 1
        time.sleep(0.02)

    return act


def _search(fleet: Fleet, tally: Tally) -> Callable[[], None]:
    simulator = SimulatorClient.connect(fleet.options("simulator"))

    def act() -> None:
        job = simulator.create_training_search(_SEARCH)
        tally.num_searching += 1
        try:
            watched = sum(1 for _ in simulator.watch_training_search(job.job_id))
            ended = wait_for_job(simulator, job)
        finally:
            tally.num_searching -= 1
        tally.counts[f"searches {ended.state.name.lower()}"] += 1
        tally.counts["finalists watched"] += watched
        time.sleep(1.0)

    return act


def _query(fleet: Fleet, tally: Tally) -> Callable[[], None]:
    catalog = CatalogClient.connect(fleet.options("catalog"))

    def act() -> None:
        text = "SELECT device, count(*) AS rows FROM measurements GROUP BY device"
        read_table(catalog.query_sql(SqlQuery(text=text)))
        tally.counts["queries in SQL"] += 1
        time.sleep(0.5)

    return act


def _repeat(name: str, act: Callable[[], None], tally: Tally, ends_s: float) -> None:
    while time.monotonic() < ends_s:
        try:
            act()
        except ForetokenError as err:
            tally.errors[f"{name}: {err.reason}"] += 1
            time.sleep(0.2)


def _sample(fleet: Fleet, tally: Tally, ends_s: float) -> None:
    while time.monotonic() < ends_s:
        for name, pid in fleet.pids.items():
            if (held := Held.by(pid)) is not None:
                tally.samples.setdefault(name, []).append(held)
        time.sleep(_SAMPLE_S)


def _train(fleet: Fleet) -> None:
    with (
        CatalogClient.connect(fleet.options("catalog")) as catalog,
        PredictorClient.connect(fleet.options("predictor")) as predictor,
    ):
        run = Run(run_id="first", kind=RunKind.IMPORT, tool="soak", content_hash="first")
        batches = [
            MeasurementBatch(batch_index=index, rows=_rows(100 * index), is_last=index == 9)
            for index in range(10)
        ]
        list(catalog.record(run, batches))
        wait_for_job(predictor, predictor.create_training(TrainRequest()))


def _percentile(values: list[float], ratio: float) -> float:
    return float(np.quantile(values, ratio)) if values else float("nan")


def _print(fleet: Fleet, tally: Tally) -> None:
    for name, number in sorted(tally.counts.items()):
        print(f"{name:28} {number:>10,}")
    print(f"{'errors':28} {dict(tally.errors) or 'none'}")
    for name, values in (("searches run", tally.busy_ms), ("none does", tally.quiet_ms)):
        p50, p99 = _percentile(values, 0.5), _percentile(values, 0.99)
        print(
            f"predictions while {name:12} p50 {p50:6.1f} ms, p99 {p99:6.1f} ms of {len(values):,}"
        )
    for name, samples in tally.samples.items():
        part = max(len(samples) // 4, 1)
        begin, end = samples[part : 2 * part] or samples, samples[-part:]
        for what in ("memory_mb", "num_threads", "num_files"):
            first, last = (
                statistics.mean(getattr(held, what) for held in some) for some in (begin, end)
            )
            print(f"{name:10} {what:12} {first:8.1f} then {last:8.1f}, {last / first:.2f} times")
    with CatalogClient.connect(fleet.options("catalog")) as catalog:
        selection = MeasurementFilter(include_flagged=True)
        stored = sum(batch.num_rows for batch in catalog.read_measurements(selection))
    lost = tally.counts["rows acknowledged"] + 10 * _NUM_ROWS - stored
    print(f"rows stored {stored:,}; of those acknowledged {max(lost, 0):,} are lost")


def main() -> None:
    """Load four services for so many seconds and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--faults", action="store_true", help="kill a service every 20 s")
    chosen = parser.parse_args()
    tally = Tally()
    with (
        tempfile.TemporaryDirectory(prefix="foretoken-soak-") as name,
        closing(Fleet(Path(name))) as fleet,
    ):
        _train(fleet)
        ends_s = time.monotonic() + chosen.seconds
        kinds = {"record": _record, "predict": _predict, "search": _search, "query": _query}
        threads = [
            threading.Thread(target=_repeat, args=(kind, make(fleet, tally), tally, ends_s))
            for kind, make in kinds.items()
        ]
        threads.append(threading.Thread(target=_sample, args=(fleet, tally, ends_s)))
        for thread in threads:
            thread.start()
        for victim in itertools.cycle(_SERVICES):
            if not chosen.faults or time.monotonic() + 20.0 > ends_s:
                break
            time.sleep(20.0)
            fleet.kill(victim)
            tally.counts[f"kills of the {victim}"] += 1
        for thread in threads:
            thread.join()
        _print(fleet, tally)


if __name__ == "__main__":
    main()
