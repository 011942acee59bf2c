"""A search for a training strategy from the command line: answered, interrupted, asked again."""

import json
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from search_commands import Started, finish_search, kill_in_the_middle, start_search

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_SCENARIO = """\
model: tiny-llama
device: cpu
dtype: fp32
sequence_length: 128
global_batch_size: 8
layout: {dp: 4}
"""
_NUM_FINALISTS = 3
_VARIED = ("--vary", "weight_parallel=none", "--vary", "overlap=none")
_VARIED += ("--finalists", str(_NUM_FINALISTS))
# What differs from run to run.
_MEASURED = ("wall_s", "cpu_s", "closed_form_s", "job_id")


def _start(home: Path, *words: object) -> Started:
    scenario = home.parent / "scenario.yaml"
    scenario.write_text(_SCENARIO)
    return start_search(home, "training", scenario, *_VARIED, *words)


def _without_times(report: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in report.items() if key not in _MEASURED}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What a search says that nothing disturbs, and the folder of its files."""
    folder = tmp_path_factory.mktemp("undisturbed")
    files = ("--page", folder / "report.html", "--export", folder / "strategies.jsonl")
    report, notes = finish_search(_start(folder / "home", *files))
    assert notes.count("simulated tp") == 3
    return report, folder


def test_every_strategy_is_counted_and_the_best_are_simulated(
    undisturbed: tuple[dict[str, Any], Path],
) -> None:
    """Points are what can run and fits, and what is ruled out, each once."""
    report, folder = undisturbed
    ruled_out = sum(item["num_strategies"] for item in report["ruled_out"])
    assert report["num_points"] == report["num_fitting"] + ruled_out
    names = report["candidates"]["name"]
    assert len(set(names)) == len(names)
    assert set(report["best"].values()) <= set(names)
    lines = (folder / "strategies.jsonl").read_text().splitlines()
    assert [json.loads(line)["name"] for line in lines] == names
    page = (folder / "report.html").read_text()
    for finalist in report["finalists"]:
        assert finalist["name"] == names[finalist["candidate"]]
        assert finalist["name"] in page
        # A small model without overlaps has nothing that the closed form leaves out.
        simulated_ms = finalist["report"]["step_time_ms"]
        assert finalist["closed_form_ms"] == pytest.approx(simulated_ms, rel=0.01)


def test_a_finalist_is_a_scenario_that_is_simulated_alike(
    undisturbed: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    report, _ = undisturbed
    finalist = report["finalists"][0]
    scenario = tmp_path / "winner.yaml"
    scenario.write_text(finalist["scenario_json"])
    command = (sys.executable, "-m", "foretoken.app", "--home", tmp_path / "home")
    found = subprocess.run(
        [*map(str, command), "--output", "json", "simulate", "training", str(scenario)],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert json.loads(found.stdout)["step_time_ms"] == finalist["report"]["step_time_ms"]


def test_a_killed_search_goes_on_when_it_is_asked_again(
    undisturbed: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    for attempt in count():
        home = tmp_path / str(attempt) / "home"
        home.parent.mkdir()
        notes = kill_in_the_middle(_start(home), home)
        (found,) = (home / "simulator").glob("*.finalists.jsonl")
        if found.read_text().count("\n") < _NUM_FINALISTS:
            break  # not the last one before the signal came, as on a busy machine
    (job_id,) = (word.rstrip(";") for word in notes.split() if word.startswith("training-search-"))
    report, notes = finish_search(_start(home))
    assert f"search {job_id} (tiny-llama on 4 x cpu) goes on where it was left" in notes
    assert report["job_id"] == job_id
    expected, _ = undisturbed
    assert _without_times(report) == _without_times(expected)
    again, _ = finish_search(_start(home, "--job", job_id))
    assert again == report


def test_an_interrupted_search_is_cancelled(tmp_path: Path) -> None:
    process = _start(tmp_path / "home", "--vary", "global_batch_size=8:1024")
    deadline = time.monotonic() + 200
    while not any((tmp_path / "home" / "simulator").glob("training-search-*")):
        assert process.poll() is None, "it ended before it could be interrupted"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    output, notes = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in notes
    assert output == ""
