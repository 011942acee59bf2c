"""How simulations compare with serving runs that were published as mean TTFT and TPOT.

Of a run's launch only what its row says is known: engine and version, formats, layout, lengths, and
how many requests ran at a time. The rest is the engine's default, but for what the scripts say of
InferenceMAX, from whose database most of these runs are (`launches/published.yaml`).
"""

import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from foretoken.domain.errors import ForetokenError
from foretoken.domain.frameworks.engine import EngineSpec, find_engine, find_engine_of_day
from foretoken.domain.models.architecture import ModelArchitecture, all_models, find_model
from foretoken.domain.models.quantization import PARTS, all_quantizations, find_quantization
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.workload import LengthSpec, WorkloadSpec
from foretoken.domain.results.report import ServingReport
from foretoken.simulator.validation.published_launch import find_launch
from foretoken.simulator.validation.published_run import PublishedRun

# What presets of one model in several formats end with, and the schemes in a quantisation's name.
_FORMAT_END = re.compile(r"-(int4|fp8|nvfp4)$")
_SCHEME = re.compile(r"(?:^|=)([^=+]+)(?=\+|$)")
Simulate = Callable[[ServingScenario], ServingReport]


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedOutcome:
    """A published run and its simulation (means in ms), or `reason` why there is none."""

    run: PublishedRun
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    reason: str = ""

    @property
    def ttft_error_ratio(self) -> float:
        """Simulated over measured TTFT, minus one."""
        return self.ttft_ms / self.run.ttft_ms - 1

    @property
    def tpot_error_ratio(self) -> float:
        """Simulated over measured TPOT, minus one."""
        return self.tpot_ms / self.run.tpot_ms - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedScore:
    """The errors of a model's runs under an engine on a device, means without their signs.

    `num_left_out` runs were not simulated, the first of them for `reason`.
    """

    model: str
    engine: str
    device: str
    num_runs: int
    num_left_out: int
    tpot_mape_ratio: float = 0.0
    tpot_bias_ratio: float = 0.0
    ttft_mape_ratio: float = 0.0
    ttft_bias_ratio: float = 0.0
    reason: str = ""


def scenario_of_published(run: PublishedRun) -> ServingScenario:
    """Return what simulates a run: a closed loop of its requests on one replica.

    Raises:
        ForetokenError: its model, device or engine is not known here.

    """
    model, quantization = _find_checkpoint(run)
    launch = find_launch(run)
    ep = run.tp * run.dp if launch.has_expert_parallelism else run.ep
    return ServingScenario(
        name=run.name,
        model=model,
        device=run.device,
        quantization=quantization,
        kv_dtype=launch.kv_dtype,
        layout=ParallelLayout(
            tp=run.tp, pp=run.pp, dp=run.dp, ep=ep, attention_dp=run.dp > 1 and ep == 1
        ),
        engine=EngineSpec(
            profile=_find_profile(run),
            max_num_seqs=run.concurrency,
            max_num_batched_tokens=launch.step_tokens,
            memory_utilization_ratio=launch.memory_ratio,
            rules=launch.rules,
        ),
        workload=WorkloadSpec(
            arrival="closed_loop",
            arrival_options={"concurrency": str(run.concurrency)},
            num_requests=launch.num_rounds * run.concurrency,
            prefill=draw_lengths(run.input_tokens, run.shortest_ratio),
            decode=draw_lengths(run.output_tokens, run.shortest_ratio),
        ),
    )


def _find_checkpoint(run: PublishedRun) -> tuple[ModelArchitecture, str]:
    """Return the checkpoint that ran, and in what it was quantised where it is not stored so.

    Rows say of formats how wide they are: `fp8` of scaled blocks, too, and of all parts of a model
    what only its experts have. Servers run checkpoints as they are stored.
    """
    model = find_model(run.model)
    named = [name for name in reversed(run.formats) if name in all_quantizations()]
    if not named:
        return model, ""
    other = f"{_FORMAT_END.sub('', run.model)}-{named[0].partition('_')[0]}"
    if other in all_models():
        stored = _SCHEME.findall(find_model(other).quantization)
        if named[0] in [name.removesuffix("_static") for name in stored]:
            return find_model(other), ""
    return model, "" if _widths(model.quantization) & _widths(named[0]) else named[0]


