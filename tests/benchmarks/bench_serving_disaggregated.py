"""Compare simulated clusters with measured disaggregated runs that AIConfigurator publishes.

DeepSeek-V3 under TensorRT-LLM on H200 and H100, prefill and decode replicas apart: mean TTFT and
TPOT of a closed loop whose first requests come all at once. Operator times are those of the home
that is given, which `foretoken catalog install nvidia` may have filled, else the starter's; series
are learned when they are asked for. How pools and client were started is what the recipes of these
runs say. Prints the errors, and why rows were not run.

    python tests/benchmarks/bench_serving_disaggregated.py [path of the shared measurements]
        [--home FOLDER] [--rows]
"""

import argparse
import csv
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from closed_loop_tables import ROUTING, TRAINED_ON
from warmed_means import mean_latencies_ms

from foretoken.app.compose import Composition
from foretoken.app.config import AppConfig
from foretoken.app.starter import with_starter
from foretoken.client.facade import Foretoken
from foretoken.domain.errors import ForetokenError
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.cluster import ClusterSpec, ReplicaPool, RoutingSpec
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.workload import Request, WorkloadSpec
from foretoken.simulator.validation.published_launch import NUM_ROUNDS
from foretoken.simulator.validation.published_run import INFERENCE_MAX_SHORTEST_RATIO

_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
_ENGINE = "trtllm"
_PROFILE, _FRAMEWORK = "trtllm-1.0", "trtllm 1.3.0rc20"
_TENSOR = ParallelLayout(tp=8, ep=8)
_DATA_PARALLEL = ParallelLayout(tp=1, dp=8, ep=8)
_TWO_NODES, _DATA_OF_TWO_NODES = ParallelLayout(tp=16, ep=16), ParallelLayout(tp=1, dp=16, ep=16)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Launch:
    """How the pools of runs with prompts of a length were started.

    A replica that computes prompts takes `num_prompts` of them, of `step_tokens`, at most.
    """

    prefill: ParallelLayout
    num_prompts: int
    step_tokens: int
    prefill_memory_ratio: float
    decode_memory_ratio: float
    expert_chunk_tokens: int = 0
    # Requests that run at a time on a replica that answers, by the client's (empty: as many).
    num_answers: Mapping[int, int] = field(default_factory=dict)


# By device and tokens of the longest prompt. Rows differ in what they say of attention in the
# prefill pool; recipes do not. Source: ishandhanani/srt-slurm, recipes/trtllm/h200/{1k1k,8k1k}/stp
# (images of Dynamo 0.8.1, prefill without overlap, block reuse off on both sides); its sa-bench
# (bench.sh) sends ten requests for each running one, all first ones at once, after two that warm up
# the fresh servers, the first of which come by 250 a second.
_LAUNCHES = {
    (TRAINED_ON, 1024): _Launch(
        prefill=_DATA_PARALLEL,
        num_prompts=8,
        step_tokens=8192,
        prefill_memory_ratio=0.6,
        decode_memory_ratio=0.9,
    ),
    (TRAINED_ON, 8192): _Launch(
        prefill=_TENSOR,
        num_prompts=2,
        step_tokens=16640,
        prefill_memory_ratio=0.85,
        decode_memory_ratio=0.85,
    ),
    # recipes/trtllm/h100-fp8, ctx1_gen3_tep16_batch1 and batch2, Dynamo 0.8.1.post3.
    ("h100_sxm", 1024): _Launch(
        prefill=_DATA_OF_TWO_NODES,
        num_prompts=2,
        step_tokens=2048,
        prefill_memory_ratio=0.6,
        decode_memory_ratio=0.9,
        num_answers={6: 1, 9: 2},
    ),
    ("h100_sxm", 8192): _Launch(
        prefill=_DATA_OF_TWO_NODES,
        num_prompts=1,
        step_tokens=8224,
        prefill_memory_ratio=0.3,
        decode_memory_ratio=0.9,
        expert_chunk_tokens=16384,
        num_answers={6: 1, 9: 2},
    ),
}
_NUM_WARMUP_ROUNDS, _WARMUP_RPS = 2, 250
# Each of both draws prompts, then answers, of as many tokens as this seed says: the prompts that
# warm up are the first of those that count. Source: its benchmark_serving.py, `--seed`.
_CLIENT_SEED = 0
# After the requests that warm up, which take seconds for each.
_RESUME_S = 3600.0
_UNCACHED = {"has_prefix_caching": "false", "is_fresh": "true"}
_OF_PROMPTS = {**_UNCACHED, "has_async_scheduling": "false", "graph_mode": "none"}
# Dynamo's front end, where no other router is asked for.
_ROUTING = RoutingSpec(router="round_robin")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """A measured run: its pools, load and latencies in ms."""

    name: str
    device: str
    decode: ParallelLayout
    num_prefill: int
    num_decode: int
    concurrency: int
    prompt: int
    answer: int
    ttft_ms: float
    tpot_ms: float


