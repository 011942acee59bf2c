"""Simulated requests and serving steps per CPU second, on the first 2,000 Splitwise requests.

Qwen2 7B on one A30 under Vidur's limits, operator latencies from the data sheet. Needs
../shared/data; without it the same number of synthetic requests is taken.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

from foretoken.domain.report import ServingReport
from foretoken.domain.scenario import EngineSpec, ServingScenario
from foretoken.domain.workload import LengthSpec, WorkloadSpec
from foretoken.simulator.latency_surfaces import LatencySurfaces, fetch_surfaces, surface_spec
from foretoken.simulator.serving.arrivals.trace import load_trace
from foretoken.simulator.serving.simulation import simulate_serving

_TESTS = Path(__file__).resolve().parents[1]
_TRACE = _TESTS.parents[1] / "shared/data/vidur/traces/splitwise_conv_first2000.csv"
# Vidur on this workload and kind of machine, from its own timing: run_cpu_s, batches.
_VIDUR_REQUESTS_PER_S, _VIDUR_STEPS_PER_S = 340, 4400
_NUM_ROUNDS = 5


def main() -> int:
    """Print rates and their ratios to Vidur's."""
    sys.path.insert(0, str(_TESTS / "unit" / "simulator" / "serving"))
    from serving_fakes import RooflinePredictor, SilentProgress, build_scenario

    base = build_scenario(
        workload=_workload(),
        engine=EngineSpec(max_num_batched_tokens=512, max_num_seqs=128, num_kv_blocks=11008),
    )
    started = time.process_time()
    surfaces = fetch_surfaces(surface_spec(base, 4096), RooflinePredictor())
    print(f"latency surfaces from a data-sheet predictor: {_elapsed(started):.2f} CPU s")
    for time_scale in (2.0, 0.5):
        workload = replace(base.workload, time_scale=time_scale)
        _measure(replace(base, workload=workload), surfaces, SilentProgress())
    return 0


def _measure(scenario: ServingScenario, surfaces: LatencySurfaces, progress: object) -> None:
    reports: list[ServingReport] = []
    cpu_s = []
    for _ in range(_NUM_ROUNDS):
        started = time.process_time()
        reports.append(simulate_serving(scenario, lambda _: surfaces, progress))  # type: ignore[arg-type]
        cpu_s.append(_elapsed(started))
    report, best_s = reports[0], sorted(cpu_s)[_NUM_ROUNDS // 2]
    requests_per_s = report.num_requests / best_s
    steps_per_s = report.num_serving_steps / best_s
    print(
        f"arrival times x {scenario.workload.time_scale}: {report.num_requests} requests,"
        f" {report.num_serving_steps} serving steps, mean batch {report.batch_size_mean:.1f},"
        f" {best_s:.3f} CPU s (median of {_NUM_ROUNDS}), report included"
    )
    print(
        f"  {requests_per_s:,.0f} requests/s, {requests_per_s / _VIDUR_REQUESTS_PER_S:.1f} x Vidur"
    )
    print(f"  {steps_per_s:,.0f} serving steps/s, {steps_per_s / _VIDUR_STEPS_PER_S:.1f} x Vidur")


def _workload() -> WorkloadSpec:
    if _TRACE.is_file():
        return WorkloadSpec(
            arrival="trace", trace_requests=load_trace(_TRACE), max_tokens_per_request=4096
        )
    print("the shared measurements (../shared/data) are not here: synthetic requests instead")
    return WorkloadSpec(
        rate_rps=4.7, num_requests=2000, prefill=LengthSpec(mean=1100), decode=LengthSpec(mean=260)
    )


def _elapsed(started: float) -> float:
    return time.process_time() - started


if __name__ == "__main__":
    sys.exit(main())
