"""A simulator that is killed in the middle of a search: the next one finishes it."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from foretoken.client.services import SimulatorClient
from foretoken.domain.errors import ServiceUnavailableError
from foretoken.domain.job import JobState
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import (
    Finalist,
    LatencyLimit,
    ServingSearchReport,
    ServingSearchRequest,
    ServingSpace,
    ServingTargets,
)
from foretoken.domain.requests.workload import LengthSpec, WorkloadSpec

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Enough to simulate that the first being done is not nearly all.
_BATCHES = (6, 8, 10, 12, 14, 16)
_REQUEST = ServingSearchRequest(
    scenario=ServingScenario(
        model=find_model("llama-3.1-8b"),
        device="h100_sxm",
        workload=WorkloadSpec(
            num_requests=200, prefill=LengthSpec(mean=500), decode=LengthSpec(mean=240)
        ),
    ),
    space=ServingSpace(max_devices=4, modes=("aggregated",), tp=(1, 2, 4), max_num_seqs=_BATCHES),
    targets=ServingTargets(limits=(LatencyLimit(metric="tpot_ms", percentile=0, limit_ms=60.0),)),
    num_finalists=18,
)
_ITEMS = re.compile(r"search items job_id=(\S+) kept=(\d+) done=(\d+)")


@contextmanager
def _serve(home: Path, log: Path) -> Iterator[tuple["subprocess.Popen[str]", SimulatorClient]]:
    """Serve a simulator over an untrained predictor; it takes up searches when it starts."""
    command = [
        sys.executable, "-m", "foretoken.app", "--home", str(home),
        "serve", "catalog", "predictor", "simulator", "--port", "0", "--metrics-port", "-1",
    ]  # fmt: skip
    environment = {
        **os.environ,
        "FORETOKEN_SIMULATOR__RESUMES_AT_START": "true",
        "FORETOKEN_SIMULATOR__NUM_SEARCH_WORKERS": "2",
    }
    with (
        log.open("a", encoding="utf-8") as file,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=file, text=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            address = process.stdout.readline().removeprefix("serving ").strip()
            assert address, log.read_text("utf-8")
            with SimulatorClient.connect(address) as client:
                yield process, client
        finally:
            process.terminate()
            process.wait(30)


def _comparable(report: ServingSearchReport) -> tuple[ServingSearchReport, list[Finalist]]:
    """Return what does not depend on when and where it was computed."""
    kept = replace(report, job_id="", cpu_s=0.0, wall_s=0.0, finalists=())
    return kept, sorted(report.finalists, key=lambda finalist: finalist.candidate)


def test_a_killed_simulator_s_search_is_finished_by_the_next(tmp_path: Path) -> None:
    """With the report of a search that nobody killed; and no item that was kept is done again."""
    home, log = tmp_path / "home", tmp_path / "log"
    with _serve(home, log) as (process, client):
        job = client.create_serving_search(_REQUEST)
        # Until one is done: some of the simulations, but not all.
        next(iter(client.watch_serving_search(job.job_id)))
        process.kill()
        process.wait()
        with pytest.raises(ServiceUnavailableError):
            client.get_job(job.job_id)
    assert [] == _ITEMS.findall(log.read_text("utf-8"))

    with _serve(home, log) as (_, client):
        seen = list(client.watch_serving_search(job.job_id))
        assert JobState.SUCCEEDED is list(client.watch_job(job.job_id))[-1].state
        report = client.get_serving_search_report(job.job_id)
        # Another job with the same question, from the start: that one has ended.
        again = client.create_serving_search(_REQUEST)
        assert again.job_id != job.job_id
        assert JobState.SUCCEEDED is list(client.watch_job(again.job_id))[-1].state
        whole = client.get_serving_search_report(again.job_id)

    assert _comparable(whole) == _comparable(report)
    assert sorted(f.candidate for f in seen) == sorted(f.candidate for f in report.finalists)
    items = {found[0]: (int(found[1]), int(found[2])) for found in _ITEMS.findall(log.read_text())}
    kept, done = items[job.job_id]
    assert min(kept, done) >= 1
    assert (0, kept + done) == items[again.job_id]
