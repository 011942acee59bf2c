"""`foretoken search serving` and `capacity`: questions and answers over a connection."""

import csv
import json
import re
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from job_simulator import JobSimulator, Run, running_against
from rich.console import Console
from search_reports import build_search, build_search_request
from typer.testing import CliRunner, Result

from foretoken.app.cli.main import app
from foretoken.app.cli.search_serving import find_launched
from foretoken.app.cli.search_text import report_table
from foretoken.app.scenario_file import read_serving_scenario
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.job import Job
from foretoken.domain.measurements.measurement import ArrowStream
from foretoken.domain.requests.question import name_request
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import (
    Finalist,
    LatencyLimit,
    ServingSearchReport,
    ServingSearchRequest,
    ServingSpace,
)
from foretoken.wire import ipc

_SCENARIO = """\
model: tiny-llama
device: a30
engine: {profile: vllm-0.19}
workload:
  rate_rps: 3
  num_requests: 20
  prefill: {kind: fixed, mean: 100}
  decode: {kind: fixed, mean: 50}
seed: 11
"""
_DEPLOYMENT = """\
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


class _Simulator(JobSimulator):
    """Answers every search with the same report, and keeps what it was asked."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.asked: list[ServingSearchRequest] = []

    def create_serving_search(self, request: ServingSearchRequest) -> Job:
        self.asked.append(request)
        return self.jobs.create("search", lambda _: build_search(), title=name_request(request))

    def get_serving_search_report(self, job_id: str) -> ServingSearchReport:
        self.jobs.result(job_id, ServingSearchReport)
        return build_search()

    def read_serving_search_table(self, job_id: str, table: str) -> ArrowStream:
        assert table == "candidates"
        return ipc.record_to_table(self.get_serving_search_report(job_id).candidates)

    def watch_serving_search(self, job_id: str, first: int = 0) -> Generator[Finalist]:
        yield from self.get_serving_search_report(job_id).finalists[first:]


@pytest.fixture
def simulator(tmp_path: Path) -> Iterator[_Simulator]:
    found = _Simulator(tmp_path / "jobs")
    yield found
    found.jobs.close()


@pytest.fixture
def run(simulator: _Simulator, tmp_path: Path) -> Iterator[Run]:
    with running_against(simulator, tmp_path / "home") as run:
        yield run


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "chat.yaml"
    path.write_text(_SCENARIO)
    return path


def test_options_alone_make_a_request(run: Run, simulator: _Simulator) -> None:
    found = run(
        *("search", "serving", "--model", "llama-3.1-70b", "--devices", "h200_sxm,h100_sxm"),
        *("--gpus", 16, "--isl", 4000, "--osl", 1000, "--ttft", "2000ms", "--tpot", "30ms"),
        *("--limit", "ttft p99 4s", "--objective", "cost", "--target-rps", 20),
        *("--price", "h200_sxm=3.5", "--price", "h100_sxm=2", "--mode", "aggregated"),
        *("--tp", "1,2,4,8", "--batch", "16:64", "--quantization", "none,fp8"),
        *("--profile", "vllm-0.18", "--finalists", 3, "--sensitivity", "--set", "seed=5"),
    )
    assert found.exit_code == 0, found.output
    (request,) = simulator.asked
    assert request.space == ServingSpace(
        devices=("h200_sxm", "h100_sxm"),
        usd_per_hour={"h200_sxm": 3.5, "h100_sxm": 2.0},
        max_devices=16,
        modes=("aggregated",),
        tp=(1, 2, 4, 8),
        max_num_seqs=(16, 32, 64),
        profiles=("vllm-0.18",),
        quantizations=("none", "fp8"),
    )
    assert request.targets.limits == (
        LatencyLimit(metric="ttft_ms", percentile=0, limit_ms=2000),
        LatencyLimit(metric="tpot_ms", percentile=0, limit_ms=30),
        LatencyLimit(metric="ttft_ms", percentile=99, limit_ms=4000),
    )
    rest = (request.objective, request.target_rps, request.num_finalists, request.has_sensitivity)
    assert rest == ("cost", 20.0, 3, True)
    scenario = request.scenario
    said = (scenario.model.name, scenario.device, scenario.engine.profile, scenario.seed)
    assert said == ("llama-3.1-70b", "h200_sxm", "vllm-0.18", 5)
    lengths = (scenario.workload.prefill, scenario.workload.decode)
    assert [("fixed", 4000), ("fixed", 1000)] == [(item.kind, item.mean) for item in lengths]


def test_other_names_of_devices_make_the_same_request(run: Run, simulator: _Simulator) -> None:
    for names in (("h200", "NVIDIA H100"), ("h200_sxm", "h100_sxm")):
        words = ("--devices", ",".join(names), "--price", f"{names[0]}=3.5", "--gpus", 4)
        assert run("search", "serving", "--model", "tiny-llama", *words).exit_code == 0
    first, second = simulator.asked
    assert first == second
    assert first.space.usd_per_hour == {"h200_sxm": 3.5}


