"""Steps simulated with a profile of layers and with a calibration, and calibrated on themselves."""

import dataclasses

import pytest
from training_fakes import RooflinePredictor, build_scenario

from foretoken.domain.measurements.training_truth import (
    ModuleTime,
    ModuleTimes,
    TrainingCalibration,
)
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.training_report import TrainingReport
from foretoken.simulator.training.calibration import calibrate_training
from foretoken.simulator.training.measured_file import MeasuredTime
from foretoken.simulator.training.step import simulate_training

_LAYOUT = ParallelLayout(tp=2, pp=2)


def _simulate(scenario: TrainingScenario) -> TrainingReport:
    return simulate_training(scenario, RooflinePredictor(), None)


def _component_ms(report: TrainingReport, name: str) -> float:
    return next(part.time_ms for part in report.components if part.name == name)


def _profiled(**changes: object) -> TrainingScenario:
    layer = ModuleTime(module="layer", micro_batch_size=1, forward_us=9000, backward_us=20_000)
    fields: dict[str, object] = {"source": "made up", "tp": 2, "times": (layer,), **changes}
    return build_scenario(_LAYOUT, module_times=ModuleTimes(**fields))  # type: ignore[arg-type]


def test_layers_take_the_profiles_time_and_what_rests_on_it_is_measured() -> None:
    report = _simulate(_profiled(has_communication=True))
    assert _component_ms(report, "encoder_fwd") == pytest.approx(9)
    assert _component_ms(report, "encoder_bwd") == pytest.approx(20)
    assert report.step_time_ratio_by_provenance["measured"] > 0.9
    assert report.communication_ms_by_axis["tp"] > 0
    # Bounds are those of what is still estimated.
    assert report.step_time_high_ms / report.step_time_ms < 1.05


def test_communication_outside_of_the_profile_is_added_once() -> None:
    inside, outside = _simulate(_profiled(has_communication=True)), _simulate(_profiled())
    sum_ms = _component_ms(outside, "mp_allreduce")
    for name in ("encoder_fwd", "encoder_bwd"):
        added = _component_ms(outside, name) - _component_ms(inside, name)
        assert added == pytest.approx(2 * sum_ms)


def test_a_recomputed_layer_runs_its_forward_time_again() -> None:
    scenario = dataclasses.replace(_profiled(has_communication=True), recompute="full")
    assert _component_ms(_simulate(scenario), "encoder_bwd") == pytest.approx(29)


def test_a_profile_changes_neither_memory_nor_work() -> None:
    profiled, plain = _simulate(_profiled()), _simulate(build_scenario(_LAYOUT))
    assert [stage.total_bytes for stage in profiled.memory] == [
        stage.total_bytes for stage in plain.memory
    ]
    assert profiled.mfu_ratio * profiled.step_time_ms == pytest.approx(
        plain.mfu_ratio * plain.step_time_ms
    )


def test_another_degree_than_the_profiles_is_a_result_with_its_reason() -> None:
    scenario = dataclasses.replace(_profiled(), layout=ParallelLayout(tp=4))
    feasibility = _simulate(scenario).feasibility
    assert not feasibility.is_feasible
    assert "of 2 tensor-parallel ranks" in feasibility.reason


def test_gaps_lengthen_layers_and_leave_the_raw_step_as_it_was() -> None:
    scenario, gaps = (
        build_scenario(_LAYOUT),
        TrainingCalibration(forward_gap_us=500, backward_gap_us=900),
    )
    raw = _simulate(scenario)
    calibrated = _simulate(dataclasses.replace(scenario, calibration=gaps))
    assert calibrated.step_time_raw_ms == pytest.approx(raw.step_time_ms)
    assert calibrated.step_time_ms > raw.step_time_ms
    for name, gap_ms in (("encoder_fwd", 0.5), ("encoder_bwd", 0.9)):
        longer = _component_ms(calibrated, name) - _component_ms(raw, name)
        assert longer == pytest.approx(gap_ms)


def test_what_simulated_steps_were_made_with_is_found_again() -> None:
    truth = TrainingCalibration(forward_gap_us=400, backward_gap_us=800, step_factor=1.1)
    runs = {
        f"run {length}": build_scenario(
            _LAYOUT, name=f"run {length}", sequence_length=length, global_batch_size=4
        )
        for length in (256, 1024, 4096)
    }
    measured = [
        MeasuredTime(
            scenario=name,
            time_ms=_simulate(dataclasses.replace(run, calibration=truth)).step_time_ms,
        )
        for name, run in runs.items()
    ]
    found = calibrate_training(runs, measured, _simulate)
    assert found.parameters == ("factor", "gap")
    assert found.calibration.forward_gap_us == pytest.approx(400, rel=1e-3)
    assert found.calibration.backward_gap_us == pytest.approx(800, rel=1e-3)
    assert found.calibration.step_factor == pytest.approx(1.1, rel=1e-3)
    assert found.calibrated_error_ratio == pytest.approx(0, abs=1e-4)
    assert found.raw_error_ratio > 0.05
