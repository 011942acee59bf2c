"""Commands of the latency models against a service with fixed answers: what they ask and print."""

import csv
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from foretoken.app.cli.dim_text import parse_values
from foretoken.app.cli.main import app
from foretoken.app.cli.predictor import training_table
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.job import Job
from foretoken.domain.measurements.correction import (
    CorrectedObservation,
    Correction,
    CorrectionRequest,
)
from foretoken.domain.measurements.estimate import (
    Contribution,
    DType,
    Explanation,
    LatencyColumns,
    LatencyEstimate,
    LatencyQuery,
    LatencyReply,
    MeasuredNeighbour,
    MemberAnswer,
    Phase,
    Provenance,
)
from foretoken.domain.measurements.latency_models import ModelVersion, TrainRequest
from foretoken.domain.measurements.planning import (
    CandidateAxis,
    PlannedPoint,
    PlanRequest,
    ProfilePlan,
)
from foretoken.domain.measurements.surface import LatencySurface, SurfaceQuery
from foretoken.domain.results.report import (
    HeldOutCase,
    OperatorTrainingReport,
    PredictorTrainingReport,
    SplitScore,
)
from foretoken.jobs.runner import JobRunner
from foretoken.jobs.service import RunsJobs
from foretoken.predictor.servicer import register

_NEAREST = {"m": 512, "n": 4096, "k": 4096}
_ESTIMATE = LatencyEstimate(
    latency_us=300.0,
    low_us=270.0,
    high_us=330.0,
    provenance=Provenance.INTERPOLATED,
    model_version="v2",
    basis="64 points of vllm 0.19",
    nearest=_NEAREST,
    nearest_us=131.0,
    nearest_octaves=1.0,
)
_EXPLANATION = Explanation(
    estimate=_ESTIMATE,
    floor_us=4.0,
    compute_us=208.0,
    memory_us=72.0,
    efficiency_ratio=0.693,
    tier="gap",
    members=(MemberAnswer(name="trees", latency_us=310.0, weight_ratio=0.75),),
    contributions=(Contribution(feature="tile_m_fill", value=1.0, factor=0.93),),
    neighbours=(MeasuredNeighbour(dims=_NEAREST, latency_us=131.0, distance_octaves=1.0),),
)
_PLAN = ProfilePlan(
    points=(PlannedPoint(dims=_NEAREST, latency_us=131.0, gpu_s=0.25, error_ratio=0.05),),
    num_candidates=8,
    num_measured=3,
    error_before_ratio=0.08,
    error_after_ratio=0.05,
    gpu_s=0.25,
)
_MODELS = tuple(
    ModelVersion(
        version=name, created_at="2026", snapshot_hash="abc", num_rows=64, is_active=name == "v2"
    )
    for name in ("v2", "v1")
)
_CORRECTION = Correction(
    name="mine",
    device="a30",
    created_at="2026",
    model_version="v2",
    factors={"": 1.5, "gemm": 1.25},
    observations=(
        CorrectedObservation(
            name="step", observed_us=100.0, raw_us=80.0, corrected_us=101.0, left_out_us=104.0
        ),
    )
    * 2,
    raw_error_ratio=0.2,
    corrected_error_ratio=0.01,
    left_out_error_ratio=0.04,
)
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


class _Predictor(RunsJobs):
    """Answers every question alike, and keeps what it was asked."""

    def __init__(self, folder: Path) -> None:
        super().__init__(JobRunner(folder))
        self.asked: list[LatencyQuery | PlanRequest | CorrectionRequest | str] = []

    def predict(self, query: LatencyQuery) -> LatencyReply:
        self.asked.append(query)
        factor = 1.5 if query.correction else 1.0
        (table,) = query.tables
        columns = LatencyColumns(
            latency_us=np.array([_ESTIMATE.latency_us]) * factor,
            low_us=np.array([_ESTIMATE.low_us]) * factor,
            high_us=np.array([_ESTIMATE.high_us]) * factor,
            provenance=np.array([_ESTIMATE.provenance.value]),
            nearest={name: np.array([_NEAREST[name]]) for name in table.columns},
            nearest_us=np.array([_ESTIMATE.nearest_us]),
            nearest_octaves=np.array([_ESTIMATE.nearest_octaves]),
            basis=_ESTIMATE.basis,
            correction_factor=factor,
        )
        return LatencyReply(model_version="v2", tables=(columns,))

    def explain(self, query: LatencyQuery) -> Explanation:
        self.asked.append(query)
        return _EXPLANATION

    def plan_profile(self, request: PlanRequest) -> ProfilePlan:
        self.asked.append(request)
        return _PLAN

    def create_correction(self, request: CorrectionRequest) -> Correction:
        self.asked.append(request)
        return _CORRECTION

    def list_corrections(self) -> tuple[Correction, ...]:
        return (_CORRECTION,)

    def list_models(self) -> tuple[ModelVersion, ...]:
        return _MODELS

    def activate_model(self, version: str) -> ModelVersion:
        self.asked.append(version)
        return replace(_MODELS[1], is_active=True)

    def tabulate(self, query: SurfaceQuery) -> LatencySurface:
        raise AssertionError(query)

    def create_training(self, request: TrainRequest) -> Job:
        raise AssertionError(request)

    def get_training_report(self, job_id: str) -> PredictorTrainingReport:
        raise AssertionError(job_id)


