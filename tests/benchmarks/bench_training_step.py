"""Error of whole training steps on one node that others measured, from data sheets alone.

Run: python tests/benchmarks/bench_training_step.py [DATA_FOLDER]

The predictor has seen no measurement, so all times are analytical; nothing is tuned to these rows.
Prints, per source, the median signed error, the mean absolute error and the share of measured steps
inside the simulated interval; where the source has peak memory, its mean absolute error too.
"""

import csv
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.domain.layout import ParallelLayout
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.ports import PredictorPort
from foretoken.domain.report import TrainingReport
from foretoken.domain.scenario import TrainingScenario
from foretoken.domain.units import GIB, MS_PER_S
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.service import PredictorService
from foretoken.simulator.training.step import simulate_training

_DEFAULT_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"

# GPU names of the table -> (device, topology).
_DEVICES = {
    "A100": ("a100_sxm_80", "a100_dgx"),
    "A100-80GB (Selene)": ("a100_sxm_80", "a100_dgx"),
    "A100-SXM4-80GB": ("a100_sxm_80", "a100_dgx"),
    "a100_80gb": ("a100_sxm_80", "a100_dgx"),
    "a100_40gb": ("a100_sxm_40", "a100_40_dgx"),
    "h100_80gb": ("h100_sxm", "h100_dgx"),
    "B200-SXM": ("b200", "b200_hgx"),
}
_MAX_DEVICES = 8  # of one node
_GPT_VOCAB = 50257
_Row = Mapping[str, str]


def main(data: Path) -> None:
    """Simulate every row that can be mapped and print the errors by source."""
    path = data / "training_truth" / "measured_steps.csv"
    if not path.is_file():
        _say(f"skipped: {path} is not on this machine")
        return
    by_source: dict[str, list[tuple[_Row, TrainingReport]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        catalog = CatalogService(CatalogConfig(path=f"{scratch}/catalog.duckdb"))
        predictor = PredictorService(PredictorConfig(state_folder=f"{scratch}/p"), catalog)
        for row, scenario in _scenarios(path):
            report = _simulate(scenario, predictor)
            publisher = " ".join(row["source"].split()[:2]).split("@")[0].removeprefix("github ")
            by_source[f"{publisher}, {row['gpu']}"].append((row, report))
    _say(f"{'source':50} {'rows':>5} {'median':>8} {'mean abs':>9} {'inside':>7} {'memory':>8}")
    for source, results in by_source.items():
        _print_errors(source, results)


def _print_errors(source: str, results: list[tuple[_Row, TrainingReport]]) -> None:
    errors, inside, memory = [], [], []
    for row, report in results:
        measured_ms = _measured_ms(row)
        errors.append(report.step_time_ms / measured_ms - 1)
        inside.append(report.step_time_low_ms <= measured_ms <= report.step_time_high_ms)
        if row["peak_alloc_gib"]:
            peak = max(stage.total_bytes for stage in report.memory) / GIB
            memory.append(peak / float(row["peak_alloc_gib"]) - 1)
    mean_abs = statistics.fmean(abs(error) for error in errors)
    memory_text = f"{statistics.fmean(abs(e) for e in memory):8.1%}" if memory else "       -"
    _say(
        f"{source:50} {len(errors):5} {statistics.median(errors):+8.1%} {mean_abs:9.1%} "
        f"{statistics.fmean(inside):7.0%} {memory_text}"
    )


def _scenarios(path: Path) -> Iterator[tuple[_Row, TrainingScenario]]:
    """Yield the dense 16-bit rows of one node whose options the simulator knows."""
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if _is_mappable(row):
                yield row, _scenario(row)


def _is_mappable(row: _Row) -> bool:
    is_known = row["gpu"] in _DEVICES and row["recompute"] in ("none", "full")
    is_plain = row["vpp"] in ("", "1") and row["cp"] in ("", "1") and row["ep"] in ("", "1")
    has_sizes = all(row[name] for name in ("layers", "hidden", "heads", "mbs", "gbs", "seq"))
    is_dense = "deepseek" not in row["model"].lower() and "mixtral" not in row["model"].lower()
    return (
        is_known
        and is_plain
        and has_sizes
        and is_dense
        and "fp8" not in row["precision"]
        and int(row["n_gpus"]) <= _MAX_DEVICES
        and bool(row["step_time_s"] or row["tokens_per_s_per_gpu"])
    )


def _scenario(row: _Row) -> TrainingScenario:
    device, topology = _DEVICES[row["gpu"]]
    layout = ParallelLayout(tp=int(row["tp"] or 1), pp=int(row["pp"] or 1), dp=int(row["dp"] or 1))
    sharding = row["zero_dist_opt"]
    zero_stage = 3 if "FSDP" in sharding else int("ZeRO-1" in sharding or "dist-opt" in sharding)
    return TrainingScenario(
        model=_model(row),
        device=device,
        topology=topology,
        layout=layout,
        sequence_length=int(row["seq"]),
        micro_batch_size=int(row["mbs"]),
        global_batch_size=int(row["gbs"]),
        recompute=row["recompute"],
        zero_stage=zero_stage,
    )


def _model(row: _Row) -> ModelArchitecture:
    """Return a GPT, or a gated model where the name says Llama, Qwen or InternLM."""
    hidden, heads = int(row["hidden"]), int(row["heads"])
    is_gated = row["model"].lower().startswith(("llama", "qwen", "internlm"))
    # InternLM's width: 8/3 of hidden, rounded up to 256.
    gated_width = -(-hidden * 8 // 3 // 256) * 256
    return ModelArchitecture(
        name=row["model"],
        num_layers=int(row["layers"]),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=int(row["kv_heads"] or heads),
        head_dim=hidden // heads,
        intermediate=int(row["ffn"] or (gated_width if is_gated else 4 * hidden)),
        vocab=int(row["vocab"] or _GPT_VOCAB),
        max_position=int(row["seq"]),
        activation="silu" if is_gated else "gelu",
        is_gated=is_gated,
        norm="rms_norm" if is_gated else "layer_norm",
        position="rope" if is_gated else "learned",
    )


def _measured_ms(row: _Row) -> float:
    if row["step_time_s"]:
        return float(row["step_time_s"]) * MS_PER_S
    num_tokens = int(row["gbs"]) * int(row["seq"])
    rate_tps = float(row["tokens_per_s_per_gpu"]) * int(row["n_gpus"])
    return num_tokens / rate_tps * MS_PER_S


def _simulate(scenario: TrainingScenario, predictor: PredictorPort) -> TrainingReport:
    report = simulate_training(scenario, predictor, None)
    if report.step_time_ms == 0:
        raise SystemExit(report.feasibility.reason)
    return report


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else _DEFAULT_DATA)
