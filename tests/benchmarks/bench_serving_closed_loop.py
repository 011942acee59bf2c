"""Compare simulated deployments with measured closed-loop runs that AIConfigurator publishes.

Five models on H200 (`--system h100_sxm`: on H100, all of it transferred) under vLLM, SGLang and
TensorRT-LLM: mean TTFT and TPOT at a fixed concurrency. Operator times come from all of
AIConfigurator's H200 tables, imported as a user does, with the starter for what they leave out, and
learned when they are asked for; what neither these nor an engine profile say is among the launches
of published runs (`validation/launches`), with its source. Prints the errors by group next to
AIConfigurator's own, and says which rows were not run and why. `--home` names a home with an import
that is there, or where to keep one.

    python tests/benchmarks/bench_serving_closed_loop.py [path of the shared measurements]
        [--every N] [--home FOLDER] [--system SYSTEM] [--rows]
"""

import argparse
import csv
import re
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from closed_loop_tables import ROUTING, TRAINED_ON, open_whole_import
from warmed_means import mean_latencies_ms

from foretoken.client.facade import Foretoken
from foretoken.domain.errors import ForetokenError
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.workload import SessionSpec, WorkloadSpec
from foretoken.simulator.validation.published_comparison import draw_lengths
from foretoken.simulator.validation.published_launch import (
    NUM_ROUNDS,
    DevelopmentLaunch,
    development_launches,
)

