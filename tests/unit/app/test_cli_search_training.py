"""`search training`: which request the options make, and what is printed and written."""

import csv
import json
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from job_simulator import JobSimulator, Run, running_against
from pyarrow import parquet
from rich.console import Console
from training_search_reports import build_placed_search, build_training_search

from foretoken.app.cli.search_training_text import describe_finalist, report_table
from foretoken.app.scenario_file import read_training_scenario
from foretoken.domain import schema
from foretoken.domain.job import Job
from foretoken.domain.measurements.measurement import ArrowStream
from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.requests.question import name_request
from foretoken.domain.requests.training_search import (
    NodeGroup,
    StrategyColumns,
    StrategyFinalist,
    TrainingSearchReport,
    TrainingSearchRequest,
    TrainingSpace,
)
from foretoken.wire import ipc

_SCENARIO = """\
model: tiny-llama
device: a30
sequence_length: 512
global_batch_size: 16
layout: {tp: 2, dp: 2}
"""
_PRICES = """\
provider: mine
prices:
  - {device: h100_sxm, usd_per_hour: 2.5, spot_usd_per_hour: 1.1, source: an offer}
"""
_OPTIONS = ("--model", "tiny-llama", "--device", "a30", "--gpus", 8, "--global-batch-tokens", 8192)


