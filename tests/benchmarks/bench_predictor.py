"""Accuracy and cost of the predictor on the shared measurements.

Run: python tests/benchmarks/bench_predictor.py [DATA_FOLDER]

Prints, per operator and device, the error on whole sizes left out and the share of them inside the
nominal 90 % intervals; then CPU seconds of training. How fast it answers: `bench_predict_speed.py`.
"""

import sys
import tempfile
from pathlib import Path

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.importing import ImportRequest, find_importer
from foretoken.catalog.service import CatalogService
from foretoken.domain.job import JobState
from foretoken.domain.measurements.latency_models import TrainRequest
from foretoken.domain.results.report import PredictorTrainingReport
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.service import PredictorService

# Vidur, training its random forests on the same A30 tables. Source: run on a 2-core machine.
_VIDUR_A30_CPU_S = 2258.0
_DEFAULT_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"

# What to import: label, importer, folder, device, options.
_SOURCES = (
    ("a30 (partly corrupt)", "vidur", "vidur/profiling", "a30", {"folder": "a30"}),
    ("a30 (clean)", "vidur", "vidur/profiling", "a30", {"folder": "a30_clean"}),
    ("a100", "vidur", "vidur/profiling", "a100_sxm_80", {}),
    ("h100", "vidur", "vidur/profiling", "h100_sxm", {}),
    ("rtx", "llmservingsim", "llmservingsim", "", {}),
)


def main(data: Path) -> None:
    """Import, train and print, one source after the other, each in a catalog of its own."""
    for label, importer, folder, device, options in _SOURCES:
        with tempfile.TemporaryDirectory() as scratch:
            catalog = CatalogService(CatalogConfig(path=f"{scratch}/catalog.duckdb"))
            catalog.open()
            request = ImportRequest(path=data / folder, device=device, options=options)
            plan = find_importer(importer).read(request)
            receipts = list(catalog.record(plan.run, plan.batches))
            predictor = PredictorService(PredictorConfig(state_folder=f"{scratch}/p"), catalog)
            predictor.open()
            _say(f"\n{label}: {plan.num_rows} rows, {sum(r.num_flagged for r in receipts)} flagged")
            report = _train(predictor)
            _print_report(report)
            if "a30" in label:
                ratio = _VIDUR_A30_CPU_S / report.cpu_s
                _say(f"Vidur {_VIDUR_A30_CPU_S:.0f} CPU s: {ratio:.0f} times as much")
            predictor.close()
            catalog.close()


def _train(predictor: PredictorService) -> PredictorTrainingReport:
    job = predictor.create_training(TrainRequest())
    *_, last = predictor.watch_job(job.job_id)
    if last.state is not JobState.SUCCEEDED:
        raise SystemExit(f"training failed: {last.error_message}")
    return predictor.get_training_report(job.job_id)


def _print_report(report: PredictorTrainingReport) -> None:
    _say(f"{'operator':20}{'on':20}{'rows':>7}{'held out':>10}{'MAPE':>8}{'P90':>8}{'inside':>8}")
    for entry in report.operators:
        _say(
            f"{entry.operator:20}{entry.device:20}{entry.num_rows:7}{entry.num_held_out:10}"
            f"{entry.held_out_mape_ratio:8.2%}{entry.held_out_p90_ratio:8.2%}"
            f"{entry.interval_coverage_ratio:8.1%}"
        )
    _say(f"trained in {report.cpu_s:.1f} CPU s")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else _DEFAULT_DATA)
