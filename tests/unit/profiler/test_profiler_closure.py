"""Whole steps of small models on the CPU."""

import json
import threading
from typing import Any

import pytest
import torch
from closure_models import config_json
from hypothesis import given
from hypothesis import strategies as st
from profiler_fakes import HASTY, FakeCatalog

from foretoken.domain import schema
from foretoken.domain.errors import (
    CancelledJobError,
    CatalogBusyError,
    InvalidRequestError,
    ServiceUnavailableError,
)
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.measurements.profiling import ClosureReport, ClosureRequest, ClosureStep
from foretoken.domain.models.architecture import find_model
from foretoken.jobs.runner import JobProgress
from foretoken.profiler.closure.measuring import measure_closure
from foretoken.profiler.closure.step_program import choose_steps, make_filled_cache, step_bytes
from foretoken.profiler.local_device import LocalDevice

pytest.importorskip("transformers")

_CPU = LocalDevice(name="cpu", torch_name="cpu")
_STEPS = tuple(
    ClosureStep(kind=kind, batch_size=2, num_tokens=8) for kind in ("prefill", "decode", "training")
)
# Fails at once where there is no CUDA device.
_GRAPH = ClosureStep(kind="decode", batch_size=1, num_tokens=4, mode="graph")


def _progress(cancel_at: float = 2.0) -> JobProgress:
    cancelled = threading.Event()

    def report(ratio: float, _message: str) -> None:
        if ratio >= cancel_at:
            cancelled.set()

    return JobProgress(report, cancelled)


def _request(model: str = "llama", **changes: Any) -> ClosureRequest:
    fields = {
        "device": "cpu",
        "model": model,
        "config_json": config_json(model),
        "steps": _STEPS,
        "dtype": DType.FP32,
        "quick": True,
        **changes,
    }
    return schema.decode(ClosureRequest, fields)


def _measure(
    request: ClosureRequest,
    progress: JobProgress | None = None,
    catalog: FakeCatalog | None = None,
) -> ClosureReport:
    return measure_closure(
        request,
        _CPU,
        catalog or FakeCatalog(),
        progress or _progress(),
        num_threads=1,
        hand_over=HASTY,
    )


@pytest.fixture(scope="module")
def measured() -> tuple[ClosureReport, FakeCatalog]:
    """Return the report of every kind of step, and what the catalog got."""
    catalog = FakeCatalog()
    return _measure(_request(num_layers=1), catalog=catalog), catalog


@pytest.mark.slow
def test_each_kind_of_step_is_timed_and_its_kernels_are_counted(
    measured: tuple[ClosureReport, FakeCatalog],
) -> None:
    """All that a CPU can tell of a step is there."""
    steps = measured[0].steps
    assert _STEPS == tuple(step.step for step in steps)
    assert {("ok", "")} == {(step.status, step.reason) for step in steps}
    assert all(
        0 < step.latency_us_p10 <= step.latency_us_median <= step.latency_us_p90 for step in steps
    )
    prefill, decode, training = steps
    assert prefill.num_kernels == decode.num_kernels > 0
    assert training.num_kernels > 2 * prefill.num_kernels


@pytest.mark.slow
def test_a_report_is_kept_as_an_artifact_and_no_row(
    measured: tuple[ClosureReport, FakeCatalog],
) -> None:
    """What is kept is the report, whole."""
    report, catalog = measured
    assert [("closure", report.name)] == list(catalog.artifacts)
    content = json.loads(catalog.artifacts["closure", report.name])
    assert {} == catalog.batches
    assert report == schema.decode(ClosureReport, content)
    assert report.architecture is not None
    assert 1 == report.architecture.num_layers
    assert ("llama", "sdpa") == tuple(
        report.environment[key] for key in ("model_type", "attention")
    )


@pytest.mark.slow
def test_what_cannot_run_is_a_failed_step_and_the_others_go_on() -> None:
    """A graph needs CUDA, and GPT-2 has no more positions than it learned."""
    steps = (
        _GRAPH,
        ClosureStep(kind="prefill", batch_size=1, num_tokens=65),
        ClosureStep(kind="decode", batch_size=1, num_tokens=64),
        ClosureStep(kind="decode", batch_size=1, num_tokens=63),
    )
    outcomes = [
        (step.status, step.reason) for step in _measure(_request("gpt2", steps=steps)).steps
    ]
    expected = [
        ("failed", "step: graphs are captured on CUDA devices alone"),
        ("failed", "step: gpt2 has 64 positions, not 65"),
        ("failed", "step: gpt2 has 64 positions, not 65"),
        ("ok", ""),
    ]
    assert expected == outcomes