def _widths(scheme: str) -> set[int]:
    """Return in how many whole bits a scheme stores weights that it does not leave as they are."""
    stored = find_quantization(scheme)
    return {int(stored.weight_of(part).bits) for part in PARTS} - {0}


def draw_lengths(longest: int, shortest_ratio: float) -> LengthSpec:
    """Return lengths drawn evenly up to the longest; all alike, requests would keep in step."""
    shortest = max(1, int(longest * shortest_ratio))
    return LengthSpec(kind="uniform", minimum=shortest, maximum=longest)


def _find_profile(run: PublishedRun) -> str:
    """Return the profile of the run's version, else of what was released when it ran."""
    try:
        return find_engine(f"{run.engine}-{run.version}").name
    except ForetokenError:
        found = find_engine_of_day(run.engine, run.day)
        return found.name if found else find_engine(run.engine).name


def compare_published(
    runs: Iterable[PublishedRun], simulate: Simulate
) -> Iterator[PublishedOutcome]:
    """Yield every run with its simulation; runs of the same settings are simulated once."""
    known: dict[PublishedRun, PublishedOutcome] = {}
    for run in runs:
        settings = replace(run, name="", ttft_ms=1.0, tpot_ms=1.0)
        if settings not in known:
            known[settings] = _simulate(run, simulate)
        yield replace(known[settings], run=run)


def _simulate(run: PublishedRun, simulate: Simulate) -> PublishedOutcome:
    try:
        report = simulate(scenario_of_published(run))
    except ForetokenError as err:
        return PublishedOutcome(run=run, reason=err.message)
    if not report.feasibility.is_feasible:
        return PublishedOutcome(run=run, reason=report.feasibility.reason)
    return PublishedOutcome(run=run, ttft_ms=report.ttft_ms.mean, tpot_ms=report.tpot_ms.mean)


def draw_runs(runs: Sequence[PublishedRun], most: int) -> list[PublishedRun]:
    """Return at most so many runs of every model, engine and device, evenly over their table."""
    groups: dict[tuple[str, str, str], list[PublishedRun]] = {}
    for run in runs:
        groups.setdefault(_group_of(run), []).append(run)
    return [
        own[index * len(own) // min(most, len(own))]
        for own in groups.values()
        for index in range(min(most, len(own)))
    ]


def score_published(outcomes: Iterable[PublishedOutcome]) -> tuple[PublishedScore, ...]:
    """Return the errors by model, engine and device."""
    groups: dict[tuple[str, str, str], list[PublishedOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault(_group_of(outcome.run), []).append(outcome)
    return tuple(_score(*key, members) for key, members in sorted(groups.items()))


def _group_of(run: PublishedRun) -> tuple[str, str, str]:
    return run.model, run.engine, run.device


def _score(
    model: str, engine: str, device: str, outcomes: Sequence[PublishedOutcome]
) -> PublishedScore:
    done = [outcome for outcome in outcomes if not outcome.reason]
    reasons = [outcome.reason for outcome in outcomes if outcome.reason]
    tpot = [outcome.tpot_error_ratio for outcome in done] or [0.0]
    ttft = [outcome.ttft_error_ratio for outcome in done] or [0.0]
    return PublishedScore(
        model=model,
        engine=engine,
        device=device,
        num_runs=len(done),
        num_left_out=len(reasons),
        tpot_mape_ratio=statistics.fmean(map(abs, tpot)),
        tpot_bias_ratio=statistics.fmean(tpot),
        ttft_mape_ratio=statistics.fmean(map(abs, ttft)),
        ttft_bias_ratio=statistics.fmean(ttft),
        reason=reasons[0] if reasons else "",
    )
