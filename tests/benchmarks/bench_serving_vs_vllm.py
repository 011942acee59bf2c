"""Compare simulated deployments with real vLLM 0.19 runs of 300 ShareGPT requests.

Everything comes from the operator profiles of the same GPU, read through one predictor: nothing is
fitted to the runs. The KV capacity is the one vLLM logged, where it did. Prints the errors of every
figure next to LLMServingSim's own; a case without a published run prints what it takes.

    python tests/benchmarks/bench_serving_vs_vllm.py [path of the shared measurements]
"""

import csv
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from foretoken.app.compose import Composition
from foretoken.app.config import AppConfig
from foretoken.catalog.importing import ImportRequest, find_importer
from foretoken.client.facade import Foretoken
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.workload import Request, WorkloadSpec
from foretoken.domain.results.report import ServingReport

_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
_DEVICES = {
    "rtx4090-llama8b": "rtx_4090",
    "rtxpro6000-llama8b": "rtx_pro_6000",
    "rtxpro6000-qwen32b-tp2": "rtx_pro_6000",
    "rtxpro6000-qwen30a3b-dp2ep2": "rtx_pro_6000",
}
_STATISTICS = ("mean", "p50", "p90", "p99")
_PER_REQUEST = ("mape", "median")

Times = dict[str, list[float]]


def main(data: Path) -> None:
    """Import, train, simulate all runs and print the errors."""
    with tempfile.TemporaryDirectory() as home, Composition(AppConfig(home=home)) as services:
        plan = find_importer("llmservingsim").read(ImportRequest(path=data / "llmservingsim"))
        list(services.catalog.record(plan.run, plan.batches))
        foretoken = services.foretoken("predictor", "simulator")
        print(f"trained in {foretoken.train().cpu_s:.1f} CPU s")
        for case, device in _DEVICES.items():
            _run_case(foretoken, data / "llmservingsim" / "runs" / case, device)


def _run_case(foretoken: Foretoken, folder: Path, device: str) -> None:
    arrivals = _read_arrivals(folder)
    started = time.process_time()
    report = foretoken.simulate_serving(_scenario(folder, device, arrivals))
    cpu_s = time.process_time() - started
    if not report.feasibility.is_feasible:
        print(f"\n{folder.name}: cannot run: {report.feasibility.reason}")
        return
    print(f"\n{folder.name}: {report.num_preemptions} preemptions simulated, {cpu_s:.1f} CPU s")
    _print_basis(report)
    columns = report.requests
    simulated = _times(
        columns.arrival_s, columns.first_token_s, columns.finished_s, columns.num_decode_tokens
    )
    measured = _read_measured(folder)
    if not measured:
        _print_times(simulated, max(columns.finished_s))
        return
    truth = _times(
        [float(row["arrival_s"]) for row in measured],
        [float(row["first_token_s"]) for row in measured],
        [float(row["last_token_s"]) for row in measured],
        [int(row["output_tokens"]) for row in measured],
    )
    _print_errors(simulated, truth)
    makespan_s = max(float(row["last_token_s"]) for row in measured)
    ours_s = max(columns.finished_s)
    print(f"makespan {ours_s / makespan_s - 1:+.1%}, throughput {makespan_s / ours_s - 1:+.1%}")
    print("LLMServingSim, from the same profiles, on its own run:")
    print((folder / "peer_LLMServingSim_summary.txt").read_text())


