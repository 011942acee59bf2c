"""`foretoken train` shows what a training found, as a table, as JSON and as a page."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from foretoken.app.cli.predictor import training_table
from foretoken.domain import schema
from foretoken.domain.results.report import (
    HeldOutCase,
    OperatorTrainingReport,
    PredictorTrainingReport,
    SplitScore,
)
from foretoken.jobs.runner import JobRunner

_INSIDE = SplitScore(
    split="inside",
    num_held_out=400,
    mape_ratio=0.021,
    p90_ratio=0.05,
    interval_coverage_ratio=0.9,
    error_quantiles_ratio=tuple((place - 10) / 200 for place in range(21)),
)
_OPERATOR = OperatorTrainingReport(
    operator="gemm",
    device="a30",
    num_rows=2000,
    num_held_out=500,
    held_out_mape_ratio=0.03,
    held_out_p90_ratio=0.07,
    interval_coverage_ratio=0.88,
    splits=(_INSIDE, replace(_INSIDE, split="beyond", num_held_out=100, mape_ratio=0.066)),
    member_weights={"trees": 0.75, "curves": 0.25},
    worst=(
        HeldOutCase(
            split="beyond",
            dims={"m": 65536, "n": 16, "k": 16},
            measured_us=200.0,
            estimate_us=300.0,
            low_us=250.0,
            high_us=350.0,
        ),
    ),
)
_REPORT = PredictorTrainingReport(
    model_version="v-1", num_rows=2000, cpu_s=1.5, num_reused=2, operators=(_OPERATOR,)
)


@pytest.fixture
def job_id(tmp_path: Path) -> str:
    """A training that an embedded predictor of this home ended earlier."""
    jobs = JobRunner(tmp_path / "predictor" / "jobs")
    jobs.open()
    created = jobs.create("train", lambda _: _REPORT)
    *_, last = jobs.watch(created.job_id)
    jobs.close()
    assert last.state.is_final
    return created.job_id


def _run(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "foretoken.app", *words],
        env={**os.environ, "FORETOKEN_HOME": str(home), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_row_is_an_operator_or_a_split_of_one() -> None:
    whole = training_table(_REPORT, is_by_split=False)
    assert ["gemm"] == list(whole.columns[1].cells)
    assert ["3.0%"] == list(whole.columns[4].cells)
    parts = training_table(_REPORT, is_by_split=True)
    assert ["inside", "beyond"] == list(parts.columns[2].cells)
    assert ["400", "100"] == list(parts.columns[3].cells)
    assert ["2.1%", "6.6%"] == list(parts.columns[4].cells)


def test_the_title_says_what_was_not_trained_anew() -> None:
    assert "2 kept from before" in str(training_table(_REPORT, is_by_split=False).title)
    fresh = training_table(replace(_REPORT, num_reused=0), is_by_split=False)
    assert "kept" not in str(fresh.title)


def test_long_names_are_readable_at_100_columns(tmp_path: Path, job_id: str) -> None:
    """Not even the longest names there are get folded."""
    long = replace(_OPERATOR, operator="attention_prefill_window", device="v100_pcie_16")
    path = tmp_path / "predictor" / "jobs" / f"{job_id}.result.json"
    path.write_text(json.dumps(schema.encode(replace(_REPORT, operators=(long,)))))
    for words in ((), ("--splits",)):
        outcome = _run(tmp_path, "train", "--job", job_id, *words)
        assert outcome.returncode == 0, outcome.stderr
        names = outcome.stdout.splitlines()[4]
        assert "v100_pcie_16" in names
        assert "attention_prefill_window" in names
        assert max(map(len, outcome.stdout.splitlines())) <= 100


def test_a_past_training_is_shown_whole_as_json(tmp_path: Path, job_id: str) -> None:
    outcome = _run(tmp_path, "--output", "json", "train", "--job", job_id)
    assert outcome.returncode == 0, outcome.stderr
    assert schema.decode(PredictorTrainingReport, json.loads(outcome.stdout)) == _REPORT


def test_the_page_is_written_beside_the_table(tmp_path: Path, job_id: str) -> None:
    page = tmp_path / "page.html"
    outcome = _run(tmp_path, "train", "--job", job_id, "--report", str(page))
    assert outcome.returncode == 0, outcome.stderr
    assert f"page written to {page}" in outcome.stderr.replace("\n", "")
    assert "m\u00a065536, n\u00a016, k\u00a016" in page.read_text(encoding="utf-8")


def test_a_page_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    outcome = _run(tmp_path, "train", "--report", str(tmp_path / "absent" / "page.html"))
    assert outcome.returncode == 2
    assert "no folder" in outcome.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_past_training_takes_no_options_of_a_new_one(tmp_path: Path) -> None:
    outcome = _run(tmp_path, "train", "--job", "train-1", "--device", "a30")
    assert (outcome.returncode, outcome.stdout) == (1, "")
    assert "a past training has its own device, operator and seed" in outcome.stderr


def test_an_unknown_training_is_an_error_in_one_line(tmp_path: Path) -> None:
    outcome = _run(tmp_path, "train", "--job", "train-1")
    assert (outcome.returncode, outcome.stdout) == (1, "")
    assert outcome.stderr.startswith("error (unknown_job)")


def test_a_negative_seed_is_wrong_usage(tmp_path: Path) -> None:
    outcome = _run(tmp_path, "train", "--seed", "-1")
    assert (outcome.returncode, outcome.stdout) == (2, "")
    assert list(tmp_path.iterdir()) == []
