"""`simulate training`, `simulate run` and `validate training`: what they print and write."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from foretoken.app.cli.main import app
from foretoken.app.cli.simulate import training_table
from foretoken.domain.results.report import Feasibility, Percentiles
from foretoken.domain.results.training_report import StageMemory, TrainingReport
from foretoken.domain.units import GIB

_SCENARIO = """\
model: tiny-llama
device: cpu
dtype: fp32
layout: {pp: 2}
sequence_length: 128
global_batch_size: 4
"""
_REPORT = TrainingReport(
    step_time_ms=20_000.0,
    step_time_raw_ms=16_000.0,
    step_time_low_ms=15_000.0,
    step_time_high_ms=30_000.0,
    step_spread_ms=Percentiles(p50=20_000.0, p90=21_000.0, p99=24_000.0),
    mfu_ratio=0.4,
    hfu_ratio=0.5,
    step_time_ms_by_group={"optimizer": 2_000.0, "gradient_reduction": 18_000.0},
    communication_ms_by_axis={"dp": 90.0},
    exposed_ms_by_axis={"dp": 30.0},
    memory=(StageMemory(stage=0, weights_bytes=2 * GIB, largest="weights", advice="use ZeRO"),),
    notes=("gemm is guessed",),
)

Run = Callable[..., Result]
_RUN = """\
model: tiny-llama
device: a100_sxm_80
topology: a100_dgx
layout: {dp: 2}
sequence_length: 128
global_batch_size: 16
"""

_SMALL = """\
model: tiny-llama
device: a100_sxm_80
layout: {dp: 2, pp: 2}
sequence_length: 128
global_batch_size: 4
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(_SCENARIO)
    return path


@pytest.fixture
def run(home_path: str) -> Run:
    def invoke(*words: object) -> Result:
        return CliRunner().invoke(app, ["--home", home_path, *map(str, words)])

    return invoke


def _text(report: TrainingReport) -> list[str]:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(training_table("big", report))
    lines = capture.get().splitlines()
    return [" ".join(line.replace("│", " ").split()) for line in lines]


def test_a_report_is_printed_with_interval_spread_breakdown_and_memory() -> None:
    lines = _text(_REPORT)
    for line in (
        "step time (s) 20",
        "not calibrated (s) 16 (calibration: +25.0%)",
        "90 % interval (s) 15 to 30",
        "over steps, p50 / p90 / p99 (s) 20 / 21 / 24",
        "MFU 40.0%",
        "HFU 50.0%",
        "gradient reduction 18,000.0 90.0%",
        "dp 90 30",
        "stage 0 2.00 0.00 0.00 weights",
        "- use ZeRO",
        "- gemm is guessed",
    ):
        assert line in lines


def test_what_cannot_run_is_printed_with_its_reason() -> None:
    reason = Feasibility(is_feasible=False, reason="3 does not divide 32 heads")
    lines = _text(TrainingReport(feasibility=reason))
    assert "feasible no: 3 does not divide 32 heads" in lines
    assert not any("step time" in line for line in lines)


def test_many_stages_are_cut_to_those_with_the_least_margin() -> None:
    memory = tuple(
        StageMemory(stage=stage, reserved_bytes=(64 - stage) * GIB, device_bytes=80 * GIB)
        for stage in range(64)
    )
    lines = _text(replace(_REPORT, memory=memory))
    assert "stage 15 0.00 49.00 31.00 -" in lines
    assert not any(line.startswith("stage 16 ") for line in lines)
    assert any("16 of 64 stages" in line for line in lines)


def test_a_step_is_written_as_page_trace_and_tables(
    tmp_path: Path, scenario: Path, run: Run
) -> None:
    page, trace = tmp_path / "step.html", tmp_path / "step.json"
    spans, memory = tmp_path / "spans.csv", tmp_path / "memory.parquet"
    outcome = run(
        *("simulate", "training", scenario, "--html", page, "--trace", trace),
        *("--table", f"spans={spans}", "--table", f"memory={memory}"),
    )
    assert outcome.exit_code == 0, outcome.output
    with spans.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {"forward", "backward", "optimizer"} <= {row["kind"] for row in rows}
    assert {"0", "1"} == {row["stage"] for row in rows}
    events = json.loads(trace.read_text())["traceEvents"]
    assert len(rows) == sum(event["ph"] == "X" for event in events)
    assert "Where the time goes" in page.read_text()
    assert memory.read_bytes().startswith(b"PAR1")


