"""Predicted steps compared with measured ones, over a predictor whose every answer is known."""

import math
from collections.abc import Mapping

import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.lowering.eager import ModelForm, lower_step
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    LatencyReply,
    OperatorTable,
    Provenance,
)
from foretoken.domain.measurements.profiling import ClosureReport, ClosureStep, MeasuredStep
from foretoken.domain.models.architecture import find_model
from foretoken.simulator.validation.steps import describe_shares, validate_steps
from foretoken.simulator.validation.steps_page import steps_sections

_MODEL = find_model("tiny-llama")
_DECODE = ClosureStep(kind="decode", batch_size=4, num_tokens=32)
# µs of every call of an operator.
_CALL_US = 2.0


class _Predictor:
    """Answers 2 µs for each call, from 1 to 4; host times by part, where it knows them."""

    def __init__(self, hosts: Mapping[str, float]) -> None:
        self._hosts = hosts

    def predict(self, query: LatencyQuery) -> LatencyReply:
        tables = tuple(self._answer(table) for table in query.tables)
        return LatencyReply(model_version="known", tables=tables)

    def _answer(self, table: OperatorTable) -> LatencyColumns:
        part = table.variant.removeprefix("part=")
        is_host = table.operator == "launch_gap"
        time_us = self._hosts.get(part, 1e6) if is_host else _CALL_US
        is_known = not is_host or part in self._hosts
        provenance = Provenance.MEASURED if is_known else Provenance.ANALYTICAL
        count = table.num_rows
        return LatencyColumns(
            latency_us=[time_us] * count,
            low_us=[time_us / 2] * count,
            high_us=[time_us * 2] * count,
            provenance=[provenance.value] * count,
            basis=f"points ({table.variant})" if is_known else "",
        )


def _report(
    *steps: ClosureStep, device: str = "cpu", measured_us: float = 1000.0, **changes: object
) -> ClosureReport:
    fields: dict[str, object] = {
        "name": "r",
        "device": device,
        "model": "tiny-llama",
        "architecture": _MODEL,
        "dtype": DType.FP32,
        "environment": {"model_type": "llama"},
        "steps": tuple(MeasuredStep(step=step, latency_us_median=measured_us) for step in steps),
        **changes,
    }
    return ClosureReport(**fields)  # type: ignore[arg-type]


def _sum_us(step: ClosureStep) -> float:
    nodes = lower_step(step, _MODEL, DType.FP32, ModelForm())
    return sum(_CALL_US * node.repeat * node.share for node in nodes)


def _mode(mode: str) -> ClosureStep:
    return ClosureStep(kind="decode", batch_size=4, num_tokens=32, mode=mode)


def test_on_a_cpu_a_model_adds_what_it_takes_beside_its_operators() -> None:
    """The sum of the operators, and the difference between a model and its operators."""
    predictor = _Predictor({"model_eager": 500.0, "operators_eager": 380.0})
    (step,) = validate_steps(_report(_DECODE), predictor).steps  # type: ignore[arg-type]
    assert pytest.approx(_sum_us(_DECODE)) == step.operators_us
    assert 120.0 == step.host_us
    assert pytest.approx(_sum_us(_DECODE) + 120.0) == step.predicted_us
    assert pytest.approx(step.predicted_us / 1000.0 - 1) == step.error_ratio
    assert step.low_us < step.predicted_us < step.high_us


@pytest.mark.parametrize("host_us", [1.0, 50_000.0])
def test_on_a_gpu_the_slower_of_host_and_device_decides(host_us: float) -> None:
    """They run side by side."""
    report = _report(_DECODE, device="h200_sxm")
    (step,) = validate_steps(report, _Predictor({"model_eager": host_us})).steps  # type: ignore[arg-type]
    assert pytest.approx(max(_sum_us(_DECODE), host_us)) == step.predicted_us


def test_a_graph_is_launched_once_and_is_no_faster_than_its_kernels_follow() -> None:
    """The replay of as many tiny kernels is its floor."""
    hosts = {"launch_graph": 10.0, "replay": 9_000.0}
    report = _report(_mode("graph"), device="h200_sxm")
    (step,) = validate_steps(report, _Predictor(hosts)).steps  # type: ignore[arg-type]
    assert pytest.approx(9_010.0) == step.predicted_us


def test_host_times_nobody_measured_count_nothing_and_are_named() -> None:
    """What a data sheet says of the host is no measurement."""
    validation = validate_steps(_report(_DECODE), _Predictor({}))  # type: ignore[arg-type]
    assert pytest.approx(_sum_us(_DECODE)) == validation.steps[0].predicted_us
    assert 0.0 == validation.steps[0].host_us
    (note,) = [text for text in validation.notes if "not measured" in text]
    assert "model_eager, operators_eager; run `foretoken profile host --device cpu`" in note


def test_compiled_steps_are_their_kernels_alone_and_say_so() -> None:
    """Chains are fused, so there is less to add up."""
    validation = validate_steps(_report(_mode("compiled")), _Predictor({}))  # type: ignore[arg-type]
    assert validation.steps[0].predicted_us < _sum_us(_DECODE)
    assert any("compiled steps is not modelled" in note for note in validation.notes)


def test_parts_add_up_to_the_operators_and_shares_to_one() -> None:
    """Nothing of a step is lost on the way to the reader, the largest part comes first."""
    training = ClosureStep(kind="training", batch_size=1, num_tokens=8)
    (step,) = validate_steps(_report(training), _Predictor({})).steps  # type: ignore[arg-type]
    parts_us = [part.latency_us for part in step.parts]
    assert pytest.approx(step.operators_us) == sum(parts_us)
    assert sorted(parts_us, reverse=True) == parts_us
    assert pytest.approx({"measured": 1.0}) == dict(step.shares)
    assert "100% measured" == describe_shares(step)


def test_failed_steps_are_named_and_not_scored() -> None:
    """Without any measured step there is no error to tell."""
    failed = MeasuredStep(step=_DECODE, status="failed", reason="out of memory")
    validation = validate_steps(_report(steps=(failed,)), _Predictor({}))  # type: ignore[arg-type]
    assert ((failed,), ()) == (validation.failed, validation.steps)
    assert math.isnan(validation.error_median)


def test_what_disturbed_the_measurement_is_told() -> None:
    """A reader must not blame the prediction for a busy machine."""
    environment = {"disturbed": "decode:4x32:eager busy_machine"}
    validation = validate_steps(_report(environment=environment), _Predictor({}))  # type: ignore[arg-type]
    assert "disturbed while measured: decode:4x32:eager busy_machine" in validation.notes


def test_a_report_without_an_architecture_is_refused() -> None:
    """There is nothing to lower."""
    with pytest.raises(InvalidRequestError, match="r has no architecture"):
        validate_steps(_report(_DECODE, architecture=None), _Predictor({}))  # type: ignore[arg-type]


def test_a_page_shows_every_step_and_why_others_are_missing() -> None:
    """Also the error that is above ten per cent stands out."""
    failed = MeasuredStep(step=_mode("graph"), status="failed", reason="needs CUDA")
    report = _report(_DECODE)
    whole = _report(steps=(*report.steps, failed))
    sections = steps_sections([validate_steps(whole, _Predictor({}))])  # type: ignore[arg-type]
    assert ["Steps", "tiny-llama on cpu", "tiny-llama on cpu: what steps consist of"] == [
        section.title for section in sections
    ]
    table = sections[1].table
    assert table is not None
    assert ["decode 4 x 32 eager", "decode 4 x 32 graph"] == [row[0] for row in table.rows]
    assert "needs CUDA" == table.rows[1][-1]
