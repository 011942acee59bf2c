"""Compare a simulated deployment with real vLLM 0.19 runs of 300 ShareGPT requests.

Everything comes from the one-layer operator profiles of the same GPU: nothing is fitted to the
runs. The KV capacity is the one vLLM logged. Prints our errors beside LLMServingSim's own.

    python tests/benchmarks/bench_serving_vs_vllm.py [path of the shared measurements]
"""

import csv
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from foretoken.app.compose import Composition
from foretoken.app.config import AppConfig
from foretoken.catalog.importing import ImportRequest, find_importer
from foretoken.domain.estimate import DType
from foretoken.domain.models.architecture import find_model
from foretoken.domain.report import RequestColumns
from foretoken.domain.scenario import EngineSpec, ServingScenario
from foretoken.domain.workload import Request, WorkloadSpec

_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
_DEVICES = {"rtx4090-llama8b": "rtx_4090", "rtxpro6000-llama8b": "rtx_pro_6000"}

Summary = dict[str, float]


def main(data: Path) -> None:
    """Import, train, simulate both runs and print the errors."""
    with tempfile.TemporaryDirectory() as home, Composition(AppConfig(home=home)) as services:
        plan = find_importer("llmservingsim").read(ImportRequest(path=data / "llmservingsim"))
        list(services.catalog.record(plan.run, plan.batches))
        foretoken = services.foretoken("predictor", "simulator")
        print(f"trained in {foretoken.train().cpu_s:.1f} CPU s")
        for case, device in _DEVICES.items():
            folder = data / "llmservingsim" / "runs" / case
            measured = _read_measured(folder / "measured_requests.csv")
            report = foretoken.simulate_serving(_scenario(folder, device, measured))
            print(f"\n{case}: {report.num_preemptions} preemptions simulated")
            shares = report.step_time_ratio_by_provenance
            print("rests on", {name: round(share, 3) for name, share in shares.items() if share})
            _print_errors(_summarise(report.requests), measured, folder)


def _scenario(folder: Path, device: str, measured: Sequence[dict[str, str]]) -> ServingScenario:
    requests = tuple(
        Request(
            arrival_s=float(row["arrival_s"]),
            num_prefill_tokens=int(row["input_tokens"]),
            num_decode_tokens=int(row["output_tokens"]),
        )
        for row in measured
    )
    config = json.loads((folder / "config.json").read_text())
    arguments = config["engine_kwargs"]
    return ServingScenario(
        model=find_model(arguments["model"]),
        device=device,
        dtype=DType.BF16,
        engine=EngineSpec(
            max_num_seqs=arguments["max_num_seqs"],
            max_num_batched_tokens=arguments["max_num_batched_tokens"],
            block_size=config["block_size"],
            num_kv_blocks=config["num_gpu_blocks"] or 0,
            fuses_add_norm=True,
        ),
        workload=WorkloadSpec(arrival="trace", trace_requests=requests, num_requests=len(requests)),
    )


def _read_measured(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return sorted(csv.DictReader(file), key=lambda row: float(row["arrival_s"]))


def _summarise(columns: RequestColumns) -> dict[str, list[float]]:
    rows = zip(
        columns.arrival_s,
        columns.first_token_s,
        columns.finished_s,
        columns.num_decode_tokens,
        strict=True,
    )
    times: dict[str, list[float]] = {"TTFT": [], "TPOT": [], "e2e": []}
    for arrival_s, first_s, finished_s, num_tokens in rows:
        times["TTFT"].append(first_s - arrival_s)
        times["TPOT"].append((finished_s - first_s) / max(1, num_tokens - 1))
        times["e2e"].append(finished_s - arrival_s)
    return times


def _print_errors(
    simulated: dict[str, list[float]], measured: Sequence[dict[str, str]], folder: Path
) -> None:
    truth = _summarise(
        RequestColumns(
            arrival_s=tuple(float(row["arrival_s"]) for row in measured),
            first_token_s=tuple(float(row["first_token_s"]) for row in measured),
            finished_s=tuple(float(row["last_token_s"]) for row in measured),
            num_decode_tokens=tuple(int(row["output_tokens"]) for row in measured),
        )
    )
    print(f"{'':6}{'mean':>9}{'p50':>9}{'p90':>9}{'p99':>9}{'per request':>13}")
    for name, true in truth.items():
        errors = [
            statistic(simulated[name]) / statistic(true) - 1
            for statistic in (statistics.fmean, _quantile(50), _quantile(90), _quantile(99))
        ]
        per_request = statistics.fmean(
            abs(ours / theirs - 1) for ours, theirs in zip(simulated[name], true, strict=True)
        )
        cells = "".join(f"{error:9.1%}" for error in errors)
        print(f"{name:6}{cells}{per_request:13.1%}")
    peer = folder / "peer_LLMServingSim_summary.txt"
    if peer.exists():
        print("LLMServingSim, from the same profiles, on its own run:")
        print(peer.read_text())


def _quantile(percent: int) -> Callable[[Sequence[float]], float]:
    return lambda values: statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else _DATA)
