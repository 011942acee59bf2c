"""`profile` as a shell sees it: plans, exact points, requests from files, exit statuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from foretoken.app.cli.main import app
from foretoken.app.cli.profile import read_points
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError, UnknownOperatorError
from foretoken.domain.measurements.estimate import DType, OperatorCall, Phase
from foretoken.domain.measurements.profiling import ProfileRequest

_HEADER = "operator,dtype,phase,num_tokens,hidden,gpu_s\n"

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def invoke(*words: object) -> Result:
        command = ["--home", str(tmp_path), "--output", "json", *map(str, words)]
        return CliRunner().invoke(app, command)

    return invoke


def answer(outcome: Result) -> Any:
    assert 0 == outcome.exit_code, outcome.output
    return json.loads(outcome.stdout)


@pytest.fixture
def points(tmp_path: Path) -> Path:
    path = tmp_path / "points.csv"
    path.write_text(_HEADER + "residual_add,fp32,forward,8,64,0.1\n", encoding="utf-8")
    return path


def test_points_of_a_file_are_timed_once_and_then_known(run: Run, points: Path) -> None:
    first = answer(run("profile", "--quick", "--points", points))
    assert (first["num_measured"], first["num_planned"]) == (1, 1)
    assert [entry["operator"] for entry in first["operators"]] == ["residual_add"]
    second = answer(run("profile", "--quick", "--points", points))
    assert (second["num_measured"], second["num_skipped"]) == (0, 1)
    again = answer(run("profile", "--quick", "--points", points, "--again", "--name", "twice"))
    assert (again["num_measured"], again["name"]) == (1, "twice")


def test_dry_run_times_nothing_and_is_the_plan(run: Run) -> None:
    words = ("--device", "h200_sxm", "--model", "tiny-llama", "--tp", "1:2", "--quick")
    plan = answer(run("profile", "plan", *words))
    assert plan == answer(run("profile", "--dry-run", *words))
    assert plan["num_calls"] == sum(entry["num_calls"] for entry in plan["operators"]) > 100
    assert plan["estimated_s"] > 0.0


def test_request_of_another_process_is_taken_as_it_is(run: Run, tmp_path: Path) -> None:
    request = ProfileRequest(device="cpu", operators=("rope",), quick=True, name="mine")
    path = tmp_path / "request.json"
    path.write_text(json.dumps(schema.encode(request)), encoding="utf-8")
    plan = answer(run("profile", "--request", path, "--dry-run"))
    assert (plan["name"], [entry["operator"] for entry in plan["operators"]]) == ("mine", ["rope"])


def test_profile_whose_every_case_fails_ends_with_a_status(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "huge.csv"
    path.write_text("operator,dtype,num_params\nadam,fp32,1000000000000\n", encoding="utf-8")
    config = tmp_path / "config.yaml"
    config.write_text("profiler: {call_s_max: 1e9}\n", encoding="utf-8")
    outcome = run("--config", config, "profile", "--quick", "--points", path)
    assert 1 == outcome.exit_code
    assert "every case failed" in outcome.output


def test_devices_are_those_present(run: Run) -> None:
    assert "cpu" in [row["device"] for row in answer(run("profile", "devices"))]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--operator", "gemmm"), "gemm"),
        (("--model", "lama-3.1-8b"), "llama-3.1-8b"),
        (("--device", "h200_sxm"), "the profiler's machine has no"),
        (("--kernels", "some"), "must be one of"),
        (("--shards", "2"), "--on kubernetes"),
        (("--on", "mars"), "local, kubernetes"),
    ],
)
def test_wrong_words_are_refused_with_what_is_right(
    run: Run, words: tuple[str, ...], message: str
) -> None:
    outcome = run("profile", *words)
    assert outcome.exit_code in (1, 2)
    assert message in " ".join(outcome.output.split())


def test_points_have_the_dimensions_of_their_operator(points: Path) -> None:
    call = OperatorCall(
        operator="residual_add",
        dtype=DType.FP32,
        phase=Phase.FORWARD,
        dims={"num_tokens": 8, "hidden": 64},
    )
    assert [call] == list(read_points(points))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("operator,m\ngemm,1\n", "has no column dtype"),
        (_HEADER + "residual_add,fp32,forward,x,64,0\n", "line 2: .*whole number"),
        (_HEADER + "residual_add,fp32,forward,8,,0\n", "line 2: .*hidden"),
        (_HEADER + "residual_add,fp33,forward,8,64,0\n", "line 2: .*fp32"),
    ],
)
def test_wrong_points_are_refused_with_their_line(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "points.csv"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InvalidRequestError, match=message):
        list(read_points(path))


def test_points_of_an_operator_nobody_knows_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_text("operator,dtype\ngemmm,fp32\n", encoding="utf-8")
    with pytest.raises(UnknownOperatorError, match="gemm"):
        list(read_points(path))
