"""The highest rate of a deployment on Vidur's own tables, and how often its interval is right.

The question is Vidur's: Qwen2-7B on one A30, the Splitwise conversations with requests cut to 4,096
tokens, Sarathi in chunks of 512: the highest rate with P99 TTFT under 2 s and P99 ITL under 200 ms,
to 1 %. Prints CPU seconds, probes and the interval. Vidur's own search bisects, too, and simulates
every probe whole, 340 to 420 requests in a CPU second (measured on this kind of machine with these
tables); what that takes for as many probes is printed, too. Steps cost what Vidur's tables say,
linear between their points; how far that is from Vidur's own latencies is printed first.

Then the interval on queues whose capacity is known: one server, constant service (M/D/1), requests
drawn anew again and again; printed is how often it holds the truth. Needs ../shared/data for the
first part.
"""

import csv
import gzip
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, getcontext
from math import factorial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.frameworks.engine import EngineProfile, find_engine
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import LatencyLimit, ServingTargets
from foretoken.domain.requests.workload import LengthSpec, WorkloadSpec
from foretoken.domain.units import MS_PER_S, NS_PER_S
from foretoken.simulator.cost.step_scope import AS_ESTIMATED
from foretoken.simulator.cost.tables import CostTables, flat_tables, shared_table
from foretoken.simulator.search.capacity.bracket import Bracket
from foretoken.simulator.search.capacity.load_search import AnswerInterval, LoadSearch
from foretoken.simulator.search.capacity.probe import Load, make_judge, resample_loads
from foretoken.simulator.search.capacity.rate import draw_plan, estimate_service_rps, rate_of_plan
from foretoken.simulator.search.context import InlineContext
from foretoken.simulator.serving.compilation import warm_up
from foretoken.simulator.serving.record import ServingRecord
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.simulation import run_deployment
from foretoken.simulator.workload.request_plan import RequestPlan, plan_requests
from foretoken.simulator.workload.trace import load_trace

Floats = NDArray[np.float64]

_VIDUR = Path(__file__).resolve().parents[3] / "shared" / "data" / "vidur"
_NUM_LAYERS, _NUM_BLOCKS, _MAX_TOKENS = 28, 11008, 4096
_VIDUR_RATES = (340, 420)
# Vidur rounds contexts up to 64s: on average by half of that.
_KV_STEP = 64
_OVER_EACH_LAYER_US = _NUM_LAYERS * 1e3
_BATCHING_RATIO = 1.1
_DENSE = (
    "attn_pre_proj",
    "attn_post_proj",
    "attn_rope",
    "mlp_up_proj",
    "mlp_down_proj",
    "mlp_act",
    "input_layernorm",
    "post_attention_layernorm",
    "add",
    "attn_kv_cache_save",
)
_TARGETS = ServingTargets(
    limits=(
        LatencyLimit(metric="ttft_ms", percentile=99, limit_ms=2_000),
        LatencyLimit(metric="itl_ms", percentile=99, limit_ms=200),
    )
)
_TOLERANCE, _CONFIDENCE = 0.01, 0.95
# A search takes about 0.4 CPU s; an interval's coverage of 95 % is then known to 3.5 %.
_NUM_REPETITIONS = 40
# Seconds a request holds the server of the queues with a known answer.
_SERVICE_S = 0.1


class _Question(NamedTuple):
    """(requests, percentile, limit in s) of the time from arrival to the last token."""

    num_requests: int
    percentile: float
    limit_s: float


_QUESTIONS = (_Question(1_000, 90, 0.4), _Question(2_000, 99, 0.8), _Question(1_000, 50, 0.15))


@dataclass(frozen=True)
class _Tables:
    """Engines with tables to look their steps up."""

    setup: DeploymentSetup
    tables: CostTables

    def run(self, plan: RequestPlan, progress: Callable[[float], None]) -> ServingRecord:
        """Return what the engines did."""
        return run_deployment(plan, self.setup, self.tables, progress)


class _Answer(NamedTuple):
    bracket: Bracket
    interval: AnswerInterval
    num_probes: int
    bracket_s: float
    whole_s: float


def main() -> int:
    """Print the answer to Vidur's question, then the coverage of intervals."""
    if _VIDUR.is_dir():
        _answer_vidur()
    else:
        print("skipped: the shared measurements (../shared/data) are not on this machine")
    _count_covered()
    return 0


