"""`foretoken memory`: what it prints and writes, and what it says of words it cannot use."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from page_structure import charts_of
from typer.testing import CliRunner, Result

from foretoken.app.cli.main import app

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def invoke(*words: object) -> Result:
        home = str(tmp_path / "home")
        return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["--home", home, *map(str, words)])

    return invoke


_QUESTION = ("memory", "--model", "tiny-llama", "--device", "a100_sxm_80", "--sequence-length", 128)


def test_every_stage_is_told(run: Run) -> None:
    """The last stage has no more than one micro batch, the first as many as there are ranks."""
    result = run("--output", "json", *_QUESTION, "--layout", "tp=2,pp=4,dp=2")
    report = json.loads(result.stdout)
    assert report["num_devices"] == 16
    assert [stage["num_in_flight"] for stage in report["memory"]] == [4, 3, 2, 1]
    assert json.loads(report["scenario_json"])["global_batch_size"] == 2 * 4 * 2


def test_a_table_has_the_parts(run: Run) -> None:
    result = run(*_QUESTION, "--layout", "pp=2")
    for word in ("stage 1", "optimizer", "reserved", "margin", "yes"):
        assert word in result.stdout


def test_a_file_is_changed_by_options(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text("model: tiny-llama\ndevice: cpu\ndtype: fp32\nsequence_length: 128\n")
    words = (
        "--layout",
        "dp=2",
        "--micro-batch",
        2,
        "--set",
        "zero_stage=1",
        "--device",
        "h200_sxm",
    )
    result = run("--output", "json", "memory", path, *words)
    scenario = json.loads(json.loads(result.stdout)["scenario_json"])
    told = {name: scenario[name] for name in ("device", "micro_batch_size", "zero_stage")}
    assert told == {"device": "h200_sxm", "micro_batch_size": 2, "zero_stage": 1}
    assert scenario["layout"]["dp"] == 2
    assert scenario["global_batch_size"] == 8


def test_a_page_is_written(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "memory.html"
    run(*_QUESTION, "--layout", "pp=2", "--page", page)
    assert "Memory plan" in page.read_text()
    assert "Peak memory of one device" in charts_of(page.read_text())


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("memory", "--device", "a100_sxm_80"), "--model"),
        (("memory", "--model", "tiny-llama"), "--device"),
        ((*_QUESTION, "--layout", "tp=x"), "needs a number"),
        ((*_QUESTION, "--layout", "pp=2", "--page", "memory.pdf"), "must end in"),
        ((*_QUESTION, "--layout", "xp=2"), "xp"),
        ((*_QUESTION, "--layout", "dp=2", "--global-batch", 3), "global_batch_size"),
    ],
)
def test_words_it_cannot_use_are_named(run: Run, words: tuple[object, ...], problem: str) -> None:
    result = run(*words)
    assert result.exit_code != 0
    assert problem in result.output
