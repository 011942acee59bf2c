"""Ask for the best deployment of three models on 8, 16 and 32 H200, and simulate the finalists.

Prompts of 4,000 tokens, answers of 1,000, TTFT up to 2 s and TPOT up to 30 ms on average, from all
of NVIDIA's H200 tables as AIConfigurator 0.12 publishes them, on top of the starter. Counted are
CPU seconds from the request to the report: the closed form of all nine questions first (the series
that they rest on are learned within), then cold (by services just opened on what was learned, whose
models are read within) and warm (answers are kept only where a version of the predictor is active,
which none is here), then with the finalists simulated request by request (compiled before by one
small run).

Last, what the closed form says of each simulated deployment is compared with its simulation once
the load is steady, those of a search for aggregated deployments among them.

AIConfigurator's published answers, for models in bf16: 8B aggregated tp1 at batch 96, 3,478 output
tokens/s and GPU; 70B disaggregated, 451; Qwen3-32B disaggregated, 902 to 911. It was not run here,
so why they are lower than these, from the same tables, is not known beyond its choice of batches.

    python tests/benchmarks/bench_search.py [path of the shared measurements] [--home FOLDER]
        [--quantization FORMAT] [--finalists N]
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from closed_loop_tables import TRAINED_ON, open_whole_import

from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import (
    LatencyLimit,
    ServingSearchReport,
    ServingSearchRequest,
    ServingSpace,
    ServingTargets,
)
from foretoken.domain.requests.workload import LengthSpec, WorkloadSpec
from foretoken.simulator.search.context import InlineContext
from foretoken.simulator.search.serving.search import ServingSearch

_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
_MODELS = {"llama-3.1-8b": "3,478", "llama-3.1-70b": "451", "qwen3-32b": "902 to 911"}
_AIC_BATCH = 96
_DEVICES = (8, 16, 32)
_TARGETS = ServingTargets(
    limits=(
        LatencyLimit(metric="ttft_ms", percentile=0, limit_ms=2000),
        LatencyLimit(metric="tpot_ms", percentile=0, limit_ms=30),
    )
)


def main() -> int:
    """Import the tables where they are not, ask, and print."""
    options = _parse_options()
    if not (options.data / "aiconfigurator").is_dir():
        print("the shared measurements (../shared/data) are not here: nothing to ask from")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        home = options.home or Path(scratch) / "home"
        with open_whole_import(options.data, home) as services:
            _ask_all(ServingSearch(services.predictor), options, "learning what they rest on")
        with open_whole_import(options.data, home) as services:
            _measure(ServingSearch(services.predictor), options)
    return 0


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("data", nargs="?", type=Path, default=_DATA, help="shared measurements")
    parser.add_argument("--home", type=Path, help="a home with the tables, or where to keep it")
    parser.add_argument("--quantization", default="", help="format of the weights: fp8, ...")
    parser.add_argument("--finalists", type=int, default=1, help="candidates to simulate each time")
    return parser.parse_args()


def _ask_all(search: ServingSearch, options: argparse.Namespace, how: str) -> None:
    started = time.process_time()
    for request in _requests(options.quantization, 0):
        search.run(request, InlineContext())
    spent_s = time.process_time() - started
    print(f"closed form, nine questions, {how}: {spent_s:.2f} CPU s")


def _measure(search: ServingSearch, options: argparse.Namespace) -> None:
    for temperature in ("cold", "warm"):
        _ask_all(search, options, temperature)
    if options.finalists:
        first = next(_requests(options.quantization, 1))
        search.run(first, InlineContext())
    started = time.process_time()
    reports = []
    for request in _requests(options.quantization, options.finalists):
        reports.append(search.run(request, InlineContext()))
        _print_answer(request, reports[-1])
    spent_s = time.process_time() - started
    print(f"with {options.finalists} finalists simulated each: {spent_s:.1f} CPU s")
    if options.finalists:
        for request in _requests(options.quantization, 1):
            space = replace(request.space, modes=("aggregated",))
            if request.space.max_devices == _DEVICES[0]:
                report = search.run(replace(request, space=space), InlineContext())
                reports.append(report)
                _print_answer(request, report)
                _print_at_batch(request, report)
        _print_agreement(reports)


def _requests(quantization: str, num_finalists: int) -> Iterator[ServingSearchRequest]:
    for model in _MODELS:
        for num_devices in _DEVICES:
            yield ServingSearchRequest(
                scenario=ServingScenario(
                    model=find_model(model),
                    device=TRAINED_ON,
                    framework="vllm 0.24.0",
                    quantization=quantization,
                    engine=EngineSpec(profile="vllm-0.20"),
                    workload=WorkloadSpec(
                        prefill=LengthSpec(mean=4000), decode=LengthSpec(mean=1000)
                    ),
                ),
                space=ServingSpace(max_devices=num_devices),
                targets=_TARGETS,
                num_finalists=num_finalists,
            )


def _print_answer(request: ServingSearchRequest, report: ServingSearchReport) -> None:
    model, table = request.scenario.model.name, report.candidates
    print(
        f"{model} on {request.space.max_devices}: {report.num_distinct:,} distinct points of"
        f" {report.num_points:,}, ruled out {dict(report.num_ruled_out_by_verdict)};"
        f" AIConfigurator {_MODELS[model]} tokens/s/GPU"
    )
    for name in (report.best, *report.ties):
        row = list(table.name).index(name)
        print(
            f"  ={table.rank[row]} {name}: {table.output_throughput_tps_per_gpu[row]:,.0f}"
            f" ({table.tps_per_gpu_low[row]:,.0f} to {table.tps_per_gpu_high[row]:,.0f})"
            f" tokens/s/GPU, TTFT {table.ttft_ms[row]:,.0f} ms, TPOT {table.tpot_ms[row]:.1f} ms"
        )
    for finalist in report.finalists:
        found = finalist.report.steady
        print(
            f"  simulated {finalist.name}, {'met' if finalist.is_met else 'missed'}:"
            f" {found.output_throughput_tps / finalist.report.num_devices:,.0f} tokens/s/GPU,"
            f" TTFT mean {found.ttft_ms.mean:,.0f} P99 {found.ttft_ms.p99:,.0f} ms,"
            f" TPOT mean {found.tpot_ms.mean:.1f} P99 {found.tpot_ms.p99:.1f} ms"
        )


def _print_at_batch(request: ServingSearchRequest, report: ServingSearchReport) -> None:
    """Print the point that AIConfigurator finds best for the smallest model."""
    table = report.candidates
    if request.scenario.model.name != next(iter(_MODELS)):
        return
    same = (np.asarray(table.tp) == 1) & (np.asarray(table.batch_size) == _AIC_BATCH)
    best = np.flatnonzero(same)[np.argmax(table.output_throughput_tps_per_gpu[same])]
    print(
        f"  AIConfigurator's own choice, {table.name[best]}:"
        f" {table.output_throughput_tps_per_gpu[best]:,.0f} tokens/s/GPU here,"
        f" TPOT {table.tpot_ms[best]:.1f} ms"
    )


def _print_agreement(reports: Sequence[ServingSearchReport]) -> None:
    """Print how far the closed form is from the simulations, as signed errors."""
    errors: dict[str, list[float]] = {"TTFT": [], "TPOT": [], "tokens/s/GPU": []}
    for report in reports:
        table = report.candidates
        for finalist in report.finalists:
            row, found = finalist.candidate, finalist.report.steady
            # The table's are per GPU that counts, idle ones too.
            used_ratio = table.num_devices[row] / table.num_counted_devices[row]
            each = used_ratio * found.output_throughput_tps / finalist.report.num_devices
            errors["TTFT"].append(table.ttft_ms[row] / found.ttft_ms.mean - 1)
            errors["TPOT"].append(table.tpot_ms[row] / found.tpot_ms.mean - 1)
            errors["tokens/s/GPU"].append(table.output_throughput_tps_per_gpu[row] / each - 1)
    for name, values in errors.items():
        print(
            f"closed form against {len(values)} simulations, {name}: mean {np.mean(values):+.1%},"
            f" mean of absolute errors {np.mean(np.abs(values)):.1%},"
            f" from {min(values):+.1%} to {max(values):+.1%}"
        )


if __name__ == "__main__":
    sys.exit(main())