_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
# AIConfigurator's own errors on its rows: TPOT, TTFT.
_PEER_ERRORS = "22 %", "53 %"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """A measured run. `ep` experts' shards lie on the tp ranks; times in ms."""

    name: str
    model: str
    backend: str
    system: str
    tp: int
    dp: int
    ep: int
    concurrency: int
    prefill: int
    decode: int
    ttft_ms: float
    tpot_ms: float

    @property
    def group(self) -> str:
        """Return the model and engine it belongs to."""
        return f"{self.model} {self.backend}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """What a run and its simulation have in common."""

    run: _Run
    ttft_ms: float
    tpot_ms: float


def main() -> int:
    """Import, train, simulate and print."""
    options = _parse_options()
    data = options.data / "aiconfigurator"
    if not (data / "measured_serving.csv").is_file():
        print("the shared measurements (../shared/data) are not here: nothing to compare with")
        return 0
    runs, reasons = _read_runs(data / "measured_serving.csv", options.system)
    runs = runs[:: options.every]
    with open_whole_import(options.data, options.home) as services:
        foretoken = services.foretoken("predictor", "simulator")
        started = time.process_time()
        outcomes, failures = _simulate(runs, foretoken)
        took_s = time.process_time() - started
        print(f"learned and simulated {len(outcomes)} runs in {took_s:.0f} CPU s")
    if options.rows:
        _print_rows(outcomes)
    _print_groups(outcomes)
    for reason, count in (reasons + failures).most_common():
        print(f"not run: {count} rows, {reason}")
    return 0


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("data", nargs="?", type=Path, default=_DATA, help="shared measurements")
    parser.add_argument("--every", type=int, default=1, help="run every so many rows only")
    parser.add_argument("--home", type=Path, help="a home with the tables, or where to keep it")
    parser.add_argument("--system", default=TRAINED_ON, help="rows of which system to run")
    parser.add_argument("--rows", action="store_true", help="print every row")
    return parser.parse_args()


# The measured runs -------------------------------------------------------------------------------


def _read_runs(path: Path, system: str) -> tuple[list[_Run], Counter[str]]:
    runs: list[_Run] = []
    reasons: Counter[str] = Counter()
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            reason = _find_obstacle(row, system)
            if reason:
                reasons[reason] += 1
            else:
                runs.append(_read_run(row))
    return runs, reasons


def _find_obstacle(row: Mapping[str, str], system: str) -> str:
    if row["mode"] != "agg":
        return "disaggregated prefill and decode"
    if row["system"] != system:
        if row["system"].startswith("h"):
            return f"{row['system']}: asked for {system}"
        return f"{row['system']}: no attention or MoE table of its kind of device"
    if (row["backend"], row["model_path"].rpartition("/")[2]) not in development_launches():
        return "a model whose rows do not say how it was quantised or launched"
    return ""


def _read_run(row: Mapping[str, str]) -> _Run:
    tp, ep = _read_degree(row["moe_tp_size"]), _read_degree(row["moe_ep_size"])
    if ep == 1:
        tp = max(tp, _read_degree(row["tp_size"]))
    else:
        # `tp_size` is the product of both in these rows; experts are split over the tp ranks.
        tp = ep = max(tp, ep)
    dp = _read_degree(row["attention_dp_size"])
    if row["backend"] == "trtllm" and row["system"] == TRAINED_ON:
        # Rows that say EP 1 are the runs with EP over again, to a percent: their launches set both.
        ep = tp
    concurrency = re.search(r"_c(\d+)_", row["id"])
    return _Run(
        name=row["id"],
        model=row["model_path"].rpartition("/")[2],
        backend=row["backend"],
        system=row["system"],
        tp=1 if dp > 1 else tp,
        dp=tp if dp > 1 else 1,
        ep=ep,
        concurrency=int(concurrency[1]) if concurrency else int(float(row["batch_size"])),
        prefill=int(float(row["isl"])),
        decode=int(float(row["osl"])),
        ttft_ms=float(row["silicon_ttft_ms"]),
        tpot_ms=float(row["silicon_tpot_ms"]),
    )


def _read_degree(text: str) -> int:
    return max(1, int(float(text))) if text else 1


# The simulation ----------------------------------------------------------------------------------


def _simulate(runs: Sequence[_Run], foretoken: Foretoken) -> tuple[list[_Outcome], Counter[str]]:
    outcomes: list[_Outcome] = []
    failures: Counter[str] = Counter()
    # Several rows are the same run, or runs of the same settings.
    known: dict[_Run, tuple[float, float] | str] = {}
    widest = _find_limits(runs)
    for run in runs:
        key = replace(run, name="", ttft_ms=0.0, tpot_ms=0.0)
        if key not in known:
            known[key] = _answer(run, _scenario(run, widest[run.group]), foretoken)
        answer = known[key]
        if isinstance(answer, str):
            failures[f"{run.group}: {answer}"] += 1
        else:
            outcomes.append(_Outcome(run=run, ttft_ms=answer[0], tpot_ms=answer[1]))
    return outcomes, failures


def _find_limits(runs: Sequence[_Run]) -> dict[str, int]:
    """Return the largest concurrency of each group: one limit for all, so that tables are shared.

    A closed loop never has more requests than its concurrency.
    """
    limits: dict[str, int] = defaultdict(int)
    for run in runs:
        limits[run.group] = max(limits[run.group], run.concurrency)
    return limits


def _answer(
    run: _Run, scenario: ServingScenario, foretoken: Foretoken
) -> tuple[float, float] | str:
    try:
        report = foretoken.simulate_serving(scenario)
    except ForetokenError as err:
        return str(err)
    if not report.feasibility.is_feasible:
        return report.feasibility.reason
    num_warmup = development_launches()[run.backend, run.model].num_warmup_rounds * run.concurrency
    if num_warmup == 0:
        return report.ttft_ms.mean, report.tpot_ms.mean
    return mean_latencies_ms(report.requests, num_warmup)


def _scenario(run: _Run, max_num_seqs: int) -> ServingScenario:
    launch = development_launches()[run.backend, run.model]
    sizes = {
        "concurrency": run.concurrency,
        "max_num_seqs": max_num_seqs,
        "input_tokens": run.prefill,
    }
    return ServingScenario(
        name=run.name,
        model=find_model(_MODELS[run.model]),
        device=run.system,
        framework=launch.framework,
        quantization=launch.quantization,
        kv_dtype=launch.kv_dtype,
        # Of gpt-oss the spread was counted; of others it is chosen.
        moe_routing="" if run.model == "gpt-oss-120b" else ROUTING,
        kernels={"moe_experts": launch.experts_kernel} if launch.experts_kernel else {},
        layout=ParallelLayout(tp=run.tp, dp=run.dp, ep=run.ep),
        engine=EngineSpec(
            profile=launch.profile,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=launch.step_tokens.limit(sizes),
            memory_utilization_ratio=launch.memory_ratio,
            rules={**launch.rules, **(launch.rules_of_dp if run.dp > 1 else {})},
        ),
        workload=_workload(run, launch),
    )


# After the requests that warm up, which take seconds for each.
_RESUME_S = 36_000.0
_MODELS = {
    "gpt-oss-120b": "gpt-oss-120b",
    "DeepSeek-V3": "deepseek-v3",
    "Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "Qwen3-32B": "qwen3-32b",
}


def _workload(run: _Run, launch: DevelopmentLaunch) -> WorkloadSpec:
    # A prompt out of few is a shared prefix, all but its last token.
    num_shared = run.prefill - 1 if launch.num_prompts else 0
    options = {"concurrency": str(run.concurrency)}
    if launch.num_warmup_rounds:
        # Clients wait for those that warm up, then send as many as run at a time at once: aiperf
        # (timing/credit_issuing_strategy.py of 0.3) as InferenceX's does.
        options["num_warmup"] = str(launch.num_warmup_rounds * run.concurrency)
        options["resume_s"] = str(_RESUME_S)
    return WorkloadSpec(
        arrival="closed_loop",
        arrival_options=options,
        num_requests=(NUM_ROUNDS + launch.num_warmup_rounds) * run.concurrency,
        prefill=draw_lengths(run.prefill - num_shared, launch.shortest_ratio),
        decode=draw_lengths(run.decode, launch.shortest_ratio),
        sessions=SessionSpec(
            shared_prefix_tokens=num_shared, num_shared_prefixes=max(1, launch.num_prompts)
        ),
    )


# The errors --------------------------------------------------------------------------------------


def _print_groups(outcomes: Sequence[_Outcome]) -> None:
    groups: dict[str, list[_Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.run.group].append(outcome)
    print(f"\n{'':34}{'rows':>5}   {'TPOT mean':>9}{'median':>8}{'P90':>7}", end="")
    print(f"{'bias':>8}   {'TTFT mean':>9}{'median':>8}{'P90':>7}{'bias':>8}")
    for name, members in (*sorted(groups.items()), ("all", list(outcomes))):
        if members:
            print(f"{name:34}{len(members):5}   {'   '.join(_describe(members))}")
    print(f"AIConfigurator, its own figures: TPOT {_PEER_ERRORS[0]}, TTFT {_PEER_ERRORS[1]}")


def _describe(members: Sequence[_Outcome]) -> Iterator[str]:
    for ours, theirs in (
        ([m.tpot_ms for m in members], [m.run.tpot_ms for m in members]),
        ([m.ttft_ms for m in members], [m.run.ttft_ms for m in members]),
    ):
        signed = [ours_ms / true_ms - 1 for ours_ms, true_ms in zip(ours, theirs, strict=True)]
        errors = sorted(abs(error) for error in signed)
        p90 = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
        yield (
            f"{statistics.fmean(errors):9.1%}{statistics.median(errors):8.1%}{p90:7.1%}"
            f"{statistics.median(signed):+8.1%}"
        )


def _print_rows(outcomes: Sequence[_Outcome]) -> None:
    print(f"\n{'':34}{'tp':>3}{'c':>5}{'in':>6}{'out':>6}{'TTFT':>18}{'TPOT ms':>18}")
    for outcome in sorted(outcomes, key=lambda o: (o.run.group, o.run.tp, o.run.prefill)):
        run = outcome.run
        print(
            f"{run.group:34}{run.tp:3}{run.concurrency:5}{run.prefill:6}{run.decode:6}"
            f"{outcome.ttft_ms:9.0f}{run.ttft_ms:9.0f}{outcome.tpot_ms:9.2f}{run.tpot_ms:9.2f}"
        )


if __name__ == "__main__":
    sys.exit(main())