def main() -> int:
    """Read, simulate and print."""
    options = _parse_options()
    path = options.data / "aiconfigurator" / "measured_serving.csv"
    if not path.is_file():
        print("the shared measurements (../shared/data) are not here: nothing to compare with")
        return 0
    runs, reasons = _read_runs(path)
    with tempfile.TemporaryDirectory() as scratch:
        home = options.home or Path(scratch) / "home"
        with Composition(with_starter(AppConfig(home=str(home)), {})) as services:
            foretoken = services.foretoken("predictor", "simulator")
            found = []
            for run in runs:
                try:
                    found.append((run, *_simulate(run, foretoken)))
                except ForetokenError as err:
                    reasons[str(err)[:100]] += 1
    if options.rows:
        _print_rows(found)
    _print_errors(found)
    for reason, count in reasons.most_common():
        print(f"not run: {count} rows, {reason}")
    return 0


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("data", nargs="?", type=Path, default=_DATA, help="shared measurements")
    parser.add_argument("--home", type=Path, help="a home with measurements")
    parser.add_argument("--rows", action="store_true", help="print every row")
    return parser.parse_args()


def _read_runs(path: Path) -> tuple[list[_Run], Counter[str]]:
    runs: list[_Run] = []
    reasons: Counter[str] = Counter()
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["mode"] != "disagg":
                continue
            run = _read_run(row)
            launch = _LAUNCHES.get((run.device, run.prompt))
            if row["backend"] != _ENGINE or launch is None:
                reasons[f"{run.device}, {row['backend']}: no recipes were read"] += 1
            elif launch.num_answers and run.concurrency not in launch.num_answers:
                reasons[f"{run.device}: no recipe of {run.concurrency} requests was found"] += 1
            else:
                runs.append(run)
    return runs, reasons


def _read_run(row: Mapping[str, str]) -> _Run:
    concurrency = re.search(r"_c(\d+)_", row["id"])
    is_data_parallel = _number(row["decode_attention_dp_size"]) > 1
    tensor, data_parallel = _TENSOR, _DATA_PARALLEL
    if row["system"] != TRAINED_ON:
        tensor, data_parallel = _TWO_NODES, _DATA_OF_TWO_NODES
    return _Run(
        name=row["id"],
        device=row["system"],
        decode=tensor if not is_data_parallel else data_parallel,
        num_prefill=_number(row["prefill_num_workers"]),
        num_decode=_number(row["decode_num_workers"]),
        concurrency=int(concurrency[1]) if concurrency else _number(row["decode_batch_size"]),
        prompt=_number(row["isl"]),
        answer=_number(row["osl"]),
        ttft_ms=float(row["silicon_ttft_ms"]),
        tpot_ms=float(row["silicon_tpot_ms"]),
    )


def _number(text: str) -> int:
    return max(1, int(float(text))) if text else 1


def _simulate(run: _Run, foretoken: Foretoken) -> tuple[float, float]:
    """Return mean TTFT and TPOT in ms of the requests after those that warm up."""
    report = foretoken.simulate_serving(_scenario(run))
    if not report.feasibility.is_feasible:
        raise ForetokenError(report.feasibility.reason)
    requests, num_warmup = report.requests, _NUM_WARMUP_ROUNDS * run.concurrency
    arrivals_s = np.asarray(requests.arrival_s)[num_warmup:]
    if arrivals_s.min() < _RESUME_S or len(np.unique(arrivals_s[: run.concurrency])) > 1:
        raise ForetokenError("the requests that warm up last beyond the start of the others")
    return mean_latencies_ms(requests, num_warmup)


