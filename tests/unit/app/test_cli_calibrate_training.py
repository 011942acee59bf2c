"""`foretoken calibrate`: of training steps, and of operators with and without their word."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from foretoken.app.cli.main import app
from foretoken.app.scenario_file import read_training_scenario
from foretoken.domain.measurements.training_truth import TrainingCalibration

_EXAMPLES = Path(__file__).resolve().parents[3] / "docs" / "examples"
_RUNS = tuple(
    str(_EXAMPLES / "training-calibration" / f"{name}.yaml")
    for name in ("batch-1", "batch-4", "long", "replicas")
)
_STEPS = str(_EXAMPLES / "training-calibration" / "steps.csv")


def _run(home: Path, *words: str) -> Result:
    return CliRunner(env={"FORETOKEN_HOME": str(home), "COLUMNS": "160"}).invoke(app, words)


def _read_json(outcome: Result) -> Any:
    assert outcome.exit_code == 0, outcome.stderr
    return json.loads(outcome.stdout)


@pytest.mark.slow
def test_what_is_learned_can_be_named_in_a_scenario(tmp_path: Path) -> None:
    learned = tmp_path / "learned.yaml"
    words = ("calibrate", "training", *_RUNS, "--measured", _STEPS, "--out", str(learned))
    found = _read_json(_run(tmp_path, "--output", "json", *words))
    assert found["parameters"] == ["factor", "gap"]
    assert found["calibrated_error_ratio"] < 0.01 < found["raw_error_ratio"]
    assert found["calibrated_error_ratio"] <= found["left_out_error_ratio"] < 0.03
    # The truth the example was made with: 0.5 ms, 1 ms, 4 %.
    assert found["calibration"]["forward_gap_us"] == pytest.approx(500, rel=0.1)
    assert found["calibration"]["backward_gap_us"] == pytest.approx(1000, rel=0.1)
    assert found["calibration"]["step_factor"] == pytest.approx(1.04, abs=0.01)
    scenario = tmp_path / "s.yaml"
    scenario.write_text("model: tiny-llama\ndevice: a100_sxm_80\ncalibration: learned.yaml\n")
    read = read_training_scenario(scenario, {}).calibration
    assert read == TrainingCalibration(**found["calibration"])


def test_raw_stands_beside_calibrated(tmp_path: Path) -> None:
    words = ("calibrate", "training", _RUNS[0], "--measured", str(tmp_path / "one.csv"))
    (tmp_path / "one.csv").write_text("time_ms\n1608\n")
    outcome = _run(tmp_path, *words, "--fit", "factor")
    assert outcome.exit_code == 0, outcome.stderr
    assert all(word in outcome.stdout for word in ("raw (ms)", "calibrated (ms)", "1,608.0"))
    assert "to expect of another step: unknown, the steps are too few" in outcome.stdout


def test_what_steps_cannot_tell_is_refused_in_one_line(tmp_path: Path) -> None:
    words = ("calibrate", "training", _RUNS[0], "--measured", str(tmp_path / "one.csv"))
    (tmp_path / "one.csv").write_text("time_ms\n1608\n")
    outcome = _run(tmp_path, *words, "--fit", "factor", "--fit", "gap")
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    assert "1 step(s) cannot tell factor and gap apart: 3 or more are needed" in outcome.stderr


def test_operators_are_calibrated_with_and_without_the_word(tmp_path: Path) -> None:
    observations = str(_EXAMPLES / "observations.json")
    words = ("mine", observations, "--device", "h100_sxm")
    named = _read_json(_run(tmp_path, "--output", "json", "calibrate", "operators", *words))
    short = _read_json(_run(tmp_path, "--output", "json", "calibrate", *words))
    assert named["factors"] == short["factors"] != {}


def test_an_unknown_parameter_is_refused_with_those_there_are(tmp_path: Path) -> None:
    words = ("--measured", _STEPS, "--fit", "gaps")
    outcome = _run(tmp_path, "calibrate", "training", *_RUNS, *words)
    assert outcome.exit_code == 2
    assert "'gaps' is none of factor, gap, step_gap" in outcome.stderr
