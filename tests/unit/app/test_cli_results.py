"""`results` and `compare`: what is kept is listed, shown, exported, compared and deleted."""

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from foretoken.app.cli.main import app

_SCENARIO = """\
name: tiny
model: tiny-llama
device: cpu
dtype: fp32
sequence_length: 128
global_batch_size: 4
"""


def _run(home: Path, *words: str) -> Result:
    return CliRunner(env={"FORETOKEN_HOME": str(home), "COLUMNS": "160"}).invoke(app, words)


@pytest.fixture(scope="module")
def kept_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a home with two training steps, of one and of two stages, and a deployment."""
    folder = tmp_path_factory.mktemp("results")
    training, serving = folder / "training.yaml", folder / "serving.yaml"
    training.write_text(_SCENARIO, encoding="utf-8")
    serving.write_text(
        "{model: tiny-llama, device: cpu, dtype: fp32, workload: {num_requests: 5}}",
        encoding="utf-8",
    )
    home = folder / "home"
    for words in (
        ("training", str(training)),
        ("training", str(training), "--set", "layout.pp=2"),
        ("serving", str(serving)),
    ):
        result = _run(home, "simulate", *words)
        assert result.exit_code == 0, result.stderr
    return home


@pytest.fixture
def home(kept_home: Path, tmp_path: Path) -> Path:
    """Return a copy, which a test may change."""
    return Path(shutil.copytree(kept_home, tmp_path / "home"))


def _list(home: Path, *words: str) -> list[dict[str, object]]:
    result = _run(home, "--output", "json", "results", "list", *words)
    assert result.exit_code == 0, result.stderr
    listed: list[dict[str, object]] = json.loads(result.stdout)
    return listed


def test_all_that_succeeded_is_listed_newest_first(kept_home: Path) -> None:
    assert [one["kind"] for one in _list(kept_home)] == ["serving", "training", "training"]
    assert len(_list(kept_home, "--kind", "training")) == 2
    table = _run(kept_home, "results", "list", "--last", "1")
    assert "output tokens/s" in table.stdout
    assert "2 older ones" in table.stderr


def test_a_wrong_kind_is_refused(kept_home: Path) -> None:
    result = _run(kept_home, "results", "list", "--kind", "traning")
    assert (result.exit_code, "did you mean training" in result.stderr) == (1, True)


def test_a_result_is_shown_as_its_command_did(kept_home: Path, tmp_path: Path) -> None:
    """The same tables, and the same page."""
    page = tmp_path / "again.html"
    result = _run(kept_home, "results", "show", "latest~1", "--page", str(page))
    assert result.exit_code == 0, result.stderr
    assert re.search(r"step time \(ms\)\s*│\s*[\d.,]+", result.stdout)
    assert "What each stage does" in page.read_text(encoding="utf-8")
    serving = _run(kept_home, "results", "show")
    assert "TTFT mean (ms)" in serving.stdout


def test_a_shown_report_as_json_has_no_long_columns(kept_home: Path) -> None:
    result = _run(kept_home, "--output", "json", "results", "show", "latest~1")
    report = json.loads(result.stdout)
    assert report["step_time_ms"] > 0
    assert report["spans"]["stage"] == []


def test_two_training_steps_are_set_side_by_side(kept_home: Path, tmp_path: Path) -> None:
    """What differs, the figures with their ratios, and the page."""
    page = tmp_path / "compare.html"
    result = _run(kept_home, "compare", "latest~2", "latest~1", "--page", str(page))
    assert result.exit_code == 0, result.stderr
    assert re.search(r"layout\.pp\s*│\s*1\s*│\s*2", result.stdout)
    assert re.search(r"GPUs\s*│\s*1\s*│\s*2\s*│\s*2x", result.stdout)
    assert "The critical stages" in page.read_text(encoding="utf-8")


def test_a_comparison_as_json_has_values_ratios_and_changes(kept_home: Path) -> None:
    result = _run(kept_home, "--output", "json", "compare", "latest~2", "latest~1")
    compared = json.loads(result.stdout)
    figures = {figure["figure"]: figure for figure in compared["figures"]}
    first, second = figures["step time"]["values"]
    assert figures["step time"]["ratios"] == [1.0, pytest.approx(second / first)]
    assert {"path": "layout.pp", "values": ["1", "2"]} in compared["changes"]
    assert [run["letter"] for run in compared["runs"]] == ["A", "B"]


def test_different_kinds_are_refused(kept_home: Path) -> None:
    """The error says where to find those of one kind."""
    result = _run(kept_home, "compare", "latest", "latest~1")
    assert result.exit_code == 1
    assert "results of different kinds" in result.stderr
    assert "foretoken results list --kind serving" in " ".join(result.stderr.split())


def test_whole_runs_are_kept_shown_and_compared(home: Path, tmp_path: Path) -> None:
    """Under the name that the command tells, with their tables and pages."""
    scenario, page = tmp_path / "tiny.yaml", tmp_path / "runs.html"
    scenario.write_text(_SCENARIO, encoding="utf-8")
    for tokens in ("1e6", "2e6"):
        planned = _run(home, "simulate", "run", str(scenario), "--tokens", tokens)
        assert planned.exit_code == 0, planned.stderr
    newest, older = _list(home, "--kind", "training-run")
    assert str(newest["job_id"]) in planned.stderr
    assert str(newest["headline"]).startswith("2e+06 tokens in ")
    assert "Where the days go" in _run(home, "results", "show", "--page", str(page)).stdout
    assert "Configuration" in page.read_text(encoding="utf-8")
    words = ("compare", str(older["job_id"]), str(newest["job_id"]), "--page", str(page))
    compared = _run(home, *words)
    assert compared.exit_code == 0, compared.stderr
    assert re.search(r"tokens\s*│\s*1,000,000\s*│\s*2,000,000", compared.stdout)
    assert "Expected days with their interval" in page.read_text(encoding="utf-8")


def test_memory_plans_are_not_kept(home: Path) -> None:
    before = _list(home)
    options = ("--model", "tiny-llama", "--device", "a30")
    planned = _run(home, "memory", *options)
    assert planned.exit_code == 0, planned.stderr
    assert _list(home) == before


def test_an_exported_file_is_compared_where_its_result_is_gone(home: Path, tmp_path: Path) -> None:
    """A result equals its own file, and outlives it there."""
    file = tmp_path / "before.zip"
    kept = _run(home, "results", "export", "latest~1", "--out", str(file))
    assert kept.exit_code == 0, kept.stderr
    same = _run(home, "compare", "latest~1", str(file))
    assert "The configurations are the same." in " ".join(same.stdout.split())
    gone = _run(home, "results", "delete", "latest~1")
    assert gone.exit_code == 0, gone.stderr
    assert len(_list(home)) == 2
    result = _run(home, "compare", "latest~1", str(file))
    assert result.exit_code == 0, result.stderr


def test_an_export_as_json_has_the_whole_report(kept_home: Path, tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    _run(kept_home, "results", "export", "latest~1", "--out", str(file))
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["result"]["kind"] == "training"
    assert len(content["report"]["spans"]["stage"]) > 0


@pytest.mark.parametrize("name", ["absent.zip", "file.txt"])
def test_other_files_are_refused(kept_home: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "file.txt").write_text("text", encoding="utf-8")
    result = _run(kept_home, "compare", str(tmp_path / name), "latest")
    assert result.exit_code == 1
    assert re.search(r"there is no file|is no file of", result.stderr)


def test_an_export_must_end_in_what_can_be_written(kept_home: Path, tmp_path: Path) -> None:
    result = _run(kept_home, "results", "export", "latest", "--out", str(tmp_path / "x.csv"))
    assert (result.exit_code, "must end in .zip or .json" in result.stderr) == (2, True)


def test_nothing_is_deleted_where_one_is_unknown(home: Path) -> None:
    result = _run(home, "results", "delete", "latest", "nonsense")
    assert result.exit_code == 1
    assert len(_list(home)) == 3