def _scenario(run: _Run) -> ServingScenario:
    return ServingScenario(
        name=run.name,
        model=find_model("deepseek-v3"),
        device=run.device,
        framework=_FRAMEWORK,
        quantization="fp8_block",
        kv_dtype=DType.FP8,
        moe_routing=ROUTING,
        engine=EngineSpec(profile=_PROFILE),
        workload=WorkloadSpec(
            arrival="trace",
            arrival_options={
                "concurrency": str(run.concurrency),
                "ramp_s": str(run.concurrency / _WARMUP_RPS),
                "num_warmup": str(_NUM_WARMUP_ROUNDS * run.concurrency),
                "resume_s": str(_RESUME_S),
            },
            trace_requests=(*_sent(run, _NUM_WARMUP_ROUNDS), *_sent(run, NUM_ROUNDS)),
        ),
        cluster=ClusterSpec(pools=_pools(run), routing=_ROUTING, decode_routing=_ROUTING),
    )


def _sent(run: _Run, num_rounds: int) -> Iterator[Request]:
    """Yield what the client sends in a run of so many requests for each running one."""
    draw = np.random.RandomState(_CLIENT_SEED)
    prompts, answers = (
        draw.randint(
            int(longest * INFERENCE_MAX_SHORTEST_RATIO), longest + 1, num_rounds * run.concurrency
        )
        for longest in (run.prompt, run.answer)
    )
    for prompt, answer in zip(prompts.tolist(), answers.tolist(), strict=True):
        yield Request(arrival_s=0.0, num_prefill_tokens=prompt, num_decode_tokens=answer)


def _pools(run: _Run) -> tuple[ReplicaPool, ReplicaPool]:
    launch = _LAUNCHES[run.device, run.prompt]
    prompts = EngineSpec(
        profile=_PROFILE,
        max_num_seqs=launch.num_prompts,
        max_num_batched_tokens=launch.step_tokens,
        memory_utilization_ratio=launch.prefill_memory_ratio,
        rules={**_OF_PROMPTS, "expert_chunk_tokens": str(launch.expert_chunk_tokens)},
    )
    # A replica never has more requests than the client sends.
    answers = EngineSpec(
        profile=_PROFILE,
        max_num_seqs=launch.num_answers.get(run.concurrency, min(run.concurrency, 512)),
        memory_utilization_ratio=launch.decode_memory_ratio,
        rules=_UNCACHED,
    )
    return (
        ReplicaPool(
            name="prompts",
            role="prefill",
            num_replicas=run.num_prefill,
            layout=launch.prefill,
            engine=prompts,
        ),
        ReplicaPool(
            name="answers",
            role="decode",
            num_replicas=run.num_decode,
            layout=run.decode,
            engine=answers,
        ),
    )


def _print_rows(found: Sequence[tuple[_Run, float, float]]) -> None:
    for run, ttft_ms, tpot_ms in found:
        print(
            f"{run.name}: TTFT {ttft_ms:,.0f} ms (measured {run.ttft_ms:,.0f}),"
            f" TPOT {tpot_ms:.1f} ms (measured {run.tpot_ms:.1f})"
        )


def _print_errors(found: Sequence[tuple[_Run, float, float]]) -> None:
    places = [*_LAUNCHES, (TRAINED_ON, 0)]
    for device, prompt in places:
        rows = [row for row in found if row[0].device == device and prompt in (row[0].prompt, 0)]
        if not rows:
            continue
        name = f"{device}, prompts of up to {prompt:,} tokens" if prompt else f"{device}, all"
        for metric, place in (("TTFT", 1), ("TPOT", 2)):
            ours = np.array([row[place] for row in rows], dtype=np.float64)
            measured = np.array([getattr(row[0], f"{metric.lower()}_ms") for row in rows])
            errors = ours / measured - 1
            ranks = [np.argsort(np.argsort(values)).astype(float) for values in (ours, measured)]
            print(
                f"{name}, {metric}: {len(rows)} rows, error mean {np.abs(errors).mean():.1%}"
                f" median {np.median(np.abs(errors)):.1%} bias {errors.mean():+.1%},"
                f" rank correlation {np.corrcoef(ranks[0], ranks[1])[0, 1]:.2f}"
            )


if __name__ == "__main__":
    sys.exit(main())
