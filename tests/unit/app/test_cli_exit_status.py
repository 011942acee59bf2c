"""Commands whose answer is that nothing does what was asked: printed all the same, status 3."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from foretoken.app.cli.main import app

Run = Callable[..., Result]

_SERVING = """\
model: {model}
device: a30
workload: {{rate_rps: 3, num_requests: 5}}
"""
_TRAINING = """\
model: {model}
device: a30
sequence_length: 128
global_batch_size: 8
"""
_FITS, _TOO_LARGE = "tiny-llama", "gpt-530b"
_SPACE = "--finalists 0 --vary tp=1 --vary pp=1 --vary micro_batch_size=1"
# A command, and the part of its report that says that nothing does it.
_COMMANDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "memory": (
        "memory {folder}/training.yaml",
        lambda report: not report["feasibility"]["is_feasible"],
    ),
    "simulate serving": (
        "simulate serving {folder}/serving.yaml",
        lambda report: not report["feasibility"]["is_feasible"],
    ),
    "simulate serving at two rates": (
        "simulate serving {folder}/serving.yaml --rate 1 --rate 2",
        lambda reports: not any(report["feasibility"]["is_feasible"] for report in reports),
    ),
    "simulate training": (
        "simulate training {folder}/training.yaml",
        lambda report: not report["feasibility"]["is_feasible"],
    ),
    "simulate run": (
        "simulate run {folder}/training.yaml --tokens 1e6",
        lambda report: not report["feasibility"]["is_feasible"],
    ),
    "search capacity": (
        "search capacity {folder}/serving.yaml --limit 'ttft p99 2h' --max-rate 1",
        lambda report: report["capacity_rps"] == 0,
    ),
    "search serving": (
        "search serving {folder}/serving.yaml --gpus 1 --finalists 0 --batch 4",
        lambda report: not report["best"],
    ),
    "search training": (
        "search training {folder}/training.yaml --gpus 1 " + _SPACE,
        lambda report: report["num_fitting"] == 0,
    ),
    "search internevo": (
        (
            "search internevo --world_size 1 --global_batch_size 2048 --model {model} --device a30"
            " --sequence-length 2048 --finalists 0"
        ),
        lambda report: report["counts"]["num_fitting"] == 0,
    ),
}


@pytest.fixture
def run(tmp_path: Path, home_path: str) -> Run:
    def invoke(command: str, model: str) -> Result:
        (tmp_path / "serving.yaml").write_text(_SERVING.format(model=model))
        (tmp_path / "training.yaml").write_text(_TRAINING.format(model=model))
        words = (
            command.format(folder=tmp_path, model=model).replace("'ttft p99 2h'", "TTFT").split()
        )
        words = ["ttft p99 2h" if word == "TTFT" else word for word in words]
        return CliRunner().invoke(app, ["--home", home_path, "--output", "json", *words])

    return invoke


@pytest.mark.parametrize("name", _COMMANDS)
def test_an_answer_that_nothing_fits_has_its_own_status(run: Run, name: str) -> None:
    command, says_nothing = _COMMANDS[name]
    result = run(command, _TOO_LARGE)
    assert result.exit_code == 3, result.output
    assert says_nothing(json.loads(result.stdout))


@pytest.mark.slow
@pytest.mark.parametrize("name", _COMMANDS)
def test_an_answer_has_status_0(run: Run, name: str) -> None:
    command, says_nothing = _COMMANDS[name]
    result = run(command, _FITS)
    assert result.exit_code == 0, result.output
    assert not says_nothing(json.loads(result.stdout))


def test_a_deployment_that_refuses_all_requests_is_no_answer(run: Run) -> None:
    """It fits, but prompts are longer than what the model reads."""
    command = "simulate serving {folder}/serving.yaml --set workload.prefill.mean=1000000"
    result = run(f"{command} --set workload.prefill.kind=fixed", _FITS)
    assert result.exit_code == 3, result.output
    report = json.loads(result.stdout)
    assert report["num_refused_by_reason"] == {"context_too_long": report["num_requests"]}
    assert "longer than the model's context" in report["feasibility"]["reason"]
    assert set(report["ttft_ms"].values()) == {None}


def test_a_target_date_nothing_meets_is_no_answer(run: Run) -> None:
    result = run("simulate run {folder}/training.yaml --tokens 1e15 --target-days 0.001", _FITS)
    assert result.exit_code == 3, result.output
    assert json.loads(result.stdout)["target_devices"] == 0


def test_targets_nothing_meets_are_no_answer(run: Run) -> None:
    command = "search serving {folder}/serving.yaml --gpus 1 --finalists 0 --batch 4 --ttft 1us"
    result = run(command, _FITS)
    assert result.exit_code == 3, result.output
    assert json.loads(result.stdout)["best"] == ""


def test_help_says_what_the_statuses_are() -> None:
    said = " ".join(CliRunner().invoke(app, ["--help"]).stdout.split())
    assert "Exit status: 0 the answer is there; 1 an error" in said
    assert "3 a valid question whose answer is that nothing does it" in said
