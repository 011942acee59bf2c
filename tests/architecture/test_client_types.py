"""mypy knows the methods of both clients, which are made of lines of the table of rpcs."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

_USE = """
from collections.abc import AsyncIterator
from typing import assert_type

from foretoken.client.services import AsyncCatalogClient
from foretoken.client.services import AsyncSimulatorClient
from foretoken.client.services import CatalogClient
from foretoken.client.services import PredictorClient
from foretoken.client.services import ProfilerClient
from foretoken.client.services import SimulatorClient
from foretoken.domain.job import Job
from foretoken.domain.measurements.measurement import (
    BatchReceipt,
    Coverage,
    MeasurementFilter,
    Run,
    Snapshot,
)
from foretoken.domain.ports import CatalogAdminPort, PredictorPort, ProfilerPort, SimulatorPort
from foretoken.domain.results.report import ServingReport
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import Finalist


def ports(
    catalog: CatalogClient,
    profiler: ProfilerClient,
    predictor: PredictorClient,
    simulator: SimulatorClient,
) -> tuple[CatalogAdminPort, ProfilerPort, PredictorPort, SimulatorPort]:
    return catalog, profiler, predictor, simulator


def blocking(catalog: CatalogClient, simulator: SimulatorClient, wanted: ServingScenario) -> None:
    assert_type(simulator.create_serving_simulation(wanted), Job)
    assert_type(simulator.list_jobs(), tuple[Job, ...])
    assert_type(catalog.create_snapshot(MeasurementFilter(), holder="me"), Snapshot)
    for finalist in simulator.watch_serving_search("job", first=2):
        assert_type(finalist, Finalist)
    simulator.get_serving_report(job="job")  # WRONG
    simulator.get_serving_report(1)  # WRONG
    catalog.describe_coverages()  # WRONG


async def awaited(catalog: AsyncCatalogClient, simulator: AsyncSimulatorClient, run: Run) -> None:
    assert_type(await simulator.get_serving_report("job"), ServingReport)
    assert_type(await catalog.describe_coverage(), tuple[Coverage, ...])
    assert_type(simulator.watch_serving_search("job"), AsyncIterator[Finalist])
    async for receipt in catalog.record(run, ()):
        assert_type(receipt, BatchReceipt)
    await simulator.get_serving_report()  # WRONG
"""


def test_types_of_clients_are_those_of_their_ports(repository: Path, tmp_path: Path) -> None:
    use = tmp_path / "use.py"
    use.write_text(_USE, encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", str(use)],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    expected = [number for number, line in enumerate(_USE.splitlines(), 1) if "# WRONG" in line]
    found = [int(line.split(":")[1]) for line in ended.stdout.splitlines() if ": error:" in line]
    assert expected == found, ended.stdout
