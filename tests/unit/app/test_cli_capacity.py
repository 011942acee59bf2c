import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from foretoken.app.cli.main import app

_SCENARIO = """\
model: qwen2-7b
device: a30
engine: {profile: plain}
workload:
  num_requests: 40
  prefill: {kind: uniform, minimum: 50, maximum: 300}
  decode: {kind: fixed, mean: 8}
seed: 3
"""
_LIMIT = ("--limit", "ttft p90 300ms", "--tolerance", "0.05")

_CLOSED = (
    *("--set", "workload.arrival=closed_loop"),
    *("--set", "workload.arrival_options={concurrency: 2}"),
)


def _search(folder: Path, *words: str) -> Result:
    scenario = folder / "scenario.yaml"
    scenario.write_text(_SCENARIO, encoding="utf-8")
    command = ["search", "capacity", str(scenario), *words]
    return CliRunner(env={"FORETOKEN_HOME": str(folder / "home")}).invoke(app, command)


def _as_json(folder: Path, *words: str) -> Result:
    scenario = folder / "scenario.yaml"
    scenario.write_text(_SCENARIO, encoding="utf-8")
    command = ["--output", "json", "search", "capacity", str(scenario), *words]
    return CliRunner(env={"FORETOKEN_HOME": str(folder / "home")}).invoke(app, command)


def test_probes_and_answer_are_printed(tmp_path: Path) -> None:
    """A row for every rate with the limited figure, then the rate, its interval and its limit."""
    result = _search(tmp_path, *_LIMIT)
    assert result.exit_code == 0, result.stderr
    assert "TTFT p90 (ms, at most 300)" in result.stdout
    assert re.search(r"capacity \(requests/s\)\s*│\s*[\d.,]+", result.stdout)
    assert re.search(r"95 % interval\s*│\s*[\d.]+ to [\d.]+", result.stdout)
    assert re.search(r"limited by\s*│\s*TTFT p90", result.stdout)


def test_json_is_the_report(tmp_path: Path) -> None:
    """All of it, with the run at the answer but without its requests."""
    result = _as_json(tmp_path, *_LIMIT)
    report = json.loads(result.stdout)
    assert 0 < report["low_rps"] <= report["capacity_rps"] < report["first_miss_rps"]
    assert report["first_miss_rps"] == pytest.approx(1.05 * report["capacity_rps"])
    assert report["at_capacity"]["ttft_ms"]["p90"] <= 300
    assert report["at_capacity"]["requests"]["arrival_s"] == []
    rates = [probe["rate_rps"] for probe in report["probes"]]
    assert report["capacity_rps"] in rates


def test_a_short_workload_is_told(tmp_path: Path) -> None:
    """The rate found has requests arrive within less than twice the limit, so little is sure."""
    result = _search(tmp_path, *_LIMIT)
    text = " ".join(result.stdout.split())
    assert "note: the workload is short" in text
    assert "of its 40 requests were not finished when the last one arrived" in text


def test_a_page_is_written(tmp_path: Path) -> None:
    """With the answer in it."""
    page = tmp_path / "page.html"
    result = _search(tmp_path, *_LIMIT, "--out", str(page))
    assert result.exit_code == 0, result.stderr
    assert "capacity (requests/s)" in page.read_text(encoding="utf-8")


def test_no_rate_says_why(tmp_path: Path) -> None:
    """A limit below what a prompt takes alone."""
    result = _search(tmp_path, "--limit", "ttft p50 1us")
    assert result.exit_code == 3
    assert "no rate: even at" in result.stdout
    assert "where requests hardly meet" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "give at least one"),
        (("--limit", "ttft 2s"), "write METRIC STATISTIC TIME"),
        (("--attainment", "0.9"), "no SLO to attain"),
        ((*_LIMIT, *_CLOSED), "a closed loop has no rate"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    tmp_path: Path, words: tuple[str, ...], problem: str
) -> None:
    """With status 1 and what to do instead."""
    result = _search(tmp_path, *words)
    assert result.exit_code == 1
    assert problem in " ".join(result.stderr.split())
