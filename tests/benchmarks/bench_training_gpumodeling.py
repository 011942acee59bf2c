"""Training steps of GPT-NeoX on DeepSpeed, from operators alone, compared with those measured.

Run: python tests/benchmarks/bench_training_gpumodeling.py [DATA_FOLDER]

The predictor sees the operators and collectives that GPUModeling25 sampled on both clusters, and no
training step. `raw` is without any calibration; `gaps` adds per layer what the smaller job of the
cluster (llemma) ran longer than simulated, in its layers alone, and is printed for the others.
`published` is the error of GPUModeling25's own predictor, fitted by its authors. Rows that the
measurements flag as edited, added by hand or holding waiting are shown and not scored. A component
that waits for other replicas (dp_allreduce) has no flag where the table has none.
"""

import csv
import dataclasses
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.importing import ImportRequest, find_importer
from foretoken.catalog.service import CatalogService
from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.job import JobState
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.measurements.latency_models import TrainRequest
from foretoken.domain.measurements.training_truth import TrainingCalibration
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.ports import PredictorPort
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.training_report import TrainingReport
from foretoken.domain.units import US_PER_MS, ceil_divide
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.service import PredictorService
from foretoken.simulator.training.calibration import ComponentPair, calibrate_from_components
from foretoken.simulator.training.step import simulate_training

_DEFAULT_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
_CLUSTERS = {"perlmutter": "a100_perlmutter", "vista": "gh200_infiniband"}
# Perlmutter has A100s with 40 GB (six nodes of seven) and with 80 GB, on which operators were
# sampled. Source: the tables' README, which tells them by the bandwidth of an addition.
_DEVICES = {"perlmutter": "a100_sxm_40", "vista": "gh200"}
_JOBS_ON_80_GB = ("31697099",)
_CALIBRATED_ON = "llemma"

_STAGES = ("first", "middle", "last")
# Name in the table -> in the report.
_COMPONENTS = {
    **{f"{part}_{way}": f"{part}_{way}" for part in ("encoder", "stage") for way in ("fwd", "bwd")},
    **{name: name for name in ("mp_allreduce", "pp_p2p", "dp_allreduce", "dp_allgather")},
    "optimizer_step": "optimizer",
}
# The tokenizer of all jobs, padded to whole rows of 128 on every rank.
_VOCAB, _VOCAB_MULTIPLE = 50257, 128
_SKIPPED = "overflow-skipped step"
_GOAL_RATIO = 0.08

_Row = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One measured job: its facts, and its rows by component and stage."""

    facts: _Row
    rows: Mapping[tuple[str, str], _Row]

    @property
    def measured_ms(self) -> float:
        """The step, as the middle of the traced ranks saw it."""
        times = [float(self.rows["train_batch", stage]["best_avg_us"]) for stage in _STAGES]
        return statistics.median(times) / US_PER_MS

    @property
    def published_ratio(self) -> float | None:
        """The published predictor's error of the step."""
        text = self.rows["train_batch", "first"]["seed_err"]
        return float(text) if text else None

    @property
    def is_skipped(self) -> bool:
        """Whether the step found an overflow and updated nothing."""
        return any(_SKIPPED in row["flags"] for row in self.rows.values())

    def stage_index(self, stage: str) -> int:
        """Return the rank of the pipeline that a row is of."""
        return {"first": 0, "middle": 1, "last": int(self.facts["pp"]) - 1}[stage]


def main(data: Path) -> None:
    """Simulate every job of the table and print its errors."""
    folder = data / "gpumodeling"
    if not (folder / "truth" / "truth.csv").is_file():
        _say(f"skipped: {folder / 'truth' / 'truth.csv'} is not on this machine")
        return
    jobs = _read_jobs(folder / "truth" / "truth.csv")
    with tempfile.TemporaryDirectory() as scratch:
        catalog = CatalogService(CatalogConfig(path=f"{scratch}/catalog.duckdb"))
        catalog.open()
        predictor = _train(catalog, folder, scratch)
        gaps = _calibrate(jobs, predictor)
        errors: defaultdict[tuple[str, str], list[tuple[float, ...]]] = defaultdict(list)
        for job in jobs:
            _print_job(job, predictor, gaps.get(job.facts["cluster"]), errors)
        _print_summary(errors)
        predictor.close()
        catalog.close()