class _Simulator(JobSimulator):
    """Answers every search with the same report, and keeps what it was asked."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.asked: list[TrainingSearchRequest] = []

    def create_training_search(self, request: TrainingSearchRequest) -> Job:
        self.asked.append(request)
        return self.jobs.create(
            "search", lambda _: build_training_search(), title=name_request(request)
        )

    def get_training_search_report(self, job_id: str) -> TrainingSearchReport:
        self.jobs.result(job_id, TrainingSearchReport)
        return build_training_search()

    def read_training_search_table(self, job_id: str, table: str) -> ArrowStream:
        assert table == "candidates"
        return ipc.record_to_table(self.get_training_search_report(job_id).candidates)

    def watch_training_search(self, job_id: str, first: int = 0) -> Generator[StrategyFinalist]:
        assert self.jobs.get(job_id).job_id == job_id
        yield from build_training_search().finalists[first:]


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
    path = tmp_path / "pretraining.yaml"
    path.write_text(_SCENARIO)
    return path


def test_options_alone_make_a_request(run: Run, simulator: _Simulator) -> None:
    found = run(
        *("search", "training", "--model", "llama-2-7b", "--devices", "h100_sxm,a100_sxm_80"),
        *("--gpus", "64:256", "--global-batch-tokens", "2097152,4194304"),
        *("--sequence-length", 2048, "--trainer", "megatron-core", "--set", "dtype=bf16"),
        *("--price", "h100_sxm=2.5", "--price", "a100_sxm_80=1.5", "--objective", "cost"),
        *("--vary", "tp=1,2,4", "--vary", "vpp=1:4", "--vary", "micro_batch_size=1,2"),
        *("--vary", "zero_stage=1", "--vary", "sequence_parallel=true", "--vary", "overlap=none"),
        *("--vary", "recompute=none,full", "--vary", "weight_parallel=none,isp"),
        *("--finalists", 3, "--max-candidates", 50, "--sensitivity"),
    )
    assert found.exit_code == 0, found.output
    (request,) = simulator.asked
    assert request.space == TrainingSpace(
        devices=("h100_sxm", "a100_sxm_80"),
        num_devices=(64, 128, 256),
        usd_per_hour={"h100_sxm": 2.5, "a100_sxm_80": 1.5},
        global_batch_sizes=(1024, 2048),
        tp=(1, 2, 4),
        virtual_stages=(1, 2, 4),
        micro_batch_sizes=(1, 2),
        sequence_parallel=(True,),
        zero_stages=(1,),
        overlaps=("none",),
        recompute=("none", "full"),
        weight_parallel=("", "isp"),
    )
    rest = (request.objective, request.num_finalists, request.max_candidates)
    assert (*rest, request.has_sensitivity) == ("cost", 3, 50, True)
    scenario = request.scenario
    assert (scenario.model.name, scenario.device) == ("llama-2-7b", "h100_sxm")
    assert (scenario.sequence_length, scenario.global_batch_size) == (2048, 1024)
    assert scenario.trainer.profile == "megatron-core"


def test_a_scenario_file_is_enough(run: Run, simulator: _Simulator, scenario: Path) -> None:
    """What is asked of it is its cluster, its batch, and every sensible strategy."""
    found = run("search", "training", scenario)
    assert found.exit_code == 0, found.output
    (request,) = simulator.asked
    assert request == TrainingSearchRequest(scenario=read_training_scenario(scenario, {}))


def test_options_win_over_the_files(
    run: Run, simulator: _Simulator, scenario: Path, tmp_path: Path
) -> None:
    space = tmp_path / "space.yaml"
    space.write_text("tp: [1, 2]\npp: [1]\nzero_stages: [0, 1]\n")
    words = ("--space", space, "--vary", "tp=4", "--global-batch", 32, "--gpus", 16)
    found = run("search", "training", scenario, *words)
    assert found.exit_code == 0, found.output
    (request,) = simulator.asked
    assert request.space == TrainingSpace(
        num_devices=(16,), tp=(4,), pp=(1,), zero_stages=(0, 1), global_batch_sizes=(32,)
    )
    assert request.scenario.global_batch_size == 32


def test_the_example_of_a_space_can_be_asked(run: Run, simulator: _Simulator) -> None:
    examples = Path(__file__).resolve().parents[3] / "docs" / "examples"
    words = (examples / "training.yaml", "--space", examples / "space-training.yaml")
    found = run("search", "training", *words)
    assert found.exit_code == 0, found.output
    (request,) = simulator.asked
    space = request.space
    assert (space.tp, space.overlaps, space.weight_parallel) == ((1, 2, 4, 8), ("data",), ("",))


def test_nodes_of_several_types_make_a_cluster(run: Run, simulator: _Simulator) -> None:
    found = run(
        *("search", "training", "--model", "tiny-llama", "--global-batch", 64),
        *("--nodes", "a100_sxm_80=4x8", "--nodes", "h100_sxm=2", "--subsets"),
        *("--partition", "dynamic", "--price", "h100_sxm=2.5"),
    )
    assert found.exit_code == 0, found.output
    (request,) = simulator.asked
    assert request.space == TrainingSpace(
        node_groups=(
            NodeGroup(device="a100_sxm_80", num_nodes=4, devices_per_node=8),
            NodeGroup(device="h100_sxm", num_nodes=2),
        ),
        usd_per_hour={"h100_sxm": 2.5},
        has_subsets=True,
        partition="dynamic",
        global_batch_sizes=(64,),
    )
    assert request.scenario.device == "a100_sxm_80"


def test_a_list_prices_what_is_searched(run: Run, simulator: _Simulator, tmp_path: Path) -> None:
    """A price that is given goes before the list's."""
    prices = tmp_path / "prices.yaml"
    prices.write_text(_PRICES)
    words = ("--price-list", prices, "--price", "a30=0.5", "--devices", "a30,h100_sxm")
    found = run("search", "training", *_OPTIONS, *words)
    assert found.exit_code == 0, found.output
    assert "h100_sxm: USD 2.5 an hour, on demand, an offer" in found.stderr
    assert run("search", "training", *_OPTIONS, *words, "--spot").exit_code == 0
    on_demand, spot = simulator.asked
    assert on_demand.space.usd_per_hour == {"a30": 0.5, "h100_sxm": 2.5}
    assert spot.space.usd_per_hour == {"a30": 0.5, "h100_sxm": 1.1}


def test_a_request_in_a_file_is_asked_as_it_stands(
    run: Run, simulator: _Simulator, tmp_path: Path
) -> None:
    """What a page shows at its end makes the same query again."""
    expected = schema.decode(
        TrainingSearchRequest, json.loads(build_training_search().request_json)
    )
    path = tmp_path / "request.json"
    path.write_text(build_training_search().request_json)
    found = run("search", "training", "--request", path)
    assert found.exit_code == 0, found.output
    assert simulator.asked == [expected]


def test_a_search_says_what_is_simulated_and_writes_pages_and_tables(
    run: Run, scenario: Path, tmp_path: Path
) -> None:
    page, table = tmp_path / "report.html", tmp_path / "strategies"
    words = ("--page", page, "--export")
    report = build_training_search()
    for ending in (".csv", ".jsonl", ".parquet"):
        found = run("search", "training", scenario, *words, table.with_suffix(ending))
        assert found.exit_code == 0, found.output
        for finalist in report.finalists:
            assert describe_finalist(finalist) in found.stderr
    assert "<h1>llama-2-7b on 16 a100_sxm_80</h1>" in page.read_text()
    with table.with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    lines = [json.loads(line) for line in table.with_suffix(".jsonl").read_text().splitlines()]
    whole = parquet.read_table(table.with_suffix(".parquet")).to_pylist()
    assert lines == whole
    assert [row["name"] for row in rows] == list(report.candidates.name)
    assert [row["name"] for row in lines] == list(report.candidates.name)
    assert lines[0]["micro_batch_size"] == report.candidates.micro_batch_size[0]


