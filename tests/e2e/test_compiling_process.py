"""A process that waits for the compiler of the serving engine ends when it is asked to."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from foretoken.client.channel_options import ChannelOptions
from foretoken.client.services import SimulatorClient
from foretoken.domain.job import JobState
from foretoken.domain.requests.scenario import ServingScenario

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_COMPILING = "compile the engine, once on this machine"


def test_a_server_that_compiles_ends_when_asked_to(tmp_path: Path) -> None:
    """A simulation's job is cancelled; the compiler, which nothing interrupts, goes with it."""
    code = tmp_path / "code"
    command = [
        sys.executable, "-m", "foretoken.app", "--home", str(tmp_path / "home"),
        "serve", "predictor", "simulator", "--port", "0", "--metrics-port", "-1",
    ]  # fmt: skip
    # Nothing was compiled before.
    environment = {
        **os.environ, "NUMBA_CACHE_DIR": str(code), "FORETOKEN_SERVER__GRACE_S": "0.1"
    }  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        address = process.stdout.readline().removeprefix("serving ").strip()
        with SimulatorClient.connect(ChannelOptions(address=address)) as client:
            scenario = ServingScenario(model="llama-3.1-8b", device="a30")  # type: ignore[arg-type]
            job = client.create_serving_simulation(scenario)
            seen = next(each for each in client.watch_job(job.job_id) if each.message == _COMPILING)
        process.send_signal(signal.SIGTERM)
        assert 0 == process.wait(timeout=60)
    assert JobState.RUNNING is seen.state
    assert [] == list(code.rglob("kernel.run_slice*.nbi"))