def _scenario(
    folder: Path, device: str, arrivals: Mapping[int, tuple[float, Mapping[str, Any]]]
) -> ServingScenario:
    config = json.loads((folder / "config.json").read_text())
    arguments = config["engine_kwargs"]
    dp = arguments["data_parallel_size"]
    requests = tuple(
        Request(
            arrival_s=arrival_s,
            num_prefill_tokens=row["input_tokens"],
            num_decode_tokens=row["output_tokens"],
            block_hashes=tuple(row["prompt_block_ids_16"]),
        )
        for arrival_s, row in sorted(arrivals.values(), key=lambda item: item[0])
    )
    return ServingScenario(
        model=find_model(arguments["model"]),
        device=device,
        dtype=DType.BF16,
        layout=ParallelLayout(
            tp=arguments["tensor_parallel_size"],
            dp=dp,
            ep=dp if arguments["enable_expert_parallel"] else 1,
        ),
        engine=EngineSpec(
            profile="vllm-0.19",
            max_num_seqs=arguments["max_num_seqs"],
            max_num_batched_tokens=arguments["max_num_batched_tokens"],
            num_kv_blocks=config["num_gpu_blocks"] or 0,
            # The engine was called in process, with tokens.
            rules={"frontend_ms": "0", "frontend_us_per_token": "0"},
        ),
        workload=WorkloadSpec(
            arrival="trace",
            trace_requests=requests,
            num_requests=len(requests),
            hash_block_tokens=config["block_size"],
        ),
    )


def _read_arrivals(folder: Path) -> dict[int, tuple[float, Mapping[str, Any]]]:
    """Return when each request came, as the client saw it where that was recorded, and what."""
    lines = (folder / "workload.jsonl").read_text().splitlines()
    rows = {row["request_id"]: row for row in map(json.loads, lines)}
    seen = {int(row["request_id"]): float(row["arrival_s"]) for row in _read_measured(folder)}
    return {key: (seen.get(key, row["arrival_s"]), row) for key, row in rows.items()}


def _read_measured(folder: Path) -> list[dict[str, str]]:
    path = folder / "measured_requests.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return sorted(csv.DictReader(file), key=lambda row: float(row["arrival_s"]))


def _times(
    arrival_s: Sequence[float],
    first_token_s: Sequence[float],
    finished_s: Sequence[float],
    num_tokens: Sequence[int],
) -> Times:
    rows = list(zip(arrival_s, first_token_s, finished_s, num_tokens, strict=True))
    return {
        "TTFT": [first - arrival for arrival, first, _, _ in rows],
        "TPOT": [(end - first) / max(1, tokens - 1) for _, first, end, tokens in rows],
        "e2e": [end - arrival for arrival, _, end, _ in rows],
    }


def _print_basis(report: ServingReport) -> None:
    shares = report.step_time_ratio_by_provenance
    print("rests on", {name: round(share, 3) for name, share in shares.items() if share})
    times_s = report.step_time_s_by_group
    print("busy s", {name: round(time_s, 2) for name, time_s in times_s.items()})


def _print_errors(simulated: Times, truth: Times) -> None:
    print(f"{'':6}" + "".join(f"{name:>9}" for name in _STATISTICS + _PER_REQUEST))
    for name, true in truth.items():
        errors = [statistic(simulated[name]) / statistic(true) - 1 for statistic in _figures()]
        apart = [abs(ours / theirs - 1) for ours, theirs in zip(simulated[name], true, strict=True)]
        per_request = f"{statistics.fmean(apart):9.1%}{statistics.median(apart):9.1%}"
        print(f"{name:6}" + "".join(f"{error:+9.1%}" for error in errors) + per_request)


def _print_times(simulated: Times, makespan_s: float) -> None:
    print(f"no published run; ours takes {makespan_s:.1f} s; times in ms")
    print(f"{'':6}" + "".join(f"{name:>10}" for name in _STATISTICS))
    for name, values in simulated.items():
        cells = "".join(f"{1000 * statistic(values):10.1f}" for statistic in _figures())
        print(f"{name:6}{cells}")


def _figures() -> tuple[Callable[[Sequence[float]], float], ...]:
    return (statistics.fmean, *(_quantile(percent) for percent in (50, 90, 99)))


def _quantile(percent: int) -> Callable[[Sequence[float]], float]:
    return lambda values: statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else _DATA)
