"""Count and rank training strategies, and compare what is ranked with measured steps.

The predictor learns the operators of `training_tables.py` alone. Printed are

- for the spaces of a 7B model on 128 A100 and a 70B model on 1,024, 4,194,304 tokens a step:
  points, legal and fitting ones, CPU seconds from the request to the report (nothing asked before,
  and once more), strategies per CPU second, and memory, compared with other tools;
- InternEvo's question on 128 devices in its own points, next to the counts of its simulator;
- how far the closed form is from the event simulator, over strategies drawn from both spaces;
- CPU milliseconds of cutting 700 graph nodes to 64 stages, by method;
- vTrain's 47 measured strategies of a 39B model on 512 A100: how far the one that is ranked first
  is from the measured best, and the rank correlation;
- InternLM 7B on 8 to 1,024 A100: tokens/s and GPU, predicted and measured;
- FASOP's placements of Llama 70B on 64 A40: how many, and the rank correlation of its steps.

    python tests/benchmarks/bench_training_search.py [path of the shared measurements]
        [--home FOLDER] [--drawn N]
"""

import argparse
import csv
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr  # type: ignore[import-untyped]
from trained_predictor import trained_predictor
from training_rows import PublishedStep, read_steps

from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.models.architecture import find_model
from foretoken.domain.ports import PredictorPort
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import (
    NodeGroup,
    TrainingSearchReport,
    TrainingSearchRequest,
    TrainingSpace,
)
from foretoken.simulator.search.context import InlineContext
from foretoken.simulator.search.internevo.question import build_request
from foretoken.simulator.search.internevo.simulator_verdicts import judge_by_simulator
from foretoken.simulator.search.placement.chain import Chain, find_method
from foretoken.simulator.search.training.canonical import find_redundant
from foretoken.simulator.search.training.search import search_training
from foretoken.simulator.search.training.space import resolve_space
from foretoken.simulator.search.training.step_time import StepTimer
from foretoken.simulator.steps.legality import judge_legality
from foretoken.simulator.training.step import simulate_training

_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
_TOKENS = 4_194_304
_LENGTH = 4096
_SPACES = {"llama-2-7b": 128, "llama-2-70b": 1024}
# Strategies per second and core, with legal ones only where so said. Source: MODELLING notes of
# the project's design, measured on the tools' own examples.
_PEERS = (
    "FASOP 3.3, SimuMax 7 to 25, calculon 174 to 232, InternLM's simulator 300 (legal),"
    " Sailor 2,100, llm-analysis 2,700"
)
# What InternEvo's simulator published of its counts. Source: the same notes.
_INTERNEVO = {"internlm2-7b": "published: 39,932, 6,176, 5,198", "llama-2-70b": "none published"}
_PEAK_UNIT = 1024  # of ru_maxrss on Linux, in bytes
_MIB = 2**20


def main(arguments: Sequence[str]) -> None:
    """Print all parts; without the shared measurements the predictor has the data sheets alone."""
    options = _parse(arguments)
    path = options.data / "training_truth"
    if not path.is_dir():
        _say(f"skipped: {path} is not on this machine")
        return
    steps = list(read_steps(path))
    with trained_predictor(options.data, options.home) as predictor:
        for model, num_devices in _SPACES.items():
            _search(_request(model, num_devices), predictor)
        _say(f"strategies/s and core of others: {_PEERS}")
        _ask_internevo(predictor)
        _compare_with_events(predictor, options.drawn)
        _rank_vtrain([step for step in steps if step.source == "vTrain, 39.1B"], predictor)
        _list_internlm([step for step in steps if step.source == "InternLM 7B"], predictor)
        _rank_fasop(options.data / "fasop" / "results" / "llama70b.csv", predictor)
    _time_partition()


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("data", nargs="?", type=Path, default=_DATA, help="shared measurements")
    parser.add_argument("--home", type=Path, help="keep the trained predictor here, or use it")
    parser.add_argument("--drawn", type=int, default=100, help="strategies to simulate of a space")
    return parser.parse_args(arguments)