@pytest.fixture
def predictor(tmp_path: Path) -> _Predictor:
    """Return a predictor to be asked."""
    return _Predictor(tmp_path / "jobs")


Run = Callable[..., str]


@pytest.fixture
def run(predictor: _Predictor, tmp_path: Path) -> Iterator[Run]:
    """Return a function that runs a command against the predictor and returns its output."""
    server = grpc.server(ThreadPoolExecutor(2))
    register(server, predictor)
    endpoint = f"predictor=127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()

    def run_program(*words: str) -> str:
        runner = CliRunner(env={"FORETOKEN_HOME": str(tmp_path), "COLUMNS": "160"})
        outcome = runner.invoke(app, ["--endpoint", endpoint, *words])
        assert outcome.exit_code == 0, outcome.output
        return outcome.stdout

    yield run_program
    server.stop(grace=None).wait()


def test_words_say_what_is_asked_and_what_may_answer(run: Run, predictor: _Predictor) -> None:
    text = run(
        *("predict", "gemm", "m=1024", "n=4096", "k=4096", "--device", "a30", "--as-measured"),
        *("dtype=fp8", "variant=quant=fp8_block", "kernel=cublas", "framework=vllm"),
        *("model_version=v2", "correction=mine"),
    )
    (query,) = predictor.asked
    assert isinstance(query, LatencyQuery)
    (table,) = query.tables
    assert (DType.FP8, "quant=fp8_block", "cublas") == (table.dtype, table.variant, table.kernel)
    expected = ("vllm", "v2", "mine", True)
    found = (query.framework, query.model_version, query.correction, query.prefer_measured)
    assert expected == found
    # The raw figure stands next to the corrected one.
    assert "uncorrected (µs)" in text
    assert "450 │              300 " in text
    assert "rests on 64 points of vllm 0.19" in text
    assert "nearest measurement: 131 µs at m=512 n=4096 k=4096, a factor 2 away" in text


def test_an_explanation_shows_all_it_is_made_of(run: Run) -> None:
    words = ("predict", "gemm", "m=1024", "n=4096", "k=4096", "--device", "a30", "--explain")
    text = run(*words)
    for part in ("launch (µs)", "69.3%", "gap", "trees", "75.0%", "tile_m_fill", "away (octaves)"):
        assert part in text
    assert json.loads(run("--output", "json", *words))["neighbours"][0]["dims"] == _NEAREST