def _answer_vidur() -> None:
    setup = DeploymentSetup(profile=find_engine("sarathi"), num_kv_blocks=_NUM_BLOCKS)
    engines = _Tables(setup, _read_tables())
    warm_up(setup, engines.tables)
    _compare(engines)
    started_s = time.process_time()
    trace = load_trace(_VIDUR / "traces" / "splitwise_conv.csv")
    loaded_s = time.process_time() - started_s
    workload = WorkloadSpec(
        arrival="trace", trace_requests=trace.requests, max_tokens_per_request=_MAX_TOKENS
    )
    scenario = ServingScenario(model=find_model("qwen2-7b"), device="a30", workload=workload)
    answer = _search(scenario, engines, _TARGETS)
    met, missed = answer.bracket.met, answer.bracket.missed
    if met is None or missed is None:
        print("no rate meets the targets")
        return
    print(f"\n{len(trace.requests):,} requests: {met.rate_rps:.3f} requests/s", end=" ")
    print(f"(misses at {missed.rate_rps:.3f}: {missed.verdict.worst.metric})")
    low, high = answer.interval.sampling_low_rps, answer.interval.sampling_high_rps
    print(f"  {_CONFIDENCE:.0%} interval of other such requests: {low:.3f} to {high:.3f}")
    print(f"  {answer.num_probes} probes in {answer.bracket_s:.2f} CPU s (wanted: under 10);")
    print(f"  with the interval {answer.whole_s:.2f}, and {loaded_s:.2f} to read the trace")
    slow, fast = (len(trace.requests) * answer.num_probes / rate for rate in _VIDUR_RATES)
    print(f"  as many probes by Vidur: {fast:.0f} to {slow:.0f} CPU s")


def _compare(engines: _Tables) -> None:
    """Print how far interpolated tables are from Vidur's own run of 2,000 requests."""
    path = _VIDUR / "reference_runs" / "clean_conv_sarathi_2000" / "request_metrics.csv.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))

    def column(name: str) -> Floats:
        return np.array([float(row[name] or 0) for row in rows])

    prompts, answers = (
        column(f"request_num_{kind}_tokens").astype(np.int64) for kind in ("prefill", "decode")
    )
    arrivals = np.rint(np.cumsum(column("request_inter_arrival_delay")) * NS_PER_S)
    plan = plan_requests(arrivals.astype(np.int64), prompts, answers)
    requests = engines.run(plan, lambda _: None).requests
    for name, times in (("prefill", requests.first_token_ns), ("request", requests.finished_ns)):
        found = (times - requests.arrival_ns) / NS_PER_S
        vidur = column(f"{name}_e2e_time")
        errors = [
            float(statistic(found) / statistic(vidur) - 1)
            for statistic in (np.mean, lambda values: np.percentile(values, 99))
        ]
        print(f"{name} time against Vidur: mean {errors[0]:+.2%}, P99 {errors[1]:+.2%}")


def _count_covered() -> None:
    """Print how often the intervals of drawn workloads hold what is known."""
    profile = EngineProfile(name="server", engine="none", max_num_seqs=1)
    setup = DeploymentSetup(profile=profile, num_kv_blocks=100)
    num_tokens = 10
    engines = _Tables(setup, flat_tables(1e6 * _SERVICE_S / num_tokens, 0.0))
    warm_up(setup, engines.tables)
    print(f"\nM/D/1, {_NUM_REPETITIONS} workloads each, {_CONFIDENCE:.0%} intervals:")
    for question in _QUESTIONS:
        limit = LatencyLimit(
            metric="e2e_latency_ms",
            percentile=question.percentile,
            limit_ms=question.limit_s * MS_PER_S,
        )
        workload = WorkloadSpec(
            num_requests=question.num_requests,
            prefill=LengthSpec(mean=16),
            decode=LengthSpec(mean=num_tokens),
        )
        truth = known_capacity(question)
        answers = [
            _search(
                ServingScenario(
                    model=find_model("qwen2-7b"), device="a30", workload=workload, seed=1000 * index
                ),
                engines,
                ServingTargets(limits=(limit,)),
            )
            for index in range(_NUM_REPETITIONS)
        ]
        _show_coverage(question, truth, answers)


def _show_coverage(question: _Question, truth: float, answers: list[_Answer]) -> None:
    covered = [a.interval.low_rps <= truth <= a.interval.high_rps for a in answers]
    found = np.array([a.bracket.met.rate_rps for a in answers if a.bracket.met])
    widths = [a.interval.high_rps / a.interval.low_rps - 1 for a in answers]
    print(
        f"  P{question.percentile:g} under {question.limit_s} s, {question.num_requests:,} requests"
        f" each: true {truth:.3f}/s; found {found.mean():.3f}, spread {found.std() / truth:.1%};"
        f" intervals {np.mean(widths):.1%} wide hold it {np.mean(covered):.0%} of the time"
    )