def test_steps_beyond_the_time_cap_are_left_out_with_a_reason() -> None:
    """They are failed ones, not forgotten."""
    report = _measure(_request(time_cap_s=1e-9))
    assert {"left out: the cap of 1e-09 s was reached"} == {step.reason for step in report.steps}


@pytest.mark.slow
def test_a_cancelled_job_keeps_what_was_measured() -> None:
    """The step under way is finished, and stored with those before it."""
    catalog = FakeCatalog()
    request = _request(num_layers=1, steps=(_GRAPH, _STEPS[0], _STEPS[2]))
    with pytest.raises(CancelledJobError):
        _measure(request, _progress(cancel_at=0.3), catalog)
    (content,) = catalog.artifacts.values()
    found = [(step["step"]["kind"], step["status"]) for step in json.loads(content)["steps"]]
    assert [("decode", "failed"), ("prefill", "ok")] == found


def test_a_catalog_that_is_away_for_a_while_gets_the_report() -> None:
    """It is asked again until it takes the report, once."""
    catalog = FakeCatalog()
    catalog.errors = [ServiceUnavailableError("away"), CatalogBusyError("busy")]
    report = _measure(_request(num_layers=1, steps=(_GRAPH,)), catalog=catalog)
    assert [("closure", report.name)] == list(catalog.artifacts)


def test_a_cancelled_job_waits_for_no_catalog() -> None:
    """Whoever cancelled is informed, though the report is not kept."""
    catalog = FakeCatalog()
    catalog.errors = [ServiceUnavailableError("away")] * 1000
    request = _request(num_layers=1, steps=(_GRAPH, _GRAPH))
    with pytest.raises(CancelledJobError):
        _measure(request, _progress(cancel_at=0.5), catalog)
    assert {} == catalog.artifacts
    assert 999 == len(catalog.errors)


def test_formats_that_models_do_not_run_in_are_refused() -> None:
    """Quantised models are another matter."""
    with pytest.raises(InvalidRequestError, match="whole steps run in bf16, fp16, fp32"):
        _measure(_request(dtype=DType.FP8))


def test_a_filled_cache_takes_the_new_token_at_its_end() -> None:
    """Every sequence keeps its context, step after step."""
    cache = make_filled_cache(1, 5, torch.device("cpu"), seed=0)
    first = torch.full((2, 3, 1, 4), 7.0)
    keys, values = cache.update(first, first, 0)
    before = keys[:, :, :5].clone()
    assert (2, 3, 6, 4) == tuple(keys.shape) == tuple(values.shape)
    assert bool((keys[:, :, 5] == first[:, :, 0]).all())
    keys, _ = cache.update(first + 1, first, 0)
    assert bool((keys[:, :, :5] == before).all())
    assert bool((keys[:, :, 5] == first[:, :, 0] + 1).all())
    assert 5 == cache.get_seq_length()


@given(
    name=st.sampled_from(["tiny-llama", "llama-3.1-8b", "gpt2-xl", "qwen3-32b"]),
    memory_gib=st.floats(min_value=0.01, max_value=500),
    factor=st.floats(min_value=1, max_value=8),
    is_cuda=st.booleans(),
)
def test_default_steps_fit_the_memory_and_more_memory_takes_none_away(
    *, name: str, memory_gib: float, factor: float, is_cuda: bool
) -> None:
    """The steps of a smaller device are among those of a larger one."""
    model, dtype = find_model(name), DType.BF16

    def choose(memory_bytes: float, *, is_quick: bool = False) -> tuple[ClosureStep, ...]:
        return choose_steps(model, dtype, memory_bytes, is_cuda=is_cuda, is_quick=is_quick)

    memory_bytes = memory_gib * 2**30
    steps = choose(memory_bytes)
    assert all(step_bytes(model, dtype, step) <= memory_bytes for step in steps)
    assert all(step.num_tokens < model.max_position for step in steps)
    assert set(steps) <= set(choose(factor * memory_bytes))
    quick = choose(memory_bytes, is_quick=True)
    assert {step.kind for step in steps} == {step.kind for step in quick}
    assert len(quick) == len({step.kind for step in quick})