@pytest.mark.parametrize(
    "words",
    [("--ttft", "2"), ("--tpot", "2"), ("--limit", "ttft p99 2")],
    ids=lambda words: words[0],
)
def test_a_limit_without_a_unit_is_asked_back(
    run: Run, simulator: _Simulator, words: tuple[str, str]
) -> None:
    found = run("search", "serving", "--model", "tiny-llama", "--device", "a30", *words)
    assert found.exit_code == 1
    assert f"{words[0]}: 2 has no unit: 2s or 2ms?" in found.output
    assert simulator.asked == []


def test_a_scenario_file_is_kept_where_no_option_says_otherwise(
    run: Run, simulator: _Simulator, scenario: Path
) -> None:
    assert run("search", "serving", scenario, "--osl", 70).exit_code == 0
    (request,) = simulator.asked
    found = request.scenario
    said = (found.name, found.model.name, found.device, found.seed, found.workload.num_requests)
    assert said == ("chat", "tiny-llama", "a30", 11, 20)
    assert (found.workload.prefill.mean, found.workload.decode.mean) == (100, 70)
    assert request.space == ServingSpace()
    assert request.targets.limits == ()


def test_the_request_of_a_report_asks_the_same_again(
    run: Run, simulator: _Simulator, tmp_path: Path
) -> None:
    path = tmp_path / "request.json"
    path.write_text(build_search().request_json)
    found = run("search", "serving", "--request", path)
    assert found.exit_code == 0, found.output
    assert simulator.asked == [build_search_request()]


def test_a_request_file_may_be_short(run: Run, simulator: _Simulator, tmp_path: Path) -> None:
    path = tmp_path / "request.yaml"
    path.write_text(f"scenario: {json.dumps({'model': 'tiny-llama', 'device': 'a30'})}\n")
    assert run("search", "serving", "--request", path).exit_code == 0
    assert simulator.asked[0].scenario.model.name == "tiny-llama"


def test_page_and_candidates_are_written(run: Run, scenario: Path, tmp_path: Path) -> None:
    page, table = tmp_path / "report.html", tmp_path / "points.csv"
    found = run("search", "serving", scenario, "--out", page, "--candidates", table)
    assert found.exit_code == 0, found.output
    assert build_search().best in page.read_text()
    with table.open(newline="") as file:
        names = [row["name"] for row in csv.DictReader(file)]
    assert names == list(build_search().candidates.name)


def test_the_best_that_meets_the_targets_is_written_as_files(
    run: Run, scenario: Path, tmp_path: Path, simulator: _Simulator
) -> None:
    """The first misses them when simulated."""
    folder = tmp_path / "deployment"
    words = ("--generate", folder, "--server", "sglang", "--model-id", "me/my-llama")
    found = run("search", "serving", scenario, *words)
    assert found.exit_code == 0, found.output
    notes = " ".join(found.stderr.split())
    assert "files are written for sglang: what it cannot run is left out" in notes
    assert ["sglang"] == [request.space.server for request in simulator.asked]
    first, second, _ = build_search().finalists
    assert f"{first.name} misses the targets when simulated" in found.stderr
    written = read_serving_scenario(folder / "scenario.yaml", {})
    assert written == schema.decode(ServingScenario, json.loads(second.scenario_json))
    commands = "".join(path.read_text() for path in folder.iterdir())
    assert "me/my-llama" in commands
    assert "sglang" in commands


def test_what_was_not_simulated_is_not_written(run: Run, simulator: _Simulator) -> None:
    found = run("search", "serving", "--generate", "somewhere", "--finalists", 0)
    assert found.exit_code == 2
    assert simulator.asked == []
    for report in (ServingSearchReport(), replace(build_search(), finalists=())):
        with pytest.raises(InvalidRequestError, match="nothing was simulated"):
            find_launched(report)
    missing = replace(build_search(), finalists=build_search().finalists[:1])
    with pytest.raises(InvalidRequestError, match="no finalist meets the targets"):
        find_launched(missing)


def test_json_is_the_whole_report_without_single_requests(run: Run, scenario: Path) -> None:
    found = run("--output", "json", "search", "serving", scenario)
    report, expected = json.loads(found.stdout), build_search().to_dict()
    for name in ("candidates", "num_ruled_out_by_verdict"):
        assert expected[name] == report[name]
    last = report["finalists"][-1]
    assert {()} == set(map(tuple, last["report"]["requests"].values()))
    assert expected["finalists"][-1]["load"] == last["load"]


