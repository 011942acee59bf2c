"""A question about what was measured and never trained on trains what it needs, and no more."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from predictor_fakes import (
    FakeCatalog,
    Rows,
    Train,
    all_reduce_rows,
    base_us,
    columns_of,
    gemm_rows,
    row_of,
)

from foretoken.domain.errors import UnknownMeasurementError, UnknownModelVersionError
from foretoken.domain.job import JobState
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyQuery,
    LatencyReply,
    OperatorTable,
    Provenance,
)
from foretoken.domain.measurements.latency_models import TrainRequest
from foretoken.domain.measurements.measurement import (
    ArrowStream,
    Coverage,
    MeasurementFilter,
    Run,
    RunKind,
    RunSummary,
)
from foretoken.domain.results.report import PredictorTrainingReport
from foretoken.jobs.runner import JobProgress, JobRunner
from foretoken.predictor.config import BoosterConfig, PredictorConfig
from foretoken.predictor.learned_folder import LearnedFolder
from foretoken.predictor.service import PredictorService
from foretoken.predictor.trainer import hash_training
from foretoken.predictor.training_rows import read_series
from foretoken.wire.arrow import rows_to_table

BETWEEN = {"m": 600, "n": 4096, "k": 4096}
FAR = {"m": 65536, "n": 4096, "k": 4096}
RMS_NORM = {"num_tokens": 64, "hidden": 4096}


@dataclass
class MeasuredCatalog(FakeCatalog):
    """Says what its rows cover, and notes what is read of them."""

    reads: list[tuple[str, str]] = field(default_factory=list)
    num_looks: int = 0
    num_counts: int = 0

    def describe_coverage(self) -> tuple[Coverage, ...]:
        """Return a line for every row."""
        self.num_counts += 1
        return tuple(
            Coverage(
                operator=row["operator"],
                device=row["device"],
                topology=row.get("topology", ""),
                dtype=row["dtype"],
                phase=row["phase"],
                num_rows=1,
                num_flagged=0,
                num_failed=0,
                frameworks=(f"{row.get('framework', '')} {row.get('framework_version', '')}",),
            )
            for row in self.rows
        )

    def list_runs(self) -> tuple[RunSummary, ...]:
        """Return one run of all rows."""
        self.num_looks += 1
        run = Run(run_id="run", kind=RunKind.PROFILE, tool="test")
        return (RunSummary(run=run, started_at="2026-01-01", num_rows=len(self.rows)),)

    def read_measurements(self, selection: MeasurementFilter) -> ArrowStream:
        """Return the selected rows."""
        self.reads.append((selection.operator, selection.device))
        return FakeCatalog.read_measurements(self, selection)


Open = Callable[..., PredictorService]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return where the predictors of a test keep their files."""
    return tmp_path / "state"


@pytest.fixture
def open_over(folder: Path) -> Iterator[Open]:
    """Return a function that opens one more predictor over a catalog, on the same files."""
    with ExitStack() as opened:

        def make(
            catalog: FakeCatalog, *, train_on_demand: bool = True, refresh_s: float = 10.0
        ) -> PredictorService:
            config = PredictorConfig(
                state_folder=str(folder),
                booster=BoosterConfig(num_trees=20),
                train_on_demand=train_on_demand,
                refresh_s=refresh_s,
            )
            service = PredictorService(config, catalog)
            service.open()
            opened.callback(service.close)
            return service

        yield make


def reply_of(
    service: PredictorService,
    dims: dict[str, int],
    operator: str = "gemm",
    dtype: DType = DType.FP16,
    device: str = "a30",
    **query: object,
) -> LatencyReply:
    table = OperatorTable(operator=operator, dtype=dtype, columns=columns_of(dims))
    return service.predict(LatencyQuery(device=device, tables=(table,), **query))  # type: ignore[arg-type]


def provenance_of(reply: LatencyReply) -> Provenance:
    return Provenance(int(reply.tables[0].provenance[0]))


def latency_of(reply: LatencyReply) -> float:
    return float(reply.tables[0].latency_us[0])


def kept_in(folder: Path) -> list[str]:
    return sorted(LearnedFolder(folder / "learned"))