def test_a_plan_is_a_ranked_table_and_a_file(
    run: Run, predictor: _Predictor, tmp_path: Path
) -> None:
    path = tmp_path / "points.csv"
    text = run(
        *("plan", "gemm", "m=1:8,6", "n=4096", "dtype=fp16", "phase=backward", "seed=7"),
        *("--device", "a30", "--budget", "60s", "--max-points", "5", "--points-csv", str(path)),
    )
    assert predictor.asked == [
        PlanRequest(
            device="a30",
            operator="gemm",
            dtype=DType.FP16,
            phase=Phase.BACKWARD,
            axes=(
                CandidateAxis(dim="m", values=(1, 2, 4, 6, 8)),
                CandidateAxis(dim="n", values=(4096,)),
            ),
            budget_gpu_s=60.0,
            max_num_points=5,
            seed=7,
        )
    ]
    assert "expected mean error 8.00% -> 5.00% with 1 points in 0.25 GPU seconds" in text
    with path.open(encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert ("gemm", "fp16", "backward", "512") == tuple(
        row[name] for name in ("operator", "dtype", "phase", "m")
    )


def test_a_correction_is_shown_beside_what_is_raw(
    run: Run, predictor: _Predictor, tmp_path: Path
) -> None:
    path = tmp_path / "observations.json"
    call = {"operator": "gemm", "dtype": "bf16", "dims": {"m": 8, "n": 8, "k": 8}, "count": 32}
    path.write_text(json.dumps([{"name": "step", "observed_us": 100, "calls": [call]}]))
    text = run("calibrate", "mine", str(path), "--device", "a30", "--by-group")
    (request,) = predictor.asked
    assert isinstance(request, CorrectionRequest)
    (observed,) = request.observations[0].calls
    assert (True, 32.0, {"m": 8, "n": 8, "k": 8}) == (
        request.by_group,
        observed.count,
        observed.call.dims,
    )
    assert "factors: all x1.5, gemm x1.25" in text
    assert "mean error: raw 20.0%, corrected 1.0%" in text
    # Each observation's own errors: raw, corrected, left out.
    assert all(error in text for error in ("-20.0%", " 1.0%", " 4.0%"))
    assert "all x1.5, gemm x1.25" in run("list", "corrections")


def test_versions_are_listed_and_chosen(run: Run, predictor: _Predictor) -> None:
    rows = json.loads(run("--output", "json", "models", "list"))
    assert {"v2": "yes", "v1": "-"} == {row["version"]: row["active"] for row in rows}
    assert "yes" in run("models", "use", "v1")
    assert ["v1"] == predictor.asked


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7", (7,)),
        ("4,1,2,2", (1, 2, 4)),
        ("1:8", (1, 2, 4, 8)),
        ("3:20", (3, 6, 12)),
        ("128:400:128", (128, 256, 384)),
        ("1:4,100", (1, 2, 4, 100)),
        ("0:2:1", (0, 1, 2)),
    ],
)
def test_values_are_lists_and_ranges(text: str, expected: tuple[int, ...]) -> None:
    assert expected == parse_values("m", text)


@pytest.mark.parametrize("text", ["0:8", "8:1", "1:8:0", "1:2:3:4", "1:1000000000:1"])
def test_a_range_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="m: "):
        parse_values("m", text)


def test_a_value_that_is_no_number_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="m: expected a whole number, got 'many'"):
        parse_values("m", "1,many")


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


def _run(home: Path, *words: str) -> Result:
    return CliRunner(env={"FORETOKEN_HOME": str(home), "COLUMNS": "100"}).invoke(app, words)


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
        assert outcome.exit_code == 0, outcome.stderr
        names = outcome.stdout.splitlines()[4]
        assert "v100_pcie_16" in names
        assert "attention_prefill_window" in names
        assert max(map(len, outcome.stdout.splitlines())) <= 100


def test_a_past_training_is_shown_whole_as_json(tmp_path: Path, job_id: str) -> None:
    outcome = _run(tmp_path, "--output", "json", "train", "--job", job_id)
    assert outcome.exit_code == 0, outcome.stderr
    assert schema.decode(PredictorTrainingReport, json.loads(outcome.stdout)) == _REPORT


def test_the_page_is_written_beside_the_table(tmp_path: Path, job_id: str) -> None:
    page = tmp_path / "page.html"
    outcome = _run(tmp_path, "train", "--job", job_id, "--report", str(page))
    assert outcome.exit_code == 0, outcome.stderr
    assert f"page written to {page}" in outcome.stderr.replace("\n", "")
    assert "m\u00a065536, n\u00a016, k\u00a016" in page.read_text(encoding="utf-8")


def test_a_page_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    outcome = _run(tmp_path, "train", "--report", str(tmp_path / "absent" / "page.html"))
    assert outcome.exit_code == 2
    assert "no folder" in outcome.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_past_training_takes_no_options_of_a_new_one(tmp_path: Path) -> None:
    outcome = _run(tmp_path, "train", "--job", "train-1", "--device", "a30")
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    assert "a past training has its own device, operator and seed" in outcome.stderr


def test_an_unknown_training_is_an_error_in_one_line(tmp_path: Path) -> None:
    outcome = _run(tmp_path, "train", "--job", "train-1")
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    assert outcome.stderr.startswith("error (unknown_job)")


def test_a_negative_seed_is_wrong_usage(tmp_path: Path) -> None:
    outcome = _run(tmp_path, "train", "--seed", "-1")
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert list(tmp_path.iterdir()) == []