def _request(model: str, num_devices: int) -> TrainingSearchRequest:
    scenario = TrainingScenario(
        model=find_model(model),
        device="a100_sxm_80",
        topology="a100_selene",
        sequence_length=_LENGTH,
        global_batch_size=_TOKENS // _LENGTH,
        trainer=TrainerSpec(profile="megatron-core"),
    )
    return TrainingSearchRequest(
        scenario=scenario, space=TrainingSpace(num_devices=(num_devices,)), num_finalists=0
    )


def _search(request: TrainingSearchRequest, predictor: PredictorPort) -> None:
    """Search twice, cold and warm, then simulate the first five."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for temper in ("cold", "warm"):
        report, cpu_s = _run(request, predictor)
        _say(
            f"{request.scenario.model.name} on {request.space.num_devices[0]}, {temper}:"
            f" {report.num_points:,} points, {report.num_legal:,} legal, {report.num_fitting:,}"
            f" fit, {report.num_shapes} shapes, {cpu_s:.2f} CPU s, {report.num_points / cpu_s:,.0f}"
            f" points/s, {report.num_legal / cpu_s:,.0f} legal/s"
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    _say(f"  memory above what was held before: {peak * _PEAK_UNIT / _MIB:,.0f} MiB")
    report, _ = _run(replace(request, num_finalists=5), predictor)
    for finalist in report.finalists:
        simulated_ms = finalist.report.step_time_ms
        _say(
            f"  {finalist.rank}. {finalist.name}: {simulated_ms:,.0f} ms, closed form"
            f" {finalist.closed_form_ms / simulated_ms - 1:+.2%}"
        )


def _run(
    request: TrainingSearchRequest, predictor: PredictorPort
) -> tuple[TrainingSearchReport, float]:
    started_s = time.process_time()
    report = search_training(request, predictor, InlineContext())
    return report, time.process_time() - started_s


def _ask_internevo(predictor: PredictorPort) -> None:
    for model, published in _INTERNEVO.items():
        request = build_request(
            find_model(model), "a100_sxm_80", world_size=128, global_batch_size=_TOKENS
        )
        report, cpu_s = _run(request, predictor)
        best = report.finalists[0] if report.finalists else None
        tokens = best.report.tokens_per_s_per_gpu if best else 0.0
        own = judge_by_simulator(request)
        _say(
            f"InternEvo's points, {model} on 128: {report.num_points:,} tried,"
            f" {report.num_legal:,} legal, {report.num_fitting:,} fit; by its simulator's rules"
            f" {own.num_tried:,}, {own.num_legal:,}, {own.num_fitting:,} ({published});"
            f" {cpu_s:.2f} CPU s with 5 simulations; best {best.name if best else 'none'},"
            f" {tokens:,.0f} tokens/s/GPU"
        )


def _compare_with_events(predictor: PredictorPort, num_drawn: int) -> None:
    """Simulate strategies drawn from the legal ones of each space, and compare the steps."""
    random = np.random.default_rng(0)
    for model, num_devices in _SPACES.items():
        request = _request(model, num_devices)
        space = resolve_space(request)
        points = space.piece(0, space.num_points)
        legal = points.take(np.flatnonzero(judge_legality(points) == 0))
        is_left_out = np.any(list(find_redundant(legal, space).values()), axis=0)
        legal = legal.take(np.flatnonzero(~is_left_out))
        rows = np.sort(random.choice(len(legal), min(num_drawn, len(legal)), replace=False))
        drawn = legal.take(rows)
        closed_ms = StepTimer(request.scenario, predictor).time(drawn).step_us / 1e3
        simulated_ms = np.array(
            [
                simulate_training(drawn.scenario(row), predictor, None).step_time_ms
                for row in range(len(drawn))
            ]
        )
        errors = closed_ms / simulated_ms - 1
        worst = errors[np.abs(errors).argmax()]
        correlation = spearmanr(closed_ms, simulated_ms).statistic
        _say(
            f"closed form against events, {len(drawn)} strategies of {model} on {num_devices}:"
            f" mean {errors.mean():+.3%}, mean absolute {np.abs(errors).mean():.3%}, P90"
            f" {np.quantile(np.abs(errors), 0.9):.3%}, worst {worst:+.2%}, rank {correlation:.5f}"
        )


def _rank_vtrain(steps: Sequence[PublishedStep], predictor: PredictorPort) -> None:
    """Rank the measured strategies by the event simulator."""
    reports = [simulate_training(step.scenario, predictor, None) for step in steps]
    predicted = np.array([report.step_time_ms for report in reports])
    measured = np.array([step.measured_ms for step in steps])
    first = int(predicted.argmin())
    _say(
        f"vTrain 39B on 512, {len(steps)} strategies: the first by prediction"
        f" ({steps[first].label}) is {measured[first] / measured.min() - 1:+.2%} from the measured"
        f" best ({steps[int(measured.argmin())].label}); rank correlation"
        f" {spearmanr(predicted, measured).statistic:.3f}; goal within 3 %"
    )


def _list_internlm(steps: Sequence[PublishedStep], predictor: PredictorPort) -> None:
    for step in steps:
        report = simulate_training(step.scenario, predictor, None)
        measured = report.tokens_per_s_per_gpu * report.step_time_ms / step.measured_ms
        _say(
            f"InternLM 7B, {step.label}: {report.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, measured"
            f" {measured:,.0f}, {report.tokens_per_s_per_gpu / measured - 1:+.1%}"
        )


def _rank_fasop(path: Path, predictor: PredictorPort) -> None:
    """Rank FASOP's own placements of Llama 70B on eight nodes of A40; no sequence is stated."""
    rows = list(csv.DictReader(path.open(encoding="utf-8")))
    theirs = {
        tuple(int(row[name]) for name in ("tp", "dp", "pp", "mbs")): float(row["step_time(s)"])
        for row in rows
        if row["is_oom"] == "False"
    }
    for recompute in ("none", "full"):
        report, _ = _run(_fasop_request(recompute), predictor)
        found = report.candidates
        keys = zip(
            found.tp.tolist(),
            found.dp.tolist(),
            found.pp.tolist(),
            found.micro_batch_size.tolist(),
            strict=True,
        )
        ours = dict(zip(keys, found.step_time_ms.tolist(), strict=True))
        both = [(theirs[key], ours[key]) for key in ours if key in theirs]
        rank = spearmanr(*zip(*both, strict=True)).statistic
        _say(
            f"FASOP, Llama 70B on 64 A40, recompute {recompute}: {report.num_points} points, its"
            f" {len(rows)}; {report.num_fitting} fit here, {len(theirs)} there, {len(both)} both;"
            f" rank correlation {rank:.2f}"
        )


