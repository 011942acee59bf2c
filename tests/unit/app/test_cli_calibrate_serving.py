"""`foretoken calibrate serving`, and what `validate serving` makes of files with several runs."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from foretoken.app.cli.main import app
from foretoken.app.scenario_file import read_serving_scenario

_EXAMPLES = Path(__file__).resolve().parents[3] / "docs" / "examples"
_SERVER = str(_EXAMPLES / "serving-llama-3.1-8b-rtx4090.yaml")
_RUN = str(_EXAMPLES / "measured-requests.csv")
_STEPS = str(_EXAMPLES / "engine-steps.jsonl")


def _run(home: Path, *words: str) -> Result:
    environment = {"FORETOKEN_HOME": str(home), "COLUMNS": "160"}
    outcome = CliRunner(env=environment).invoke(app, ("--no-starter", *words))
    assert outcome.exit_code == 0, outcome.stderr
    return outcome


def _read_json(home: Path, *words: str) -> Any:
    return json.loads(_run(home, "--output", "json", *words).stdout)


@pytest.mark.slow
def test_what_is_learned_of_a_run_applies_to_another_simulation(tmp_path: Path) -> None:
    """Unmeasured, steps are simulated half again as long as the example's; then they fit."""
    validate = ("validate", "serving", _SERVER, "--measured", _RUN)
    before = _read_json(tmp_path, *validate)
    out = tmp_path / "keys.yaml"
    words = ("calibrate", "serving", "mine", _SERVER, "--measured", _RUN, "--out", str(out))
    learned = _read_json(tmp_path, *words)
    assert ("mine", "rtx_4090") == (learned["name"], learned["device"])
    assert "correction: mine" in out.read_text("utf-8")
    after = _read_json(tmp_path, *validate, "--set", "correction=mine")
    tpot = [
        next(one for one in found["metrics"] if one["name"] == "tpot_ms")["bias_ratio"]
        for found in (before, after)
    ]
    assert tpot[0] > 0.4
    assert 0.0 == pytest.approx(tpot[1], abs=0.03)
    assert "mine" == read_serving_scenario(Path(_SERVER), {"correction": "mine"}).correction


def _refuse(home: Path, *words: str) -> str:
    environment = {"FORETOKEN_HOME": str(home), "COLUMNS": "160"}
    outcome = CliRunner(env=environment).invoke(app, ("--no-starter", *words))
    assert outcome.exit_code != 0
    return f"{outcome.stderr} {outcome.exception}"


@pytest.mark.slow
def test_what_is_learned_of_steps_applies_to_requests_that_were_measured_apart(
    tmp_path: Path,
) -> None:
    """The records have the formula of the measured requests in them, and neither is simulated."""
    out = tmp_path / "keys.yaml"
    words = ("calibrate", "serving", "mine", _SERVER, "--steps", _STEPS, "--out", str(out))
    learned = _read_json(tmp_path, *words)
    kinds = {each["kind"]: each for each in learned["steps"]["kinds"]}
    assert {"decode": 100, "mixed": 40, "prefill": 20} == {
        kind: each["num_steps"] for kind, each in kinds.items()
    }
    assert kinds["decode"]["left_out_error_ratio"] < 0.05 < kinds["decode"]["raw_error_ratio"]
    assert "correction: mine\n" == out.read_text("utf-8")
    validate = ("validate", "serving", _SERVER, "--measured", _RUN)
    before, after = (
        next(one for one in _read_json(tmp_path, *words)["metrics"] if one["name"] == "tpot_ms")
        for words in (validate, (*validate, "--set", "correction=mine"))
    )
    assert before["bias_ratio"] > 0.4
    assert 0.0 == pytest.approx(after["bias_ratio"], abs=0.05)
    assert "decode x" in _run(tmp_path, "list", "corrections").stdout
    assert "one layout, and a search compares many" in _refuse(
        tmp_path, "search", "serving", _SERVER, "--set", "correction=mine"
    )
    assert "not of 'tp=2'" in _refuse(
        tmp_path, "simulate", "serving", _SERVER, "--set=correction=mine", "--set=layout.tp=2"
    )
    assert "either a run or --steps" in _refuse(tmp_path, "calibrate", "serving", "m", _SERVER)


def _sweep(path: Path) -> Path:
    def request(start_s: float) -> dict[str, object]:
        times = {"start_time": start_s, "first_token_time": start_s + 0.1}
        return {
            **times,
            "last_token_time": start_s + 0.6,
            "prompt_tokens": 64,
            "output_tokens": 20,
        }

    benchmarks = [
        {
            "requests": {"successful": [request(place / rate) for place in range(1, 5)]},
            "args": {"strategy": {"type_": "constant", "rate": rate}},
        }
        for rate in (1.0, 4.0)
    ]
    path.write_text(json.dumps({"benchmarks": benchmarks}), encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_sweep_is_compared_run_by_run_and_one_is_picked_by_its_name(tmp_path: Path) -> None:
    sweep = str(_sweep(tmp_path / "sweep.json"))
    requests = tmp_path / "requests.csv"
    words = ("validate", "serving", _SERVER, "--measured", sweep)
    found = _read_json(tmp_path, *words, "--csv", str(requests))
    assert ["constant 1/s", "constant 4/s"] == [one["run_name"] for one in found]
    lines = requests.read_text("utf-8").splitlines()
    assert ("run,", 9) == (lines[0][:4], len(lines))
    alone = _read_json(tmp_path, *words, "--run", "constant 4/s")
    assert ("constant 4/s", 4) == (alone["run_name"], alone["num_compared"])