def test_a_search_that_runs_is_watched_again(
    run: Run, simulator: _Simulator, scenario: Path
) -> None:
    first = run("search", "serving", scenario)
    (job,) = simulator.list_jobs()
    assert f"search {job.job_id} ({job.title}); Ctrl-C cancels it" in first.stderr
    again = run("search", "serving", "--job", job.job_id)
    assert again.exit_code == 0, again.output
    assert again.stdout == first.stdout
    assert len(simulator.asked) == 1


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "--model: is needed where no scenario file names one"),
        (("--model", "tiny-llama"), "--device: is needed where no scenario file names one"),
        (("--model", "llama-3.1-70bb", "--device", "a30"), "did you mean llama-3.1-70b"),
        (("FILE", "--mode", "half"), "'half' is none of aggregated, disaggregated, both"),
        (("FILE", "--price", "a30=cheap"), "expected USD an hour as a30=3.5, got 'cheap'"),
        (("FILE", "--price", "a30=-1"), "expected USD an hour as a30=3.5, got '-1'"),
        (("FILE", "--tp", "two"), "expected a whole number, got 'two'"),
        (("FILE", "--tp", "0"), "tp: must be at least 1"),
        (("FILE", "--ttft", "soon"), "'soon' is no time"),
        (("FILE", "--limit", "ttft p99"), "METRIC STATISTIC TIME"),
        (("FILE", "--objective", "fame"), "must be one of throughput_per_gpu"),
        (("--job", "search-none"), "search-none"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_is_refused_with_what_is_right(
    run: Run, simulator: _Simulator, scenario: Path, words: tuple[str, ...], problem: str
) -> None:
    found = run("search", "serving", *(scenario if word == "FILE" else word for word in words))
    assert found.exit_code == 1, found.output
    assert problem in " ".join(found.stderr.split())
    assert simulator.asked == []


def test_the_example_of_a_request_can_be_asked(run: Run, simulator: _Simulator) -> None:
    example = Path(__file__).resolve().parents[3] / "docs" / "examples" / "search.yaml"
    found = run("search", "serving", "--request", example)
    assert found.exit_code == 0, found.output
    (request,) = simulator.asked
    assert (request.space.tp, request.num_finalists) == ((1, 2, 4), 3)


def test_lengths_of_a_trace_are_its_own(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.yaml"
    path.write_text(f"{_SCENARIO.replace('rate_rps: 3', 'trace_path: t.csv')}")
    found = run("search", "serving", path, "--isl", 10)
    assert found.exit_code == 1
    assert "a trace has lengths of its own" in found.stderr


def test_a_request_file_needs_a_scenario(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "request.yaml"
    path.write_text("objective: cost\n")
    found = run("search", "serving", "--request", path)
    assert found.exit_code == 1
    assert "has no section `scenario`" in found.stderr


def _lines(report: ServingSearchReport, num_shown: int = 10) -> list[str]:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(report_table("llama on 16 h200_sxm", report, num_shown))
    return [" ".join(line.replace("│", " ").split()) for line in capture.get().splitlines()]


def test_a_report_is_printed_with_ranks_ties_answers_and_counts() -> None:
    report = build_search()
    lines = _lines(report, num_shown=3)
    (heading,) = (
        place for place, line in enumerate(lines) if line.startswith("┃ deployment ┃ rank")
    )
    rows = lines[heading + 2 : heading + 5]
    # The second of rank 1 differs from the first in its batch alone.
    assert rows[0].startswith(f"{report.best} =1 16 680 633 714 35.4 1,364 28.2 ")
    assert " b32 3 16 " in rows[1]
    assert " b128 4 16 " in rows[2]
    for line in (
        "31 deployments qualify; above is the best of each layout",
        f"{report.best} ties, within the error of the estimates, with {report.ties[1]}",
        f"fewest GPUs for the rate: 8, {report.min_devices_by}",
        f"least cost for the rate: USD 28 an hour, {report.min_usd_per_hour_by}",
        "960 points, 184 of them distinct: 64 answered in closed form, 3 simulated",
        "2.5 s, 4.2 s of CPU time, 2 workers, predictor v1",
    ):
        assert line in lines
    (ruled_out,) = (line for line in lines if line.startswith("ruled out: "))
    assert ruled_out.startswith("ruled out: 120 beyond a bound, 16 out of memory, ")
    assert any("misses TTFT p99 2,455 > 2,000 ms" in line for line in lines)
    assert any(line.startswith("answers twice as long -30.0%") for line in lines)


def test_idle_devices_have_a_column() -> None:
    """Where a deployment leaves some of the GPUs there are, the table says how many."""
    report = build_search()
    idle = replace(report.candidates, num_idle_devices=(3,) * len(report.candidates.name))

    assert not any(" idle " in line for line in _lines(report))
    assert any(" idle " in line for line in _lines(replace(report, candidates=idle)))


def test_a_search_in_vain_says_so_and_why() -> None:
    lines = _lines(
        ServingSearchReport(num_points=4, num_distinct=4, num_ruled_out_by_verdict={"memory": 4})
    )
    assert "llama on 16 h200_sxm: no deployment of this space meets the targets" in lines
    assert "ruled out: 4 out of memory" in lines


def _search(folder: Path, *words: str) -> Result:
    scenario = folder / "scenario.yaml"
    scenario.write_text(_DEPLOYMENT, encoding="utf-8")
    command = ["search", "capacity", str(scenario), *words]
    return CliRunner(env={"FORETOKEN_HOME": str(folder / "home")}).invoke(app, command)


def _as_json(folder: Path, *words: str) -> Result:
    scenario = folder / "scenario.yaml"
    scenario.write_text(_DEPLOYMENT, encoding="utf-8")
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
    assert "<dt>capacity</dt>" in page.read_text(encoding="utf-8")


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