def _fasop_request(recompute: str) -> TrainingSearchRequest:
    scenario = TrainingScenario(
        model=find_model("llama-2-70b"),
        device="a40",
        topology="a40_pcie",
        sequence_length=1024,
        global_batch_size=32,
        recompute=recompute,
    )
    space = TrainingSpace(
        node_groups=(NodeGroup(device="a40", num_nodes=8),),
        partition="min_max",
        micro_batch_sizes=(1, 2, 4, 8, 16, 32),
        virtual_stages=(1,),
    )
    return TrainingSearchRequest(
        scenario=scenario, space=space, num_finalists=0, max_candidates=1000
    )


def _time_partition() -> None:
    """Cut 700 nodes to 64 stages on two types of device."""
    random = np.random.default_rng(0)
    costs = random.lognormal(sigma=0.5, size=(700, 1)) * np.array([1.0, 2.5])
    types = [stage % 2 for stage in range(64)]
    for name, chain in (
        ("one type of device", Chain.of(costs[:, :1].tolist(), [0] * 64)),
        ("two types", Chain.of(costs.tolist(), types)),
    ):
        parts = []
        for method in ("even", "min_max", "dynamic"):
            find_method(method).cut(chain)
            started_s = time.process_time()
            cut = find_method(method).cut(chain)
            spent_ms = (time.process_time() - started_s) * 1e3
            parts.append(f"{method} {spent_ms:.1f} ms (longest stage {cut.longest:.2f})")
        _say(f"700 nodes on 64 stages, {name}: {', '.join(parts)}; goal 50 ms")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
