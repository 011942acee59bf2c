"""The four services as processes of their own: what `foretoken demo` and a deployment rely on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from foretoken.app.compose import Composition
from foretoken.app.demo import ServiceProcesses, _serving, _training
from foretoken.domain.measurements.estimate import DType, Provenance
from foretoken.domain.measurements.profiling import ProfileRequest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_SERVICES = ("catalog", "predictor", "simulator", "profiler")


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composition]:
    home = tmp_path_factory.mktemp("home")
    with ServiceProcesses(home) as processes, Composition(processes.client_config) as composition:
        yield composition


def test_profile_train_predict_simulate(services: Composition) -> None:
    """The main job: every service answers another over gRPC."""
    foretoken = services.foretoken(*_SERVICES)
    request = ProfileRequest(device="cpu", operators=("rms_norm", "silu_mul"), quick=True)
    # What a busy machine disturbed is flagged, and nothing learns from it. Another profile
    # measures it again.
    for attempt in range(5):
        profiled = foretoken.profile(replace(request, name=f"attempt-{attempt}"))
        assert profiled.num_measured > 0
        assert profiled.num_failed == 0
        covered = {entry.operator: entry for entry in foretoken.coverage()}
        assert set(covered) == {"rms_norm", "silu_mul"}
        if covered["rms_norm"].num_flagged < covered["rms_norm"].num_rows:
            break

    trained = foretoken.train()
    assert trained.num_rows > 0
    estimate = foretoken.predict(
        "rms_norm", device="cpu", dtype=DType.FP32, num_tokens=64, hidden=1024
    )
    assert estimate.provenance in (Provenance.MEASURED, Provenance.INTERPOLATED)
    assert estimate.low_us <= estimate.latency_us <= estimate.high_us
    assert estimate.model_version == trained.model_version

    workload = replace(_serving().workload, num_requests=20, rate_rps=5.0)
    serving = foretoken.simulate_serving(replace(_serving(), workload=workload))
    assert serving.num_completed == 20
    assert serving.model_version == trained.model_version
    # Only two operators were profiled: the rest must say that it is analytical.
    assert serving.step_time_ratio_by_provenance["analytical"] > 0

    step = foretoken.simulate_training(_training())
    assert step.feasibility.is_feasible
    assert step.step_time_low_ms <= step.step_time_ms <= step.step_time_high_ms
    # The simulator keeps its results in the catalog, a third process, for which no caller waits.
    for _ in range(300):
        kept = {result.job_id for result in foretoken.list_results()}
        if len(kept) == 2:
            break
        time.sleep(0.1)
    assert kept == {serving.job_id, step.job_id}
    assert foretoken.get_result(step.job_id) == step


@pytest.mark.parametrize("stop_signal", [signal.SIGTERM, signal.SIGINT])
def test_a_service_stops_gracefully(tmp_path: Path, stop_signal: signal.Signals) -> None:
    command = [
        sys.executable, "-m", "foretoken.app", "--home", str(tmp_path),
        "serve", "catalog", "--port", "0", "--metrics-port", "-1",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("serving 127.0.0.1:")
        process.send_signal(stop_signal)
        assert process.wait(timeout=15) == 0


def test_interrupting_the_demo_leaves_no_process(tmp_path: Path) -> None:
    """Ctrl-C half way: every service the demo started is gone."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    words = ("demo", "--cpu-only", "--report", str(tmp_path / "r.html"))
    command = [sys.executable, "-m", "foretoken.app", *words]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        children = _wait_for_children(process.pid, count=4)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) != 0
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
    assert list(tmp_path.iterdir()) == []


def _wait_for_children(pid: int, count: int) -> list[int]:
    children_file = Path(f"/proc/{pid}/task/{pid}/children")
    if not children_file.exists():
        pytest.skip("this kernel does not list a process's children")
    for _ in range(600):
        children = [int(word) for word in children_file.read_text().split()]
        if len(children) >= count:
            return children
        time.sleep(0.1)
    pytest.fail("the demo did not start its services")