def norm_rows() -> Rows:
    rows = []
    for num_tokens in (1, 4, 16, 64, 256, 1024):
        for hidden in (1024, 2048, 4096):
            dims = {"num_tokens": num_tokens, "hidden": hidden}
            rows.append(row_of("rms_norm", dims, 2.0 * base_us("rms_norm", dims)))
    return rows


def test_a_question_is_answered_as_after_a_training(open_over: Open, train: Train) -> None:
    service = open_over(MeasuredCatalog(gemm_rows()))
    before = reply_of(service, BETWEEN)
    train(service)
    after = reply_of(service, BETWEEN)
    assert provenance_of(before) is Provenance.INTERPOLATED
    assert latency_of(before) == latency_of(after)
    assert "64 points of gemm on a30 (fp16), trained on demand" == before.tables[0].basis
    assert "64 points of gemm on a30 (fp16)" == after.tables[0].basis
    assert before.model_version.startswith("on-demand-")


def test_only_what_is_asked_for_is_read_and_trained(open_over: Open, folder: Path) -> None:
    catalog = MeasuredCatalog([*gemm_rows(), *gemm_rows(dtype="bf16"), *norm_rows()])
    service = open_over(catalog)
    reply_of(service, BETWEEN)
    assert [("gemm", "a30")] == catalog.reads
    assert len(kept_in(folder)) == 1


@pytest.mark.parametrize(("version", "num_reads"), [("0.25.0", 1), ("0.26.0", 1), ("0.28.0", 2)])
def test_another_product_of_the_chip_is_read_only_for_software_nearer_to_what_was_asked(
    open_over: Open, version: str, num_reads: int
) -> None:
    own = gemm_rows(device="h200_sxm", framework="vllm", framework_version="0.26.0")
    other = gemm_rows(device="h100_sxm", framework="vllm", framework_version=version)
    catalog = MeasuredCatalog([*own, *other])
    asked = {"device": "h200_sxm", "preferred_framework": "vllm 0.28-0.31"}
    reply_of(open_over(catalog), BETWEEN, **asked)  # type: ignore[arg-type]
    assert [("gemm", "h200_sxm"), ("gemm", "h100_sxm")][:num_reads] == catalog.reads


@pytest.mark.parametrize(("farthest", "num_trained"), [(2048, 1), (65536, 2)])
def test_older_software_is_trained_only_where_its_points_are_nearer(
    open_over: Open, folder: Path, farthest: int, num_trained: int
) -> None:
    def rows_of(version: str) -> Rows:
        return gemm_rows(framework="vllm", framework_version=version)

    dims = {"m": farthest, "n": 4096, "k": 4096}
    latency_us = 3.0 * base_us("gemm", dims)
    beyond = row_of("gemm", dims, latency_us, framework="vllm", framework_version="0.25.0")
    rows = [*rows_of("0.26.0"), *rows_of("0.25.0"), beyond]
    catalogs = MeasuredCatalog(rows), MeasuredCatalog(rows)
    first, second = (
        reply_of(open_over(catalog), FAR, preferred_framework="vllm 0.26") for catalog in catalogs
    )
    trained = [name for name in kept_in(folder) if not name.endswith("-points")]
    assert num_trained == len(trained)
    assert latency_of(first) == latency_of(second)
    assert [("gemm", "a30")] == catalogs[0].reads
    assert [] == catalogs[1].reads


def test_the_next_process_neither_reads_nor_trains(open_over: Open) -> None:
    first, second = MeasuredCatalog(gemm_rows()), MeasuredCatalog(gemm_rows())
    before = reply_of(open_over(first), BETWEEN)
    after = reply_of(open_over(second), BETWEEN)
    assert second.reads == []
    assert second.num_counts == 0
    assert before.model_version == after.model_version
    assert latency_of(before) == latency_of(after)


def test_a_training_takes_over_what_was_learned(
    open_over: Open, train: Train, folder: Path
) -> None:
    service = open_over(MeasuredCatalog([*gemm_rows(), *norm_rows()]))
    reply_of(service, BETWEEN)
    report = train(service)
    assert report.num_reused == 1
    assert kept_in(folder) == []
    assert reply_of(service, BETWEEN).model_version == report.model_version