def _train(catalog: CatalogService, folder: Path, scratch: str) -> PredictorService:
    for cluster in ("Perlmutter", "Vista"):
        plan = find_importer("gpumodeling").read(ImportRequest(path=folder / cluster))
        list(catalog.record(plan.run, plan.batches))
    predictor = PredictorService(PredictorConfig(state_folder=f"{scratch}/p"), catalog)
    predictor.open()
    *_, last = predictor.watch_job(predictor.create_training(TrainRequest()).job_id)
    if last.state is not JobState.SUCCEEDED:
        raise SystemExit(f"training failed: {last.error_message}")
    return predictor


def _read_jobs(path: Path) -> list[_Job]:
    rows: defaultdict[tuple[str, str], dict[tuple[str, str], _Row]] = defaultdict(dict)
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            rows[row["config_id"], row["job_id"]][row["component"], row["stage"]] = row
    return [_Job(facts=found["train_batch", "first"], rows=found) for found in rows.values()]


def _scenario(job: _Job) -> TrainingScenario:
    facts = job.facts
    is_bare = facts["norm"] == "rmsnorm"
    rules = {"bucket_elements": facts["bucket_elems"]}
    if facts["attention"].startswith("flash"):
        rules["attention"] = "flash"
    if is_bare:
        # The configurations of Llama-like models leave the fused bias and activation off.
        rules["fuses_bias_activation"] = "false"
    pp, tp, dp = (int(facts[name]) for name in ("pp", "tp", "dp"))
    return TrainingScenario(
        model=_model(facts),
        device=_device(facts),
        topology=_CLUSTERS[facts["cluster"]],
        framework="pytorch",
        dtype=DType.FP16,
        layout=ParallelLayout(pp=pp, tp=tp, dp=dp),
        sequence_length=int(facts["seq"]),
        micro_batch_size=int(facts["mbs"]),
        global_batch_size=int(facts["mbs"]) * int(facts["gas"]) * dp,
        trainer=TrainerSpec(profile="gpt-neox", rules=rules),
        stage_layers=_stage_layers(facts),
        recompute="full" if facts["act_ckpt"] == "1" else "none",
        partitions_activations=facts["partition_activations"] == "1",
        zero_stage=int(facts["zero"]),
        # The median of such steps is one that updates nothing.
        overflow_ratio=0.99 if job.is_skipped else 0.0,
    )


def _device(facts: _Row) -> str:
    is_large = facts["job_id"] in _JOBS_ON_80_GB
    return "a100_sxm_80" if is_large else _DEVICES[facts["cluster"]]


def _stage_layers(facts: _Row) -> tuple[int, ...]:
    """Return the layers of each stage, as the log or an even split has them."""
    found = tuple(int(text) for text in facts["stage_layers"].split("|"))
    return found if len(found) == int(facts["pp"]) else ()


def _model(facts: _Row) -> ModelArchitecture:
    """Return the model of a job: all have MLPs four times as wide, with one projection in."""
    hidden, heads, tp = int(facts["hidden"]), int(facts["heads"]), int(facts["tp"])
    is_bare = facts["norm"] == "rmsnorm"
    return ModelArchitecture(
        name=facts["model"],
        num_layers=int(facts["layers"]),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=4 * hidden,
        vocab=int(ceil_divide(_VOCAB, _VOCAB_MULTIPLE * tp)) * _VOCAB_MULTIPLE * tp,
        max_position=int(facts["seq"]),
        activation="gelu",
        is_gated=False,
        norm="rms_norm" if is_bare else "layer_norm",
        has_bias=not is_bare,
        has_parallel_residual=facts["gpt_j_residual"] == "1",
    )


def _calibrate(jobs: Sequence[_Job], predictor: PredictorPort) -> Mapping[str, TrainingCalibration]:
    """Return the gaps of each cluster that its smaller job tells."""
    pairs: defaultdict[str, list[ComponentPair]] = defaultdict(list)
    for job in jobs:
        if _CALIBRATED_ON not in job.facts["config_id"]:
            continue
        report = simulate_training(_scenario(job), predictor, None)
        if not report.step_time_ms:
            raise SystemExit(f"{job.facts['config_id']}: {report.feasibility.reason}")
        found = _components(report)
        for component in ("encoder_fwd", "encoder_bwd"):
            for stage in _STAGES:
                pair = ComponentPair(
                    component=component,
                    measured_us=float(job.rows[component, stage]["best_avg_us"]),
                    simulated_us=found[component, job.stage_index(stage)] * US_PER_MS,
                )
                pairs[job.facts["cluster"]].append(pair)
    return {name: calibrate_from_components(found, "llemma") for name, found in pairs.items()}