def known_capacity(question: _Question) -> float:
    """Return the rate at which the percentile of an M/D/1 queue's sojourn is the limit."""
    low, high = 1e-3, 1 / _SERVICE_S - 1e-6
    for _ in range(60):
        middle = (low + high) / 2
        wait_s = question.limit_s - _SERVICE_S
        if _share_waiting_at_most(middle, wait_s) >= question.percentile / 100:
            low = middle
        else:
            high = middle
    return low


def _share_waiting_at_most(rate_rps: float, wait_s: float) -> float:
    """Return P(W <= t) of an M/D/1 queue (A. K. Erlang, 1909); its terms nearly cancel."""
    getcontext().prec = 60
    rate, service, wait = Decimal(rate_rps), Decimal(_SERVICE_S), Decimal(wait_s)
    total = Decimal(0)
    for number in range(int(wait // service) + 1):
        load = rate * (wait - number * service)
        total += (-load) ** number / factorial(number) * load.exp()
    return float((1 - rate * service) * total)


def _search(scenario: ServingScenario, engines: _Tables, targets: ServingTargets) -> _Answer:
    started_s = time.process_time()
    plan = draw_plan(scenario, scenario.seed)
    load = Load(
        deployment=engines,
        plan=plan,
        plan_rps=rate_of_plan(scenario.workload, plan),
        judge=make_judge(targets, scenario),
    )
    search = LoadSearch(load, _TOLERANCE, _CONFIDENCE, InlineContext())
    bracket = search.find_bracket(estimate_service_rps(engines.setup, [engines.tables], plan))
    bracket_s = time.process_time() - started_s
    if bracket.met is None or bracket.missed is None:
        raise RuntimeError("no bracket")
    interval = search.find_interval(bracket.met, bracket.missed, resample_loads(scenario, load), {})
    whole_s = time.process_time() - started_s
    return _Answer(bracket, interval, len(search.probes), bracket_s, whole_s)


def _read_tables() -> CostTables:
    """Return Vidur's tables of a layer as those of a step: all layers, linear between points."""
    columns = {
        path.name.removesuffix(".csv.gz"): _read_columns(path)
        for path in (_VIDUR / "reference_tables").glob("*.csv.gz")
    }
    dense_us = np.sum([columns[name][-1] for name in _DENSE], axis=0) * _OVER_EACH_LAYER_US
    # Token counts round up to eights.
    tokens = np.clip(-(-np.arange(_MAX_TOKENS + 1) // 8) * 8, 8, _MAX_TOKENS)
    tokens_us = np.stack([dense_us[tokens - 1]] * 2)[None]
    contexts = np.append(0, np.arange(_KV_STEP, _MAX_TOKENS + 1, _KV_STEP) - _KV_STEP / 2)
    decode = columns["attn_decode"][-1].reshape(-1, len(contexts)) * _OVER_EACH_LAYER_US
    decode[1:] *= _BATCHING_RATIO
    chunks = np.append(1, np.arange(8, _MAX_TOKENS + 1, 8))
    prefill = columns["attn_prefill"][-1].reshape(len(contexts), -1).T[chunks - 1]
    prefill_us = prefill * _OVER_EACH_LAYER_US
    decode_us = np.repeat(decode[:, :, None], 2, axis=2)[None]
    return CostTables(
        tokens_us=tokens_us,
        rows_us=np.zeros((1, _MAX_TOKENS + 1)),
        decode_seqs=np.arange(1.0, len(decode) + 1),
        decode_mean=contexts,
        decode_raggedness=np.array([1.0, 1e6]),
        decode_us=decode_us,
        mixed_prefill=np.array([1.0]),
        mixed_us=decode_us[None],
        prefill_tokens=chunks.astype(np.float64),
        prefill_context=contexts,
        prefill_us=prefill_us[None],
        # Several prompts are one call on the root of the sum of their squares: one fixed cost.
        prefill_more_us=(prefill_us - prefill_us[:1, :1])[None],
        floor_us=np.zeros_like(tokens_us),
        shared=shared_table(np.zeros((1, 1))),
        stretch=AS_ESTIMATED,
    )


def _read_columns(path: Path) -> Floats:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return np.loadtxt(file, delimiter=",", skiprows=1, ndmin=2).T


if __name__ == "__main__":
    sys.exit(main())
