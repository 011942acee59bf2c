"""The script that starts training hands its words to the program, on every node."""

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.launch.trainer import read_array
from foretoken.simulator.launch.training import read_launch, write_training_launch

_SCENARIO = TrainingScenario(
    model=find_model("mixtral-8x7b"),
    device="h100_sxm",
    layout=ParallelLayout(tp=2, dp=8, ep=4),
    sequence_parallel=True,
    global_batch_size=64,
    trainer=TrainerSpec(profile="megatron-core"),
)


def _run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script in a folder with a torchrun that prints its words, one a line."""
    programs = folder / "programs"
    programs.mkdir()
    torchrun = programs / "torchrun"
    torchrun.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n', encoding="utf-8")
    torchrun.chmod(0o755)
    (programs / "pretrain_gpt.py").touch()
    bash = shutil.which("bash")
    assert bash is not None
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [bash, folder / "train.sh", *words],
        env={"PATH": path, "MEGATRON_PATH": str(programs), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_pods_index_is_the_rank_of_its_node(tmp_path: Path) -> None:
    write_training_launch(_SCENARIO, tmp_path)
    run = _run(
        tmp_path, "--save", "/data/out", MASTER_ADDR="training-0.training", JOB_COMPLETION_INDEX="1"
    )
    assert 0 == run.returncode, run.stderr
    words = run.stdout.splitlines()
    program = words.index(str(tmp_path / "programs" / "pretrain_gpt.py"))
    launcher = {"--nnodes": "2", "--nproc-per-node": "8", "--node-rank": "1"}
    launcher |= {"--master-addr": "training-0.training", "--master-port": "29500"}
    assert launcher == dict(zip(words[:program:2], words[1:program:2], strict=True))
    arguments = words[program + 1 :]
    for option, value in (
        ("--expert-model-parallel-size", "4"),
        ("--num-experts", "8"),
        ("--vocab-size", "31999"),
        ("--save", "/data/out"),
    ):
        assert value == arguments[arguments.index(option) + 1]


def test_data_of_ones_own_take_the_place_of_made_up_ones(tmp_path: Path) -> None:
    write_training_launch(_SCENARIO, tmp_path)
    run = _run(tmp_path, MASTER_ADDR="a", DATA_PATH="/data/my text", TOKENIZER="me/mine")
    words = run.stdout.splitlines()
    assert "/data/my text" == words[words.index("--data-path") + 1]
    assert "me/mine" == words[words.index("--tokenizer-model") + 1]
    assert "--mock-data" not in words


@pytest.mark.parametrize(
    ("variables", "missing"),
    [({}, "MASTER_ADDR"), ({"MASTER_ADDR": "a", "DATA_PATH": "/data/text"}, "TOKENIZER")],
)
def test_what_is_missing_is_asked_for(
    tmp_path: Path, variables: dict[str, str], missing: str
) -> None:
    write_training_launch(_SCENARIO, tmp_path)
    run = _run(tmp_path, **variables)
    assert 0 != run.returncode
    assert f"{missing}: set it to" in run.stderr
    assert "" == run.stdout


def test_an_array_is_read_back_word_for_word() -> None:
    script = "A=(\n    --flag\n    --two 'x y' z\n)\nB=(\n    --other 1\n)\n"
    assert {"flag": True, "two": ("x y", "z")} == read_array(script, "A")
    assert {"other": "1"} == read_array(script, "B")


def test_a_script_names_its_model_where_several_have_its_sizes(tmp_path: Path) -> None:
    layout = ParallelLayout(tp=2, dp=4)
    scenario = replace(_SCENARIO, model=find_model("llama-2-7b"), layout=layout)
    write_training_launch(scenario, tmp_path)
    script = (tmp_path / "train.sh").read_text(encoding="utf-8")
    assert "llama-2-7b" == read_launch("", {"train.sh": script}).content["model"]
    nameless = {"train.sh": script.replace("# llama-2-7b on", "# mine on")}
    with pytest.raises(InvalidRequestError, match="those of llama-2-7b, llemma-7b"):
        read_launch("", nameless)