def test_a_training_of_another_operator_leaves_what_was_learned(
    open_over: Open, folder: Path
) -> None:
    service = open_over(MeasuredCatalog([*gemm_rows(), *norm_rows()]))
    reply_of(service, BETWEEN)
    job = service.create_training(TrainRequest(operator="rms_norm"))
    *_, last = service.watch_job(job.job_id)
    assert last.state is JobState.SUCCEEDED
    assert len(kept_in(folder)) == 1


def test_it_can_be_switched_off(open_over: Open) -> None:
    catalog = MeasuredCatalog(gemm_rows())
    reply = reply_of(open_over(catalog, train_on_demand=False), BETWEEN)
    assert provenance_of(reply) is Provenance.ANALYTICAL
    assert reply.model_version == ""
    assert catalog.reads == []


def test_what_was_not_measured_is_not_looked_for(open_over: Open, folder: Path) -> None:
    catalog = MeasuredCatalog(gemm_rows())
    reply = reply_of(open_over(catalog), RMS_NORM, operator="rms_norm")
    assert provenance_of(reply) is Provenance.ANALYTICAL
    assert catalog.reads == []
    assert kept_in(folder) == []


def test_a_version_answers_what_it_knows_and_the_rest_is_learned(
    open_over: Open, train: Train
) -> None:
    catalog = MeasuredCatalog(gemm_rows())
    service = open_over(catalog, refresh_s=1e-9)
    version = train(service).model_version
    catalog.rows = [*catalog.rows, *norm_rows()]
    known = reply_of(service, BETWEEN)
    learned = reply_of(service, RMS_NORM, operator="rms_norm")
    assert "64 points of gemm on a30 (fp16)" == known.tables[0].basis
    assert provenance_of(learned) is Provenance.MEASURED
    assert learned.model_version.startswith(f"{version}.on-demand-")


def test_what_a_version_knows_is_answered_without_a_look_at_the_catalog(
    open_over: Open, train: Train
) -> None:
    catalog = MeasuredCatalog([*gemm_rows(), *norm_rows()])
    version = train(open_over(catalog)).model_version
    catalog.num_looks = 0
    service = open_over(catalog)
    assert version == reply_of(service, BETWEEN).model_version
    assert catalog.num_looks == 0
    reply_of(service, BETWEEN, device="h100_sxm")
    assert catalog.num_looks == 1


def test_new_rows_are_learned_anew(open_over: Open, folder: Path) -> None:
    catalog = MeasuredCatalog(gemm_rows())
    service = open_over(catalog, refresh_s=1e-9)
    before = reply_of(service, BETWEEN)
    catalog.rows = [*gemm_rows(lambda _: 5.0), row_of("gemm", FAR, 5.0 * base_us("gemm", FAR))]
    after = reply_of(service, BETWEEN)
    assert 3.0 * latency_of(before) == pytest.approx(latency_of(after), rel=0.05)
    assert before.model_version != after.model_version
    assert len(kept_in(folder)) == 2


def test_of_a_subject_with_new_rows_only_the_changed_series_are_trained_again(
    open_over: Open, folder: Path
) -> None:
    catalog = MeasuredCatalog([*gemm_rows(), *gemm_rows(dtype="bf16")])
    service = open_over(catalog, refresh_s=1e-9)
    reply_of(service, BETWEEN)
    reply_of(service, BETWEEN, dtype=DType.BF16)
    before = kept_in(folder)
    catalog.rows = [
        *gemm_rows(),
        *gemm_rows(dtype="bf16"),
        row_of("gemm", FAR, base_us("gemm", FAR), dtype="bf16"),
    ]
    reply_of(service, BETWEEN)
    assert before == kept_in(folder)
    reply_of(service, BETWEEN, dtype=DType.BF16)
    assert 3 == len(kept_in(folder))
    assert set(before) < set(kept_in(folder))


