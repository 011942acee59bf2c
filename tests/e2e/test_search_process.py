"""A search from the command line, as a user has it: killed, begun again, and the same answer."""

import json
from pathlib import Path
from typing import Any

import pytest
from search_commands import Started, finish_search, kill_in_the_middle, start_search

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_REQUEST = {
    "scenario": {
        "model": "llama-3.1-8b",
        "device": "h100_sxm",
        "engine": {"profile": "vllm-0.19"},
        "workload": {"num_requests": 60, "prefill": {"mean": 500}, "decode": {"mean": 60}},
        "seed": 3,
    },
    "space": {
        "max_devices": 4,
        "modes": ["aggregated"],
        "tp": [1, 2, 4],
        "max_num_seqs": [8, 16],
        "max_num_batched_tokens": [2048],
    },
    "targets": {"limits": [{"metric": "tpot_ms", "percentile": 0, "limit_ms": 60}]},
    "num_finalists": 3,
}
# What differs from run to run.
_MEASURED = ("wall_s", "cpu_s", "job_id")


def _start(home: Path, *words: object) -> Started:
    request = home.parent / "request.json"
    request.write_text(json.dumps(_REQUEST))
    return start_search(home, "serving", "--request", request, *words)


def _without_times(report: Any) -> Any:
    """Return a report without what it took to make it, the finalists' too."""
    if isinstance(report, list):
        return [_without_times(item) for item in report]
    if isinstance(report, dict):
        return {key: _without_times(item) for key, item in report.items() if key not in _MEASURED}
    return report


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """What a search says that nothing disturbs, and its page."""
    folder = tmp_path_factory.mktemp("undisturbed")
    page = folder / "report.html"
    report, _ = finish_search(_start(folder / "home", "--out", page))
    return report, page.read_text(encoding="utf-8")


def test_a_search_answers_with_finalists_and_a_page(
    undisturbed: tuple[dict[str, Any], str],
) -> None:
    report, page = undisturbed
    assert report["num_simulated"] == len(report["finalists"]) == _REQUEST["num_finalists"]
    for finalist in report["finalists"]:
        assert finalist["name"] == report["candidates"]["name"][finalist["candidate"]]
        assert finalist["name"] in page
        assert finalist["report"]["num_completed"] > 0
    assert report["finalists"][0]["name"] == report["best"]
    num_ruled_out = sum(report["num_ruled_out_by_verdict"].values())
    assert num_ruled_out == sum(verdict != "ok" for verdict in report["candidates"]["verdict"])


def test_a_killed_search_goes_on_when_it_is_asked_again(
    undisturbed: tuple[dict[str, Any], str], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    notes = kill_in_the_middle(_start(home), home)
    (job_id,) = (word.rstrip(";") for word in notes.split() if word.startswith("serving-search-"))
    report, notes = finish_search(_start(home))
    title = "llama-3.1-8b on up to 4 x h100_sxm"
    assert f"search {job_id} ({title}) goes on where it was left" in notes
    assert report["job_id"] == job_id
    expected, _ = undisturbed
    assert _without_times(report) == _without_times(expected)
    again, _ = finish_search(_start(home, "--job", job_id))
    assert again == report
