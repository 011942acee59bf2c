"""Every command answers the same for another name of a device as for its own."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from slow_cases import slow_but
from typer.testing import CliRunner, Result

from foretoken.app.cli.main import app

Run = Callable[..., Result]

_EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
_TRAINING = """\
model: tiny-llama
device: {device}
sequence_length: 128
layout: {{pp: 2}}
stage_devices: [{device}, a30]
"""
_SERVING = """\
model: tiny-llama
device: {device}
workload: {{rate_rps: 3, num_requests: 5}}
"""
_COMMANDS = {
    "predict": "predict gemm m=8 n=64 k=64 --device {device}",
    "predict of a collective": "predict all_reduce message_bytes=1024 devices_per_node=2"
    " num_nodes=1 --device {device}",
    "plan": "plan gemm m=1:8 n=64 k=64 --device {device} --budget 1s",
    "memory": "memory --model tiny-llama --device {device} --sequence-length 128",
    "simulate training": "simulate training {folder}/training.yaml",
    "simulate serving": "simulate serving {folder}/serving.yaml",
    "search training": "search training --model tiny-llama --nodes {device}=1x8"
    " --nodes a100=1x8 --price {device}=3 --price a100=1 --sequence-length 128"
    " --global-batch-tokens 1024 --finalists 0 --objective cost --vary tp=1"
    " --vary micro_batch_size=1",
    "profile plan": "profile plan --device {device} --operator rms_norm --quick",
}
# What differs from run to run.
_VOLATILE = {"job_id", "cpu_s", "wall_s", "closed_form_s"}


@pytest.fixture
def run(home_path: str) -> Run:
    def invoke(*words: object) -> Result:
        return CliRunner().invoke(app, ["--home", home_path, "--output", "json", *map(str, words)])

    return invoke


@pytest.mark.parametrize(
    "name", slow_but(["predict", "predict of a collective", "plan", "memory"], _COMMANDS)
)
def test_a_command_takes_every_name_of_a_device(run: Run, tmp_path: Path, name: str) -> None:
    answers = []
    for device in ("h200_sxm", "H200-SXM-141GB"):
        (tmp_path / "training.yaml").write_text(_TRAINING.format(device=device))
        (tmp_path / "serving.yaml").write_text(_SERVING.format(device=device))
        result = run(*_COMMANDS[name].format(device=device, folder=tmp_path).split())
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        answers.append({name: found[name] for name in found.keys() - _VOLATILE})
    assert answers[0] == answers[1]


def test_what_is_there_of_a_device_is_found_by_every_name(run: Run) -> None:
    mapping = f"mapping={_EXAMPLES / 'collectives-mapping.yaml'}"
    recorded = run(
        *("catalog", "import", "generic", _EXAMPLES / "collectives.csv", "--option", mapping)
    )
    assert recorded.exit_code == 0, recorded.output
    names = ("h100_sxm", "h100", "H100-SXM-80GB")
    found = [json.loads(run("catalog", "coverage", "--device", name).stdout) for name in names]
    assert found[0]
    assert found[0] == found[1] == found[2]


def test_a_name_that_nothing_has_is_no_empty_answer(run: Run) -> None:
    for option, name in (("--device", "h2000"), ("--operator", "gem")):
        result = run("catalog", "coverage", option, name)
        assert (1, True) == (result.exit_code, "did you mean" in result.output)


def test_a_device_there_is_not_is_refused_by_its_given_name(run: Run) -> None:
    result = run("predict", "gemm", "m=8", "n=64", "k=64", "--device", "h2000")
    assert result.exit_code == 1
    assert "unknown device 'h2000'; did you mean" in result.output