def test_what_is_learned_is_kept_by_the_rows_it_was_trained_on(
    open_over: Open, folder: Path
) -> None:
    """Rows that changed after they were outlined make no model of what they were before."""
    changed = gemm_rows(lambda _: 5.0, dtype="bf16")
    reply_of(open_over(MeasuredCatalog([*gemm_rows(), *gemm_rows(dtype="bf16")])), BETWEEN)
    (first,) = kept_in(folder)
    reply_of(open_over(MeasuredCatalog([*gemm_rows(), *changed])), BETWEEN, dtype=DType.BF16)
    (series,) = read_series(rows_to_table(changed))
    config = PredictorConfig(state_folder="", booster=BoosterConfig(num_trees=20))
    assert {first, hash_training(series, config, 0)} == set(kept_in(folder))


def test_the_name_of_what_answered_can_be_asked_for(open_over: Open) -> None:
    service = open_over(MeasuredCatalog(gemm_rows()))
    first = reply_of(service, BETWEEN)
    again = reply_of(service, BETWEEN, model_version=first.model_version)
    assert latency_of(first) == latency_of(again)
    with pytest.raises(UnknownModelVersionError):
        reply_of(service, BETWEEN, model_version="on-demand-000000000000")


def test_names_are_looked_up_among_what_was_measured(open_over: Open) -> None:
    rows = gemm_rows(framework="vllm", framework_version="0.19")
    service = open_over(MeasuredCatalog(rows))
    assert provenance_of(reply_of(service, BETWEEN, framework="vllm 0.19")).is_covered
    with pytest.raises(UnknownMeasurementError):
        reply_of(service, BETWEEN, framework="sglang")


def test_who_refuses_extrapolation_gets_what_is_covered(open_over: Open) -> None:
    service = open_over(MeasuredCatalog(gemm_rows()))
    assert provenance_of(reply_of(service, BETWEEN, refuse_extrapolation=True)).is_covered


def test_collectives_are_learned_by_their_topology(open_over: Open) -> None:
    service = open_over(MeasuredCatalog(all_reduce_rows()))
    dims = {"message_bytes": 2**20, "devices_per_node": 8, "num_nodes": 1}
    reply = reply_of(
        service, dims, operator="all_reduce", device="a100_sxm_80", topology="a100_dgx"
    )
    assert provenance_of(reply) is Provenance.MEASURED


def test_what_is_damaged_is_trained_again(open_over: Open, folder: Path) -> None:
    before = reply_of(open_over(MeasuredCatalog(gemm_rows())), BETWEEN)
    for kind in ("series", "subjects"):
        (path,) = (folder / "learned").glob(f"*/*.{kind}")
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    after = reply_of(open_over(MeasuredCatalog(gemm_rows())), BETWEEN)
    assert latency_of(before) == latency_of(after)


def test_processes_that_learn_at_once_leave_whole_files(open_over: Open, folder: Path) -> None:
    services = [open_over(MeasuredCatalog(gemm_rows())) for _ in range(4)]
    found: list[float] = []
    threads = [
        threading.Thread(target=lambda own=own: found.append(latency_of(reply_of(own, BETWEEN))))
        for own in services
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    files = [path.suffix for path in (folder / "learned").glob("*/*")]
    assert [".outline", ".series", ".subjects"] == sorted(files)


def test_the_job_that_asks_says_what_is_trained(open_over: Open, tmp_path: Path) -> None:
    service = open_over(MeasuredCatalog(gemm_rows()))
    runner = JobRunner(tmp_path / "jobs")
    runner.open()
    asked, seen = threading.Event(), threading.Event()
    told: list[str] = []

    def work(progress: JobProgress) -> PredictorTrainingReport | None:
        progress.update(0.5, "asking")
        assert asked.wait(60.0)
        reply_of(service, BETWEEN)
        assert seen.wait(60.0)
        return None

    job = runner.create("ask", work)
    asked.set()
    for state in runner.watch(job.job_id):
        told.append(state.message)
        if "training gemm on a30 (fp16)" in told:
            assert state.progress_ratio >= 0.5
            seen.set()
    runner.close()
    assert "training gemm on a30 (fp16)" in told
