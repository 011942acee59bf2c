"""A notebook's worth of calls to the public front: here and at an address, awaited or not."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import foretoken
from foretoken.app.cli.main import app
from foretoken.app.config import SERVICES, AppConfig, ServerConfig
from foretoken.app.serve import start_server
from foretoken.domain.errors import CancelledJobError

_GEMM = {"m": 1024, "n": 4096, "k": 4096}
_LONG = foretoken.ServingScenario(
    model="tiny-llama",
    device="a30",
    workload=foretoken.WorkloadSpec(num_requests=2_000_000, rate_rps=1000.0),
)


@pytest.fixture(scope="module", params=["embedded", "grpc"])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """Where the services are: in a folder of this process, or at an address."""
    home = str(tmp_path_factory.mktemp("home"))
    if request.param == "embedded":
        yield "home", home
        return
    config = ServerConfig(port=0, metrics_port=-1, grace_s=0.1)
    server = start_server(SERVICES, AppConfig(home=home, server=config))
    yield "address", f"127.0.0.1:{server.port}"
    server.stop(config)


def _open(place: tuple[str, str]) -> foretoken.Foretoken:
    kind, where = place
    return foretoken.open(where) if kind == "home" else foretoken.connect(where)


def _open_async(place: tuple[str, str]) -> foretoken.AsyncForetoken:
    kind, where = place
    return foretoken.open_async(where) if kind == "home" else foretoken.connect_async(where)


def test_a_notebook(place: tuple[str, str], tmp_path: Path) -> None:
    with _open(place) as ft:
        # One operator, with its interval and what it rests on.
        estimate = ft.predict("gemm", device="a30", **_GEMM)
        assert estimate.low_us < estimate.latency_us < estimate.high_us
        assert foretoken.Provenance.ANALYTICAL is estimate.provenance

        # A deployment, by the name of a model.
        workload = foretoken.WorkloadSpec(
            rate_rps=50.0, num_requests=20, decode=foretoken.LengthSpec(mean=16)
        )
        scenario = foretoken.ServingScenario(model="tiny-llama", device="a30", workload=workload)
        serving = ft.simulate_serving(scenario)
        assert 20 == serving.num_completed
        assert repr(serving).startswith("<ServingReport: serving: tiny-llama on 1 a30: ")
        assert "TTFT p99" in serving._repr_html_()
        assert 20 == serving.to_arrow("requests").num_rows == serving.to_arrow().num_rows
        assert 20 == len(serving.to_dict()["requests"]["arrival_s"])
        assert serving.ttft_ms.p99 == serving.to_arrow("summary")["ttft_ms.p99"].to_pylist()[0]

        # A training step, and what the command line writes of it.
        training = ft.simulate_training(
            foretoken.TrainingScenario(model="tiny-llama", device="a30", sequence_length=256)
        )
        page = training.save(tmp_path / "page.html")
        _wait_until_kept(ft, training.job_id)
        assert training == ft.get_result(training.job_id)
    assert _page_of_the_command(place, training.job_id, tmp_path) == page.read_text()


def test_a_notebook_awaited(place: tuple[str, str]) -> None:
    async def notebook() -> None:
        told: list[foretoken.Job] = []
        async with _open_async(place) as ft:
            # Calls of one kind under way at once.
            short, long = await asyncio.gather(
                ft.predict("gemm", device="a30", m=1, n=4096, k=4096),
                ft.predict("gemm", device="a30", **_GEMM),
            )
            assert short.latency_us < long.latency_us
            step = await ft.simulate_training(
                foretoken.TrainingScenario(model="tiny-llama", device="a30", sequence_length=512),
                on_progress=told.append,
            )
            assert step.feasibility.is_feasible
            assert {step.job_id} == {job.job_id for job in told}

    asyncio.run(notebook())


@pytest.mark.slow
def test_leaving_an_awaited_call_cancels_its_job(place: tuple[str, str]) -> None:
    async def leave() -> foretoken.Job:
        async with _open_async(place) as ft:
            begun: asyncio.Future[foretoken.Job] = asyncio.get_running_loop().create_future()

            def tell(job: foretoken.Job) -> None:
                if not begun.done():
                    begun.set_result(job)

            call = asyncio.create_task(ft.simulate_serving(_LONG, on_progress=tell))
            job = await begun
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            return await ft.run(lambda: _last_state(ft.foretoken, job.job_id))

    assert "CANCELLED" == asyncio.run(leave()).state.name


def test_a_job_that_another_cancels_is_an_error(place: tuple[str, str]) -> None:
    with _open(place) as ft, pytest.raises(CancelledJobError):
        ft.simulate_serving(_LONG, lambda job: ft.simulator.cancel_job(job.job_id))


def _wait_until_kept(ft: foretoken.Foretoken, job_id: str) -> None:
    """A result is kept after its job has succeeded."""
    deadline_s = time.monotonic() + 60
    while job_id not in {result.job_id for result in ft.list_results()}:
        assert time.monotonic() < deadline_s, f"{job_id} is not kept"


def _last_state(ft: foretoken.Foretoken, job_id: str) -> foretoken.Job:
    *_, last = ft.simulator.watch_job(job_id)
    return last


def _page_of_the_command(place: tuple[str, str], job_id: str, folder: Path) -> str:
    """Return the page that `foretoken results show` writes."""
    kind, where = place
    path = folder / "again.html"
    options = ["--home", where] if kind == "home" else ["--endpoint", f"catalog={where}"]
    done = CliRunner().invoke(app, [*options, "results", "show", job_id, "--page", str(path)])
    assert 0 == done.exit_code, done.output
    return path.read_text()