def test_json_is_the_whole_report(run: Run, scenario: Path) -> None:
    found = run("--output", "json", "search", "training", scenario)
    report = schema.decode(TrainingSearchReport, json.loads(found.stdout))
    assert report == build_training_search()


def test_a_search_that_runs_is_watched_again(
    run: Run, simulator: _Simulator, scenario: Path
) -> None:
    first = run("search", "training", scenario)
    (job,) = simulator.list_jobs()
    assert f"search {job.job_id} ({job.title}); Ctrl-C cancels it" in first.stderr
    again = run("search", "training", "--job", job.job_id)
    assert again.exit_code == 0, again.output
    assert again.stdout == first.stdout
    assert len(simulator.asked) == 1


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "--model: is needed where no scenario names model, as in --model llama-2-7b"),
        (
            (),
            "; --device: is needed where no scenario names device, as in --device h100_sxm; --gpus",
        ),
        (("--model", "tiny-llama"), "--device: is needed where no scenario names device"),
        (
            ("--model", "tiny-llama", "--device", "a30", "--gpus", "8"),
            "--global-batch-tokens: is needed where no scenario names global_batch_size",
        ),
        (
            ("--model", "tiny-llama", "--device", "a30", "--global-batch", "8"),
            "--gpus: is needed where no scenario has a layout",
        ),
        (("FILE", "--devices", "8"), "8 is no device; how many there are is --gpus 8"),
        (("FILE", "--gpus", "many"), "expected a whole number, got 'many'"),
        (("FILE", "--gpus", "0"), "num_devices: must be at least 1"),
        (
            ("FILE", "--global-batch-tokens", "1000"),
            "1,000 is no multiple of the sequence length, 512",
        ),
        (
            ("FILE", "--global-batch-tokens", "512", "--global-batch", "1"),
            "says the same as --global-batch-tokens: give one",
        ),
        (("FILE", "--vary", "zerostage=1"), "did you mean zero_stage"),
        (("FILE", "--vary", "tp="), "tp has no values: tp=1,2"),
        (("FILE", "--vary", "tp=two"), "--vary tp: expected a whole number, got 'two'"),
        (("FILE", "--vary", "sequence_parallel=maybe"), "expected true or false, got 'maybe'"),
        (("FILE", "--vary", "overlap=some"), "must be of none, data, all"),
        (("FILE", "--set", "zero_stage=1"), "is searched; to fix it: --vary zero_stage=1"),
        (("FILE", "--set", "layout.tp=2"), "is searched; to fix it: --vary tp=2"),
        (("FILE", "--nodes", "a30=two"), "expected a30=4x8, nodes times devices of each"),
        (
            ("FILE", "--nodes", "a30=1", "--nodes", "a40=1", "--generate", "launch"),
            "no framework runs a pipeline over a30 and a40",
        ),
        (("FILE", "--nodes", "a30=2", "--gpus", "8"), "--nodes says already how many there are"),
        (("FILE", "--subsets"), "are of --nodes"),
        (("FILE", "--nodes", "a30=2", "--partition", "luck"), "must be one of even, min_max"),
        (("FILE", "--tokens", "1e9", "--dataset", "c4"), "says the same as --dataset: give one"),
        (("FILE", "--dataset", "c5"), "c4"),
        (("FILE", "--fasop", "x.txt"), "must end in .csv or .jsonl"),
        (("FILE", "--spot"), "is of --price-list"),
        (("FILE", "--price", "a30=cheap"), "expected USD an hour as a30=3.5, got 'cheap'"),
        (("FILE", "--objective", "fame"), "must be one of throughput_per_gpu"),
        (("FILE", "--objective", "cost"), "say what an hour costs: --price a30=USD"),
        (
            ("FILE", "--nodes", "a30=1x2", "--nodes", "a40=1x2", "--objective", "cost"),
            "--price a30=USD --price a40=USD, or --price-list",
        ),
        (("--job", "search-none"), "search-none"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_is_refused_with_what_is_right(
    run: Run, simulator: _Simulator, scenario: Path, words: tuple[str, ...], problem: str
) -> None:
    found = run("search", "training", *(scenario if word == "FILE" else word for word in words))
    assert found.exit_code == 1, found.output
    assert problem in " ".join(found.stderr.split())
    assert simulator.asked == []


def _lines(report: TrainingSearchReport, num_shown: int = 10, num_tokens: float = 0.0) -> list[str]:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(report_table("llama on 16 a100", report, num_shown, num_tokens))
    return [" ".join(line.replace("│", " ").split()) for line in capture.get().splitlines()]


def test_a_report_is_printed_with_ranks_ties_answers_and_counts() -> None:
    lines = _lines(build_training_search(), num_shown=3)
    heading, *_ = (place for place, line in enumerate(lines) if line.startswith("┃ strategy"))
    # The second differs from the first in its micro batch alone.
    assert lines[heading + 2 : heading + 5] == [
        "tp4 pp1 dp4 mbs4 =1 3,072 2,560 3,413 5,334 38.4% 0.0% 9 226",
        "tp2 pp1 dp8 mbs1 3 2,945 2,455 3,273 5,563 36.8% 0.0% 1 236",
        "tp2 pp2 dp4 mbs2 4 2,801 2,334 3,112 5,850 35.0% 11.1% 9 248",
    ]
    for line in (
        "tp4 pp1 dp4 mbs4 1 5,440 ms 5,334 ms -1.96% 3,012 37.6% 0.0% 9 fits",
        "links 2x +6.0% the same 3,256 5,032 ms 40 the same",
        "half the batch -7.0% -9.0% 2,857 5,735 ms 40 another layout",
        "heads not divided 934 tp64 tp 64 does not divide the 32 heads",
        "out of memory 15 tp1 pp1 dp16 mbs1 stage 0 needs 94.1 GiB of 80 GiB",
        "1,000 strategies: 66 can run, 51 have the memory, 3 simulated",
        (
            "1 other strategy ties with tp4 pp1 dp4 mbs4: behind by less than the error of the"
            " difference, so each may be as good; take one for another reason, or measure"
        ),
        "simplest of them: tp4 pp1 dp4 mbs4 itself",
        "to tell the first two by the estimates apart, measure",
        (
            "foretoken plan all_reduce message_bytes=1048576 devices_per_node=4 num_nodes=1"
            " --device a100_sxm_80 --topology a100_dgx (its error moves 2.34% of the step)"
        ),
        "- no measurements of this interconnect",
    ):
        assert line in lines
    effort = (
        "2.5 s, 4.2 s of CPU time, 24 shapes of layers, 100,000 strategies/s in closed form,"
        " predictor v1"
    )
    assert lines[-1] == effort
    roomiest = "tp4 pp4 dp1 mbs1 recompute-full most free memory"
    assert f"{roomiest} 2,038 8,038 59.8 341" in lines
    best = "tp4 pp1 dp4 mbs4 tokens/s per GPU, shortest step, least cost per token 3,072"
    assert any(line.startswith(best) for line in lines)


def test_a_whole_run_is_told_in_steps_days_and_money() -> None:
    """A step is 64 samples of 4,096 tokens; a thousand steps and one token are 1,001 steps."""
    report = build_training_search()
    num_tokens = 1000 * 64 * 4096 + 1
    lines = _lines(report, num_tokens=num_tokens)
    days = 1001 * report.candidates.step_time_ms[0] / 1000 / 86_400
    usd = 1001 * report.candidates.usd_per_step[0]
    assert any(line.endswith(f"1,001 {days:.3g} {format_number(usd)}") for line in lines)


def test_placed_stages_are_printed() -> None:
    lines = _lines(build_placed_search(), num_shown=1)
    assert any(line.endswith(" 8,9,15") for line in lines)


def test_a_search_in_vain_says_so_and_why() -> None:
    report = build_training_search()
    empty = TrainingSearchReport(
        num_points=1000, num_legal=15, ruled_out=report.ruled_out, candidates=StrategyColumns()
    )
    lines = _lines(empty)
    assert "llama on 16 a100: no strategy of this space can run and has the memory" in lines
    assert "1,000 strategies: 15 can run, 0 have the memory, 0 simulated" in lines
    assert "out of memory 15 tp1 pp1 dp16 mbs1 stage 0 needs 94.1 GiB of 80 GiB" in lines
