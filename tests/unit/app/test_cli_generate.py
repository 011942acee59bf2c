"""`foretoken generate training`, and `--generate` of a search for a way to train."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from foretoken.app.cli.generate import GenerateOptions, launch_best
from foretoken.app.cli.main import app
from foretoken.app.scenario_file import read_serving_scenario, read_training_scenario
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import (
    StrategyFinalist,
    TrainingSearchReport,
    TrainingSearchRequest,
    TrainingSpace,
)

_EXAMPLE = Path(__file__).resolve().parents[3] / "docs" / "examples" / "training.yaml"

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a command's status and what it said, over a home of its own."""

    def invoke(*words: object) -> tuple[int, str]:
        arguments = ["--home", str(tmp_path / "home"), *(str(word) for word in words)]
        result = CliRunner().invoke(app, arguments)
        return result.exit_code, " ".join(result.output.split())

    return invoke


def test_a_scenario_becomes_files_of_a_framework(tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "run"
    words = ("--out", folder, "--framework", "megatron-core", "--set", "micro_batch_size=2")
    status, told = run("generate", "training", _EXAMPLE, *words)
    assert 0 == status, told
    names = {"train.sh", "job.yaml", "kustomization.yaml", "scenario.yaml", "README.md"}
    assert names == {path.name for path in folder.iterdir()}
    assert "--micro-batch-size 2" in (folder / "train.sh").read_text(encoding="utf-8")
    assert "train.sh, job.yaml" in told


def test_what_cannot_be_written_is_told(tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "run"
    status, told = run(
        *("generate", "training", _EXAMPLE, "--out", folder, "--framework", "torchtitan")
    )
    assert 1 == status
    assert "sequence_parallel: torchtitan" in told
    status, told = run("generate", "training", _EXAMPLE, "--framework", "nemo")
    assert 2 == status
    assert "deepspeed, megatron-core," in told
    assert not folder.exists()


def _finalist(rank: int, scenario: TrainingScenario) -> StrategyFinalist:
    return StrategyFinalist(
        candidate=rank,
        name=scenario.name,
        rank=rank,
        scenario_json=json.dumps(schema.encode(scenario)),
    )


def _scenario(name: str) -> TrainingScenario:
    return replace(read_training_scenario(_EXAMPLE, {}), name=name)


def test_the_best_finalist_that_fits_and_can_be_written_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 does not fit; the first requires what Megatron-Core lacks; the second is written."""
    lacking = replace(_scenario("first"), pipeline_schedule="gpipe")
    second = replace(_scenario("second"), layout=ParallelLayout(tp=4, dp=2))
    third = _scenario("third")
    finalists = (
        _finalist(3, third),
        _finalist(0, _scenario("full")),
        _finalist(2, second),
        _finalist(1, lacking),
    )
    options = GenerateOptions(generate=tmp_path / "run", framework="megatron-core")
    launch_best(TrainingSearchReport(finalists=finalists), options)
    assert second == read_training_scenario(tmp_path / "run" / "scenario.yaml", {})
    told = " ".join(capsys.readouterr().err.split())
    assert "first cannot be written: pipeline_schedule" in told
    assert "second written to" in told


def test_nothing_to_write_is_an_error_and_nothing_asked_is_none(tmp_path: Path) -> None:
    options = GenerateOptions(generate=tmp_path / "run", framework="megatron-core")
    unfit = TrainingSearchReport(finalists=(_finalist(0, _scenario("full")),))
    lacking = replace(_scenario("first"), pipeline_schedule="gpipe")
    refused = TrainingSearchReport(finalists=(_finalist(1, lacking),))
    for report, problem in (
        (TrainingSearchReport(), "nothing was simulated"),
        (unfit, "no finalist fits"),
        (refused, "pipeline_schedule"),
    ):
        with pytest.raises(InvalidRequestError, match=problem):
            launch_best(report, options)
    launch_best(unfit, GenerateOptions())
    assert [] == list(tmp_path.iterdir())


def test_options_without_each_other_are_refused_before_a_search(tmp_path: Path) -> None:
    GenerateOptions(generate=tmp_path).check(has_finalists=True)
    GenerateOptions().check(has_finalists=False)
    with pytest.raises(typer.BadParameter, match="--finalists"):
        GenerateOptions(generate=tmp_path).check(has_finalists=False)
    with pytest.raises(typer.BadParameter, match="--generate DIR"):
        GenerateOptions(framework="deepspeed").check(has_finalists=True)


@pytest.mark.parametrize(
    ("profile", "framework", "bound"),
    [
        ("plain", "", "megatron-core"),
        ("megatron-core", "", "megatron-core"),
        ("gpt-neox", "deepspeed", "deepspeed"),
    ],
)
def test_a_search_is_bounded_by_the_framework_of_its_files_before_it_runs(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    profile: str,
    framework: str,
    bound: str,
) -> None:
    """Whose it is, is said where times go by the rules of another."""
    scenario = replace(_scenario("any"), trainer=TrainerSpec(profile=profile))
    options = GenerateOptions(generate=tmp_path, framework=framework)
    found = options.bound_request(TrainingSearchRequest(scenario=scenario))
    assert bound == found.space.framework
    told = " ".join(capsys.readouterr().err.split())
    is_other = f"files are written for {bound}" in told and f"by the rules of {profile}" in told
    assert (profile != bound) == is_other
    untouched = TrainingSearchRequest(scenario=scenario)
    assert untouched == GenerateOptions().bound_request(untouched)


@pytest.mark.parametrize(
    ("profile", "num_devices", "key"),
    [("gpt-neox", (8,), "trainer.profile"), ("megatron-core", (12, 20), "layout")],
)
def test_a_search_whose_answer_no_files_start_is_refused_before_it_runs(
    tmp_path: Path, profile: str, num_devices: tuple[int, ...], key: str
) -> None:
    """No framework of that trainer; devices that fill no whole nodes of eight."""
    scenario = replace(_scenario("any"), trainer=TrainerSpec(profile=profile))
    request = TrainingSearchRequest(scenario=scenario, space=TrainingSpace(num_devices=num_devices))
    options = GenerateOptions(generate=tmp_path)
    with pytest.raises(InvalidRequestError) as refused:
        options.bound_request(request)
    assert {key} == {item.field for item in refused.value.violations}
    some = replace(request, space=TrainingSpace(num_devices=(*num_devices, 16)))
    if key == "layout":
        assert options.bound_request(some)


def test_a_servers_command_becomes_a_scenario_file(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "serving.yaml"
    status, said = run(
        *("generate", "scenario", "--from-command", "vllm serve llama-3.1-8b -tp 2 --api-key x"),
        *("--device", "h200_sxm", "--set", "workload.rate_rps=3", "--out", out),
    )
    assert 0 == status, said
    assert "not read: --api-key" in said
    scenario = read_serving_scenario(out, {})
    assert (2, 3.0, "serving") == (
        scenario.layout.tp,
        scenario.workload.rate_rps,
        scenario.name,
    )


def test_a_command_of_nothing_known_is_an_error(run: Run) -> None:
    status, said = run("generate", "scenario", "--from-command", "ls -l", "--device", "h200_sxm")
    assert 1 == status
    assert "starts none of" in said


@pytest.mark.parametrize("framework", ["megatron-core", "torchtitan"])
def test_generated_files_are_read_back(run: Run, tmp_path: Path, framework: str) -> None:
    """What one command writes the other reads, model and all."""
    source = tmp_path / "source.yaml"
    source.write_text(
        "model: llama-3.1-8b\ndevice: h100_sxm\nlayout: {tp: 4, dp: 4}\nzero_stage: 2\n"
        "sequence_parallel: true\nglobal_batch_size: 16\nsequence_length: 8192\n"
        f"trainer: {{profile: {framework}}}\n",
        encoding="utf-8",
    )
    status, said = run("generate", "training", source, "--out", tmp_path / "job")
    assert 0 == status, said
    names = [name for name in ("train.sh", "train.toml") if (tmp_path / "job" / name).exists()]
    words = [word for name in names for word in ("--from-file", tmp_path / "job" / name)]
    out = tmp_path / "read.yaml"
    told = run("generate", "scenario", *words, "--device", "h100_sxm", "--out", out)
    assert 0 == told[0], told
    read, written = (read_training_scenario(path, {"name": "x"}) for path in (out, source))
    assert written == read