def test_an_unknown_table_is_refused_before_the_work(scenario: Path, run: Run) -> None:
    outcome = run("simulate", "training", scenario, "--table", "requests=r.csv")
    assert outcome.exit_code == 2
    assert "the tables are spans, memory" in outcome.output


def test_a_validation_is_written_as_page_and_table(
    tmp_path: Path, scenario: Path, run: Run
) -> None:
    measured = tmp_path / "measured.csv"
    measured.write_text(
        "component,stage,time_ms,flags\nstep,,50,\nstep,,52,\n"
        "stage_fwd,0,3,\nstage_bwd,0,6,\nstage_bwd,1,9,waits\n"
    )
    page, table = tmp_path / "page.html", tmp_path / "components.csv"
    outcome = run(
        *("--output", "json", "validate", "training", scenario),
        *("--measured", measured, "--html", page, "--csv", table),
    )
    assert outcome.exit_code == 0, outcome.output
    found = json.loads(outcome.stdout)
    assert 51.0 == found["step"]["measured_ms"]
    assert {"step", "stage_fwd", "stage_bwd"} <= {
        score["name"] for score in (found["step"], *found["scores"])
    }
    assert "What the error of the step comes from" in page.read_text()
    assert "data sheet, by time" in page.read_text()
    assert "training tiny-llama" in found["echo"]["question"]
    with table.open(newline="") as file:
        scored = {(row["name"], row["stage"]): row["is_scored"] for row in csv.DictReader(file)}
    assert {"True", "False"} == {scored["stage_bwd", stage] for stage in ("0", "1")}


