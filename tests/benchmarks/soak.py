"""Everything at once for long: recordings, predictions, searches, SQL and watches on services.

Prints the p99 of predictions while searches run, next to that of a predictor that does nothing else
and is asked in turn, by a process of its own; and what each process holds at the beginning and at
the end: memory, threads, descriptors. With --faults something goes wrong every 20 s: a service is
killed, the catalog stands still as on a disk that does not answer, its disk is full (as root, who
can mount one), or its clock jumps (where libfaketime is installed). What was acknowledged is
counted at the end. All is on loopback.
"""

import argparse
import itertools
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from foretoken.client.channel_options import ChannelOptions
from foretoken.client.job_wait import wait_for_job
from foretoken.client.services import CatalogClient, PredictorClient, SimulatorClient
from foretoken.domain.errors import ForetokenError
from foretoken.domain.measurements.estimate import DType, LatencyQuery, OperatorTable, Phase
from foretoken.domain.measurements.latency_models import TrainRequest
from foretoken.domain.measurements.measurement import (
    MeasurementBatch,
    MeasurementFilter,
    Run,
    RunKind,
    SqlQuery,
)
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import TrainingSearchRequest
from foretoken.wire.arrow import read_table, rows_to_table

_SERVICES = ("catalog", "predictor", "simulator")
# A predictor that answers the measurement alone.
_IDLE = "idle"
_FAULT_S = 20.0
# How long the catalog stands still, and how long its disk is full.
_STALL_S, _FULL_S = 5.0, 8.0
_DISK_BYTES = 256 * 2**20
# What its clock is set to, in s from the right one.
_JUMPS_S = (3600, -3600, 0)
_FAKE_CLOCK = "*/faketime/libfaketimeMT.so.1"
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
        names = (*_SERVICES, _IDLE)
        self._ports = {name: _free_port() for name in names}
        self.address = {name: f"127.0.0.1:{port}" for name, port in self._ports.items()}
        self._clock = folder / "clock"
        self._clock.write_text("+0", encoding="ascii")
        self._fake_clock = next(Path("/usr/lib").glob(_FAKE_CLOCK), None)
        for name in names:
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
        service = "predictor" if name == _IDLE else name
        others = {other: self.address[other] for other in _SERVICES if other < service}
        config = {
            "home": str(self._folder / name),
            "endpoints": others,
            "server": {"port": self._ports[name], "metrics_port": -1},
            "log": {"level": "ERROR"},
            "catalog": {"num_threads": 1} if name == "catalog" else {},
            "predictor": {
                "shares_jobs": name != _IDLE,
                "job_lease_s": 5.0,
                "starter": "",
                "train_on_demand": False,
            },
            "simulator": {"shares_jobs": True, "job_lease_s": 5.0, "num_search_workers": 1},
        }
        path = self._folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        command = [sys.executable, "-m", "foretoken.app", "--config", str(path), "serve", service]
        clock = {}
        if name == "catalog" and self._fake_clock is not None:
            clock = {
                "LD_PRELOAD": str(self._fake_clock),
                "FAKETIME_TIMESTAMP_FILE": str(self._clock),
                "FAKETIME_NO_CACHE": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                "DONT_FAKE_MONOTONIC": "1",
            }
        said = ""
        # What a killed one had started ends a moment later, and has its files open until then.
        while not said.startswith("serving "):
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True, env={**os.environ, **clock}
            )
            assert process.stdout is not None
            said = process.stdout.readline()
        self._processes[name] = process

    def kill(self, name: str) -> None:
        """Kill a service in the middle of all, and start it again."""
        with self._processes[name] as process:
            process.kill()
        self._start(name)

    def stall(self) -> None:
        """Let the catalog stand still for some seconds, as where its disk does not answer."""
        process = self._processes["catalog"]
        process.send_signal(signal.SIGSTOP)
        time.sleep(_STALL_S)
        process.send_signal(signal.SIGCONT)

    def fill_disk(self) -> None:
        """Leave the catalog no room for some seconds."""
        path = self._folder / "catalog" / "filler"
        try:
            with path.open("wb", buffering=0) as file, suppress(OSError):
                while file.write(b"\0" * 2**16):
                    pass
            time.sleep(_FULL_S)
        finally:
            path.unlink(missing_ok=True)

    def jump(self, seconds: int) -> None:
        """Set the catalog's clock."""
        self._clock.write_text(f"{seconds:+d}", encoding="ascii")

    def faults(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield what may go wrong here, over and over: its name, and what brings it about."""
        jumps = itertools.cycle(_JUMPS_S)
        while True:
            for name in _SERVICES:
                yield f"kills of the {name}", partial(self.kill, name)
            yield "catalogs that stood still", self.stall
            if os.path.ismount(self._folder / "catalog"):
                yield "full disks", self.fill_disk
            if self._fake_clock is not None:
                yield "jumps of the clock", partial(self.jump, next(jumps))

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
    idle_ms: list[float] = field(default_factory=list)
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


def _query_of_64(draws: np.random.Generator) -> LatencyQuery:
    sizes = np.arange(1, 65, dtype=np.int64)
    columns = {"m": sizes * draws.integers(1, 50), "n": sizes * 0 + 4096, "k": sizes * 0 + 4096}
    table = OperatorTable(operator="gemm", dtype=DType.BF16, phase=Phase.FORWARD, columns=columns)
    return LatencyQuery(device="a30", tables=(table,))


def _measure(addresses: list[str]) -> None:
    """Ask predictors in turn, and print which and how many ms, or what went wrong, until killed."""
    clients = [
        PredictorClient.connect(ChannelOptions(address=address, reconnect_delay_s=0.1))
        for address in addresses
    ]
    draws = np.random.default_rng(3)
    while True:
        for place, predictor in enumerate(clients):
            query = _query_of_64(draws)
            begun_s = time.perf_counter()
            try:
                predictor.predict(query)
                found = f"{1e3 * (time.perf_counter() - begun_s):.3f}"
            except ForetokenError as err:
                found = err.reason
            print(place, found, flush=True)
        time.sleep(0.02)


def _watch_predictions(fleet: Fleet, tally: Tally, ends_s: float) -> None:
    """Take note of what a process of its own measures, which no other client here holds up."""
    command = [sys.executable, __file__, "--measure"]
    command += [fleet.address["predictor"], fleet.address[_IDLE]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            place, found = line.split()
            if not found[0].isdigit():
                tally.errors[f"predict: {found}"] += 1
            elif place == "1":
                tally.idle_ms.append(float(found))
            else:
                (tally.busy_ms if tally.num_searching else tally.quiet_ms).append(float(found))
                tally.counts["predictions"] += 1
            if time.monotonic() > ends_s:
                break
        process.kill()


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
    asked = {
        "searches run": tally.busy_ms,
        "none does": tally.quiet_ms,
        "another works": tally.idle_ms,
    }
    for name, values in asked.items():
        p50, p99 = _percentile(values, 0.5), _percentile(values, 0.99)
        print(
            f"predictions while {name:13} p50 {p50:6.1f} ms, p99 {p99:6.1f} ms of {len(values):,}"
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


@contextmanager
def _small_disk(path: Path) -> Iterator[None]:
    """Mount a disk in memory at a folder, where that is allowed."""
    path.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "soak", str(path)]
    mounted = subprocess.run(["/bin/mount", *options], capture_output=True, check=False)
    try:
        yield
    finally:
        if mounted.returncode == 0:
            subprocess.run(["/bin/umount", "--lazy", str(path)], check=False)


def _load(fleet: Fleet, seconds: float, *, has_faults: bool) -> Tally:
    """Let all clients work for so long, and return what they did."""
    tally = Tally()
    ends_s = time.monotonic() + seconds
    kinds = {"record": _record, "search": _search, "query": _query}
    threads = [
        threading.Thread(target=_repeat, args=(kind, make(fleet, tally), tally, ends_s))
        for kind, make in kinds.items()
    ]
    threads += [
        threading.Thread(target=observe, args=(fleet, tally, ends_s))
        for observe in (_sample, _watch_predictions)
    ]
    for thread in threads:
        thread.start()
    for name, bring_about in fleet.faults():
        if not has_faults or time.monotonic() + _FAULT_S > ends_s:
            break
        time.sleep(_FAULT_S)
        bring_about()
        tally.counts[name] += 1
    for thread in threads:
        thread.join()
    return tally


def main() -> None:
    """Load services for so many seconds and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--faults", action="store_true", help="something goes wrong every 20 s")
    parser.add_argument("--measure", nargs=2, help="only measure two predictors, by address")
    chosen = parser.parse_args()
    if chosen.measure:
        _measure(chosen.measure)
        return
    with ExitStack() as closing_all:
        scratch = tempfile.TemporaryDirectory(prefix="foretoken-soak-")
        folder = Path(closing_all.enter_context(scratch))
        closing_all.enter_context(_small_disk(folder / "catalog"))
        fleet = closing_all.enter_context(closing(Fleet(folder)))
        _train(fleet)
        _print(fleet, _load(fleet, chosen.seconds, has_faults=chosen.faults))


if __name__ == "__main__":
    main()