def _components(report: TrainingReport) -> dict[tuple[str, int], float]:
    return {(part.name, part.stage): part.time_ms for part in report.components}


def _print_job(
    job: _Job,
    predictor: PredictorPort,
    gaps: TrainingCalibration | None,
    errors: defaultdict[tuple[str, str], list[tuple[float, ...]]],
) -> None:
    scenario = _scenario(job)
    raw = simulate_training(scenario, predictor, None)
    if not raw.step_time_ms:
        _say(f"\n{job.facts['config_id']}: {raw.feasibility.reason}")
        return
    is_own = _CALIBRATED_ON in job.facts["config_id"]
    reports = [raw]
    if gaps is not None and not is_own:
        calibrated = dataclasses.replace(scenario, calibration=gaps)
        reports.append(simulate_training(calibrated, predictor, None))
    ratios = [report.step_time_ms / job.measured_ms - 1 for report in reports]
    _say(
        f"\n{job.facts['config_id']} (job {job.facts['job_id']}, {scenario.device}): measured "
        f"{job.measured_ms:.0f} ms; raw {_percent(ratios[0])}"
        + (f", gaps {_percent(ratios[1])}" if len(ratios) > 1 else "")
        + f", published {_percent(job.published_ratio)}"
        + ("; the step skipped its update" if job.is_skipped else "")
    )
    if gaps is not None:
        _say(f"gaps of {gaps.forward_gap_us:.0f} and {gaps.backward_gap_us:.0f} us a layer")
    _say(f"{'component':16}{'stage':8}{'measured':>10}{'raw':>9}{'gaps':>9}{'published':>11}")
    for name, stage, cells, flags in _component_errors(job, reports):
        measured_ms = float(job.rows[name, stage]["best_avg_us"]) / US_PER_MS
        _say(
            f"{name:16}{stage:8}{measured_ms:10.2f}{_percent(cells[0]):>9}"
            f"{_percent(cells[1]):>9}{_percent(cells[2]):>11}  {flags}"
        )
        if not flags and all(cell is not None for cell in cells):
            errors[job.facts["cluster"], name].append(tuple(abs(cell or 0.0) for cell in cells))
    errors[job.facts["cluster"], "step"].append(
        (abs(ratios[0]), abs(ratios[-1]), abs(job.published_ratio or 0.0))
    )


def _component_errors(
    job: _Job, reports: Sequence[TrainingReport]
) -> Iterator[tuple[str, str, tuple[float | None, float | None, float | None], str]]:
    """Yield component, stage, the errors raw, with gaps and published, and why it is not scored."""
    found = [_components(report) for report in reports]
    for name, ours in _COMPONENTS.items():
        for stage in _STAGES:
            row = job.rows.get((name, stage))
            if row is None:
                continue
            measured_ms = float(row["best_avg_us"]) / US_PER_MS
            key = ours, job.stage_index(stage)
            ratios = [parts[key] / measured_ms - 1 if key in parts else None for parts in found]
            published = float(row["seed_err"]) if row["seed_err"] else None
            flags = row["flags"].replace("wait_free", "")
            if job.is_skipped and name in ("optimizer_step", "dp_allgather"):
                flags = flags or _SKIPPED
            yield name, stage, (ratios[0], ratios[-1], published), flags


def _print_summary(errors: Mapping[tuple[str, str], Sequence[tuple[float, ...]]]) -> None:
    _say(f"\nmean absolute errors; `far` counts the rows off by more than {_GOAL_RATIO:.0%}")
    _say(
        f"{'cluster':12}{'component':16}{'rows':>5}{'raw':>9}{'far':>5}{'gaps':>9}{'far':>5}"
        f"{'published':>11}{'far':>5}"
    )
    for (cluster, name), rows in sorted(errors.items()):
        columns = list(zip(*rows, strict=True))
        cells = "".join(
            f"{statistics.fmean(column):>{9 if index < 2 else 11}.1%}"
            f"{sum(value > _GOAL_RATIO for value in column):>5}"
            for index, column in enumerate(columns)
        )
        _say(f"{cluster:12}{name:16}{len(rows):5}{cells}")


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:+.1%}"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else _DEFAULT_DATA)