def test_steps_alone_are_validated_and_several_scenarios_summed_up(
    tmp_path: Path, scenario: Path, run: Run
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(_SCENARIO)
    measured = tmp_path / "measured.csv"
    measured.write_text("scenario,time_ms\nsmall,50\nother,60\n")
    outcome = run("validate", "training", scenario, other, "--measured", measured)
    assert outcome.exit_code == 0, outcome.output
    assert 2 == outcome.stdout.count("whole steps only")
    assert "question: training tiny-llama" in outcome.stdout
    assert "Errors of all runs" in outcome.stdout
    named = run("validate", "training", scenario, other, "--measured", measured, "--run", "small")
    assert named.exit_code == 2
    assert "one scenario" in named.output


def test_steps_without_repetitions_have_no_table_of_their_stability(
    scenario: Path, run: Run, tmp_path: Path
) -> None:
    table = tmp_path / "measured.csv"
    table.write_text("time_ms\n50\n")
    assert "Stability" not in run("validate", "training", scenario, "--measured", table).stdout
    table.write_text("time_ms\n50\n51\n")
    assert "Stability" in run("validate", "training", scenario, "--measured", table).stdout


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(_RUN)
    return path


def test_a_run_prints_days_money_and_a_target(run: Run, run_file: Path, tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    result = run(
        *("simulate", "run", run_file, "--tokens", "1e12", "--price-list", "coreweave", "--spot"),
        *("--set", "failures.device_mtbf_hours=100", "--set", "failures.checkpoint_s=10"),
        *("--set", "layout.dp=4", "--target-days", "1", "--html", page),
    )
    assert result.exit_code == 3, result.output
    for text in (
        "1,000 billion tokens on",
        "tokens/s per GPU, in a step",
        "days, expected",
        "cost (USD)",
        "coreweave",
        "spot",
        "steps done again",
        "1 days",
    ):
        assert text in result.output
    written = page.read_text()
    for text in ("Where the days go", "Checkpoints", "More or fewer devices", "coreweave"):
        assert text in written


def test_json_has_what_options_and_changes_say(run: Run, run_file: Path) -> None:
    """8,192 tokens are two steps of 2 sites x 16 samples x 128 tokens."""
    result = run(
        *("--output", "json", "simulate", "run", run_file, "--tokens", "8192"),
        *("--set", "sites.num_sites=2", "--set", "sites.bytes_per_s=1e9"),
        *("--set", "prices.usd_per_hour=2"),
    )
    report = json.loads(result.stdout)
    assert (report["num_steps"], report["num_devices"], report["usd_per_hour"]) == (2, 4, 2)
    request = json.loads(report["request_json"])
    assert request["sites"]["bytes_per_s"] == 1e9
    assert request["scenario"]["layout"]["dp"] == 2


def test_a_file_may_be_the_whole_request(run: Run, run_file: Path, tmp_path: Path) -> None:
    """And the request of a report is one: it is answered alike."""
    request = tmp_path / "run.yaml"
    request.write_text(
        f"scenario: {run_file.name}\nnum_tokens: 1e9\n"
        "failures: {device_mtbf_hours: 100, checkpoint_s: 5}\nprices: {usd_per_hour: 2}\n"
    )
    words = ("--set", "failures.checkpoint_s=7", "--target-days", "30")
    first = json.loads(run("--output", "json", "simulate", "run", request, *words).stdout)
    again = tmp_path / "again.yaml"
    again.write_text(first["request_json"])
    second = json.loads(run("--output", "json", "simulate", "run", again).stdout)
    assert (first["checkpoint_s"], first["usd_per_hour"]) == (7, 2)
    assert first["target_devices"] > 0
    own = {"request_json": "", "job_id": ""}
    assert {**second, **own} == {**first, **own}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "by one of them: --tokens 1e12, or --dataset slimpajama"),
        (("--tokens", "1e9", "--dataset", "pile"), "by one of them: --tokens 1e12"),
        (("--tokens", "-1"), "--tokens: must be positive"),
        (("--dataset", "piel"), "did you mean pile"),
        (("--tokens", "1e9", "--price-list", "lamda"), "did you mean lambda"),
        (("--tokens", "1e9", "--price-list", "gcp"), "gcp has no price of a100_sxm_80"),
        (("--tokens", "1e9", "--set", "failures.mtbf=1"), "failures.mtbf: unknown key"),
        (("--tokens", "1e9", "--set", "layout.tq=2"), "layout.tq: unknown key"),
        (("--tokens", "1e9", "--set", "sites.num_sites=2"), "several sites need a link"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    run: Run, run_file: Path, words: tuple[str, ...], message: str
) -> None:
    result = run("simulate", "run", run_file, *words)
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())


def test_lists_have_prices_and_datasets_with_their_sources(run: Run) -> None:
    prices = json.loads(run("--output", "json", "list", "prices").stdout)
    assert {"lambda", "aws", "gcp"} <= {row["list"] for row in prices}
    datasets = json.loads(run("--output", "json", "list", "datasets").stdout)
    assert {"pile", "llama-3"} <= {row["dataset"] for row in datasets}
    assert all(row["source"] for row in (*prices, *datasets))


def test_traffic_is_written_as_a_table_and_as_a_heat_map(tmp_path: Path) -> None:
    """Two micro batches of 128 tokens of 512 features in two bytes go over each boundary."""
    scenario, table = tmp_path / "small.yaml", tmp_path / "traffic.csv"
    picture = tmp_path / "traffic.svg"
    scenario.write_text(_SMALL)
    words = [
        *("--home", tmp_path / "home", "simulate", "training", scenario),
        *("--table", f"traffic={table}", "--heat-map", picture),
    ]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    with table.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["axis"] == "pp"]
    sent = {(row["source"], row["target"]): float(row["bytes"]) for row in rows}
    for pair in (("0", "2"), ("2", "0"), ("1", "3"), ("3", "1")):
        # With them go the four bytes of a norm that all agree on.
        assert 0 <= sent[pair] - 2 * 128 * 512 * 2 < 100
    assert "sending device" in picture.read_text(encoding="utf-8")
