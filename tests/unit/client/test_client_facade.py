"""The facade: queries of one call, waiting, progress, interruption, streams that break."""

import dataclasses
import json
from collections.abc import Iterator

import numpy as np
import pytest

from foretoken.client.channel_options import ChannelOptions
from foretoken.client.facade import Foretoken
from foretoken.client.job_wait import wait_for_job
from foretoken.client.retries import LossCount
from foretoken.client.single_query import CallOptions, build_single_query
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError, QueueFullError, ServiceUnavailableError
from foretoken.domain.job import Job, JobState
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyReply,
    Phase,
    Provenance,
    pick_estimate,
)


class _Jobs:
    """Jobs whose states are a list."""

    def __init__(self, states: list[JobState]) -> None:
        self.states = states
        self.cancelled: list[str] = []

    def get_job(self, job_id: str) -> Job:
        return Job(job_id=job_id, kind="test", state=self.states[-1])

    def list_jobs(self) -> tuple[Job, ...]:
        return ()

    def watch_job(self, job_id: str) -> Iterator[Job]:
        for state in self.states:
            yield Job(job_id=job_id, kind="test", state=state)

    def cancel_job(self, job_id: str) -> Job:
        self.cancelled.append(job_id)
        return self.get_job(job_id)


_JOB = Job(job_id="j", kind="test", state=JobState.QUEUED)


def test_waiting_tells_every_state_and_returns_the_last() -> None:
    jobs = _Jobs([JobState.RUNNING, JobState.SUCCEEDED])
    seen: list[JobState] = []
    last = wait_for_job(jobs, _JOB, lambda job: seen.append(job.state))
    assert (last.state, seen) == (JobState.SUCCEEDED, jobs.states)
    assert jobs.cancelled == []


def test_an_interruption_cancels_the_job() -> None:
    """Ctrl-C must not leave a machine busy with what nobody waits for."""
    jobs = _Jobs([JobState.RUNNING, JobState.SUCCEEDED])

    def interrupt(_job: Job) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wait_for_job(jobs, _JOB, interrupt)
    assert jobs.cancelled == ["j"]


def test_an_interruption_stays_one_when_the_service_is_gone() -> None:
    """Who pressed Ctrl-C must not read about a connection instead."""

    class _Gone(_Jobs):
        def cancel_job(self, job_id: str) -> Job:
            raise ServiceUnavailableError(f"no service for {job_id}")

    def interrupt(_job: Job) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wait_for_job(_Gone([JobState.RUNNING]), _JOB, interrupt)


@pytest.mark.parametrize("name", ["catalog", "profiler", "predictor", "simulator"])
def test_a_service_that_was_not_given_is_named(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        getattr(Foretoken(), name)
    assert [name] == [violation.field for violation in caught.value.violations]


def test_a_misspelt_dtype_names_those_there_are() -> None:
    with pytest.raises(InvalidRequestError, match="bf16"):
        Foretoken().predict("gemm", device="a30", dtype="bfloat16", m=1, n=1, k=1)


def test_connecting_sends_nothing() -> None:
    """Addresses are looked up with the first call, so services may start later."""
    with Foretoken.connect(catalog="127.0.0.1:1", predictor="127.0.0.1:1") as foretoken:
        assert foretoken.catalog is not None
        assert foretoken.predictor is not None


def test_every_option_reaches_the_query() -> None:
    """A new option that were forgotten here would do nothing, silently."""
    options = CallOptions(
        variant="quant=fp8_block",
        kernel="cublas",
        topology="a100_dgx",
        framework="vllm",
        refuse_extrapolation=True,
        model_version="v1",
        prefer_measured=True,
        correction="mine",
    )
    query = build_single_query(
        "gemm", {"m": 1}, device="a30", dtype="FP16", phase="backward", options=options
    )
    (table,) = query.tables
    assert (DType.FP16, Phase.BACKWARD, {"m": [1]}) == (table.dtype, table.phase, table.columns)
    found = {
        field.name: getattr(table if hasattr(table, field.name) else query, field.name)
        for field in dataclasses.fields(options)
    }
    assert dataclasses.asdict(options) == found
    assert all(found.values())


def _reply(nearest_octaves: float) -> LatencyReply:
    columns = LatencyColumns(
        latency_us=np.array([1.0, 3.0]),
        low_us=np.array([0.5, 2.0]),
        high_us=np.array([2.0, 6.0]),
        provenance=np.array([Provenance.MEASURED.value, Provenance.EXTRAPOLATED.value]),
        nearest={"m": np.array([1, 64])},
        nearest_us=np.array([1.0, 2.5]),
        nearest_octaves=np.array([0.0, nearest_octaves]),
        basis="64 points",
        correction_factor=1.5,
    )
    return LatencyReply(model_version="v1", tables=(columns,))


def test_one_row_of_a_reply_is_an_estimate() -> None:
    found = pick_estimate(_reply(1.0), row=1)
    assert (3.0, 2.0, 6.0, Provenance.EXTRAPOLATED, "v1", "64 points") == (
        found.latency_us,
        found.low_us,
        found.high_us,
        found.provenance,
        found.model_version,
        found.basis,
    )
    assert ({"m": 64}, 2.5, 1.0) == (found.nearest, found.nearest_us, found.nearest_octaves)
    assert 2.0 == found.raw_latency_us


def test_what_was_not_measured_has_no_nearest_point() -> None:
    """Infinitely far is no number in JSON."""
    found = pick_estimate(_reply(np.inf), row=1)
    assert ({}, 0.0, 0.0) == (found.nearest, found.nearest_us, found.nearest_octaves)
    json.dumps(schema.encode(found), allow_nan=False)


_OPTIONS = ChannelOptions(address="localhost:1", max_reconnects=3, reconnect_delay_s=0.5)


def _lose(losses: LossCount, num_times: int) -> None:
    for _ in range(num_times):
        losses.add(ServiceUnavailableError("gone"))


@pytest.mark.parametrize("error", [ServiceUnavailableError("gone"), QueueFullError("full")])
def test_a_stream_may_break_so_often_in_a_row_and_no_more(
    error: ServiceUnavailableError | QueueFullError,
) -> None:
    losses = LossCount(_OPTIONS)
    _lose(losses, 3)
    with pytest.raises(type(error)) as caught:
        losses.add(error)
    assert caught.value is error


def test_losses_before_something_arrived_do_not_count() -> None:
    losses = LossCount(_OPTIONS)
    for _ in range(2):
        _lose(losses, 3)
        losses.forget()
    _lose(losses, 3)
    with pytest.raises(ServiceUnavailableError):
        _lose(losses, 1)


def test_the_wait_doubles_with_every_loss_in_a_row() -> None:
    losses = LossCount(_OPTIONS)
    waits = []
    for _ in range(3):
        _lose(losses, 1)
        waits.append(losses.delay_s)
    assert all(
        doubled <= wait <= 1.5 * doubled
        for doubled, wait in zip([0.5, 1.0, 2.0], waits, strict=True)
    )
    losses.forget()
    _lose(losses, 1)
    assert 0.5 <= losses.delay_s <= 0.75
