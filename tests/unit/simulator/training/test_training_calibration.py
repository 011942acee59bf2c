"""Host gaps and a factor from measured steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_fakes import build_scenario

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.training_truth import TrainingCalibration
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.training_report import ComponentTime, TrainingReport
from foretoken.simulator.training.calibration import (
    ComponentPair,
    calibrate_from_components,
    calibrate_training,
)
from foretoken.simulator.training.calibration_fit import (
    StepTable,
    choose_parameters,
    find_obstacle,
    fit_steps,
    leave_one_out,
)
from foretoken.simulator.training.measured_file import MeasuredTime, read_measured

_LAYER_MS = {"encoder_fwd": 10.0, "encoder_bwd": 30.0}


@dataclass(frozen=True)
class _Machine:
    """Steps by a formula: `num_layers` passes of layers, and what is `fixed_ms` by micro batch."""

    num_layers: int = 40
    step_ms_by_batch: Mapping[int, float] = field(default_factory=dict)

    def simulate(self, scenario: TrainingScenario) -> TrainingReport:
        fixed = TrainingCalibration()
        calibration = scenario.calibration or fixed
        raw_ms = self.step_ms_by_batch[scenario.micro_batch_size]
        num_passes = self.num_layers * scenario.global_batch_size // scenario.micro_batch_size
        gap_us = calibration.forward_gap_us + calibration.backward_gap_us
        gaps_ms = (num_passes * gap_us + calibration.step_gap_us) / 1e3
        return TrainingReport(
            step_time_ms=calibration.step_factor * (raw_ms + gaps_ms),
            step_time_raw_ms=raw_ms,
            components=tuple(
                ComponentTime(name=name, stage=stage, time_ms=time_ms)
                for name, time_ms in _LAYER_MS.items()
                for stage in range(3)
            ),
        )


_MACHINE = _Machine(step_ms_by_batch={1: 2000.0, 2: 1800.0, 4: 1750.0, 8: 1740.0})


def _scenarios(*sizes: int) -> dict[str, TrainingScenario]:
    return {
        f"batch_{size}": build_scenario(name=f"batch_{size}", micro_batch_size=size)
        for size in sizes
    }


def _measure(
    scenarios: Mapping[str, TrainingScenario], truth: TrainingCalibration
) -> list[MeasuredTime]:
    return [
        MeasuredTime(
            scenario=name,
            time_ms=_MACHINE.simulate(replace(scenario, calibration=truth)).step_time_ms,
        )
        for name, scenario in scenarios.items()
    ]


def test_a_gap_and_a_factor_are_found_again() -> None:
    scenarios = _scenarios(1, 2, 4, 8)
    truth = TrainingCalibration(forward_gap_us=200, backward_gap_us=400, step_factor=1.05)
    found = calibrate_training(
        scenarios, _measure(scenarios, truth), _MACHINE.simulate, ("gap", "factor")
    )
    assert found.calibration.forward_gap_us == pytest.approx(200)
    assert found.calibration.backward_gap_us == pytest.approx(400)
    assert found.calibration.step_factor == pytest.approx(1.05)
    assert found.calibrated_error_ratio == pytest.approx(0, abs=1e-9)
    assert found.left_out_error_ratio == pytest.approx(0, abs=1e-9)
    assert found.raw_error_ratio > 0.05
    assert [step.raw_ms for step in found.steps] == [2000.0, 1800.0, 1750.0, 1740.0]


def test_steps_choose_what_predicts_the_others() -> None:
    scenarios = _scenarios(1, 2, 4, 8)
    gap = TrainingCalibration(forward_gap_us=300, backward_gap_us=600)
    factor = TrainingCalibration(step_factor=1.2)
    by_gap = calibrate_training(scenarios, _measure(scenarios, gap), _MACHINE.simulate)
    by_factor = calibrate_training(scenarios, _measure(scenarios, factor), _MACHINE.simulate)
    assert by_gap.parameters == ("gap",)
    assert by_factor.parameters == ("factor",)
    assert by_factor.calibration.step_factor == pytest.approx(1.2)


def test_one_step_gives_one_correction_and_says_that_it_cannot_tell() -> None:
    scenarios = _scenarios(1)
    truth = TrainingCalibration(forward_gap_us=100, backward_gap_us=200)
    found = calibrate_training(scenarios, _measure(scenarios, truth), _MACHINE.simulate)
    assert found.parameters == ("gap",)
    assert found.steps[0].calibrated_ms == pytest.approx(found.steps[0].measured_ms)
    assert found.left_out_error_ratio == -1
    assert any("one step cannot tell" in note for note in found.notes)


def test_a_step_faster_than_simulated_gets_a_factor() -> None:
    found = calibrate_training(_scenarios(1), [MeasuredTime(time_ms=1500.0)], _MACHINE.simulate)
    assert found.parameters == ("factor",)
    assert found.calibration.step_factor == pytest.approx(0.75)
    assert found.calibration.forward_gap_us == 0


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [((1,), "1 step\\(s\\) cannot tell"), ((1, 2), "3 or more are needed")],
)
def test_too_few_steps_are_refused(sizes: tuple[int, ...], reason: str) -> None:
    scenarios = _scenarios(*sizes)
    truth = TrainingCalibration(forward_gap_us=100)
    with pytest.raises(InvalidRequestError, match=reason):
        calibrate_training(
            scenarios, _measure(scenarios, truth), _MACHINE.simulate, ("gap", "factor")
        )


def test_steps_that_are_alike_cannot_tell_a_gap_from_a_factor() -> None:
    raw_us = np.array([1e6, 2e6, 4e6])
    table = StepTable(measured_us=1.1 * raw_us, raw_us=raw_us, sensitivity=raw_us / 1e3)
    assert "cannot be separated" in find_obstacle(table, ("factor", "gap"))
    assert find_obstacle(table, ("factor",)) == ""


def test_a_parameter_that_changes_nothing_is_refused() -> None:
    raw_us = np.array([1e6, 2e6, 4e6])
    table = StepTable(measured_us=raw_us, raw_us=raw_us, sensitivity=0 * raw_us)
    assert find_obstacle(table, ("gap",)) == "gap changes none of these steps"


@given(
    factor=st.floats(0.5, 2),
    gap_us=st.floats(0, 2000),
    step_gap_us=st.floats(0, 1e5),
    sensitivity=st.lists(st.floats(10, 1000), min_size=4, max_size=6),
)
def test_a_fit_never_errs_more_than_no_correction(
    factor: float, gap_us: float, step_gap_us: float, sensitivity: list[float]
) -> None:
    counts = np.array(sensitivity)
    raw_us = 1e6 + 1e3 * counts**1.5
    measured_us = factor * (raw_us + gap_us * counts + step_gap_us)
    table = StepTable(measured_us=measured_us, raw_us=raw_us, sensitivity=counts)

    def squares(corrected: np.ndarray) -> float:
        return float(np.sum((corrected / measured_us - 1) ** 2))

    for parameters in (("factor",), ("gap",), ("factor", "gap"), ("factor", "gap", "step_gap")):
        fit = fit_steps(table, parameters)
        assert fit.factor > 0
        assert min(fit.gap_us, fit.step_gap_us) >= 0
        assert squares(table.correct(fit)) <= squares(raw_us) + 1e-12


def test_left_out_steps_are_predicted_from_the_others() -> None:
    raw_us = np.array([1e6, 2e6, 3e6])
    table = StepTable(
        measured_us=np.array([1.1e6, 2.2e6, 3.4e6]), raw_us=raw_us, sensitivity=0 * raw_us
    )
    left_out = leave_one_out(table, ("factor",))
    assert left_out is not None
    assert left_out[2] == pytest.approx(3.3e6)
    assert leave_one_out(table, ("gap",)) is None
    assert choose_parameters(table) == ("factor",)


def test_a_correction_that_helps_no_step_left_out_is_none() -> None:
    raw_us = np.array([1e6, 2e6, 3e6])
    measured_us = raw_us * np.array([1.05, 0.95, 1.05])
    table = StepTable(measured_us=measured_us, raw_us=raw_us, sensitivity=np.ones(3))
    assert choose_parameters(table) == ()


def test_gaps_of_layers_are_medians_over_stages() -> None:
    pairs = [
        ComponentPair(component="encoder_fwd", measured_us=10_500 + wait, simulated_us=10_000)
        for wait in (0, 100, 9_000)
    ] + [ComponentPair(component="encoder_bwd", measured_us=29_000, simulated_us=30_000)]
    found = calibrate_from_components(pairs, "llemma")
    assert found == TrainingCalibration(source="llemma", forward_gap_us=600, backward_gap_us=0)
    with pytest.raises(InvalidRequestError, match="encoder_bwd is missing"):
        calibrate_from_components(pairs[:3])


def test_measured_layers_fix_the_gaps_and_steps_check_them() -> None:
    scenarios = _scenarios(1, 2)
    truth = TrainingCalibration(forward_gap_us=500, backward_gap_us=1000)
    layers = [
        MeasuredTime(scenario="batch_1", component=name, stage=stage, time_ms=_LAYER_MS[name] + gap)
        for name, gap in (("encoder_fwd", 0.5), ("encoder_bwd", 1.0))
        for stage in (0, 2)
    ]
    found = calibrate_training(scenarios, [*layers, *_measure(scenarios, truth)], _MACHINE.simulate)
    assert found.parameters == ()
    assert found.calibration.forward_gap_us == pytest.approx(500)
    assert found.calibration.backward_gap_us == pytest.approx(1000)
    assert found.calibrated_error_ratio == pytest.approx(0, abs=1e-9)
    assert [pair.name for pair in found.components] == ["batch_1, stage 0", "batch_1, stage 2"] * 2
    alone = calibrate_training(scenarios, layers, _MACHINE.simulate)
    assert alone.calibration.forward_gap_us == found.calibration.forward_gap_us
    assert alone.steps == ()


def test_layers_simulated_as_slower_have_no_gap_and_it_is_said() -> None:
    layers = [
        MeasuredTime(component=name, time_ms=_LAYER_MS[name] + beyond)
        for name, beyond in (("encoder_fwd", -1.0), ("encoder_bwd", 2.0))
    ]
    found = calibrate_training(_scenarios(1), layers, _MACHINE.simulate)
    assert found.calibration == TrainingCalibration(backward_gap_us=2000.0)
    assert found.notes == (
        "encoder_fwd is simulated to be as slow as it was measured: it has no gap",
    )


def test_flagged_times_are_not_used() -> None:
    times = [
        MeasuredTime(time_ms=2200.0),
        MeasuredTime(time_ms=9999.0, flags="hand_edited"),
    ]
    found = calibrate_training(_scenarios(1), times, _MACHINE.simulate, ("factor",))
    assert found.calibration.step_factor == pytest.approx(1.1)
    assert "flagged times are not used: 1" in found.notes


def test_a_scenario_there_is_not_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="'other' is none of the scenarios"):
        calibrate_training(
            _scenarios(1), [MeasuredTime(scenario="other", time_ms=1.0)], _MACHINE.simulate
        )


def test_times_are_read_from_a_table_and_from_a_list(tmp_path: Path) -> None:
    table, listed = tmp_path / "m.csv", tmp_path / "m.yaml"
    table.write_text("scenario,component,stage,time_ms,flags\na,,,812.5,\na,encoder_fwd,0,12,x\n")
    listed.write_text(
        "times:\n- {scenario: a, time_ms: 812.5}\n"
        "- {scenario: a, component: encoder_fwd, stage: 0, time_ms: 12, flags: x}\n"
    )
    expected = (
        MeasuredTime(scenario="a", time_ms=812.5),
        MeasuredTime(scenario="a", component="encoder_fwd", stage=0, time_ms=12.0, flags="x"),
    )
    assert read_measured(table) == expected
    assert read_measured(listed) == expected


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("m.csv", "scenario,time\na,1\n", "unknown key"),
        ("m.csv", "time_ms\n1\nfast\n", "line 3: time_ms: expected float, found 'fast'"),
        ("m.csv", "time_ms\n-1\n", "line 2: time_ms: must be positive"),
        ("m.json", '{"times": [{"time_ms": -1}]}', r"times\[0\].time_ms: must be positive"),
        ("m.csv", "time_ms\n", "holds no times"),
        ("m.json", "[", "not valid YAML"),
        ("m.txt", "1", "a .csv, .json or .yaml file"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(
    tmp_path: Path, name: str, text: str, reason: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InvalidRequestError, match=reason):
        read_measured(path)
