"""Measured training steps against their simulation: figures, stability, shares, what to do."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.report import Percentiles, describe_shares
from foretoken.domain.results.training_report import TrainingReport
from foretoken.simulator.validation.finding import NOTABLE_RATIO, Finding, find_estimates
from foretoken.simulator.validation.training_comparison import (
    REST,
    ComponentComparison,
    ComponentScore,
    Contribution,
    Stability,
    attribute_error,
    compare_components,
    compare_proportions,
    compare_step,
    measure_stability,
    score_components,
)
from foretoken.simulator.validation.training_run import MeasuredTraining

# Contributions below this share of all are not spoken of.
_NOTABLE_SHARE = 0.15
# A component further off than this is spoken of.
_FAR_RATIO = 0.08
# Steps that vary by more than this tell a few per cent of error from chance no longer.
_UNSTEADY_RATIO = 0.05

_WORDS = {
    "encoder_fwd": "the layers' forward passes",
    "encoder_bwd": "the layers' backward passes",
    "stage_fwd": "the forward passes",
    "stage_bwd": "the backward passes",
    "mp_allreduce": "the reductions of tensor parallelism",
    "pp_p2p": "the transfers between stages",
    "dp_allreduce": "the reduction of gradients",
    "dp_allgather": "the gathering of parameters",
    "optimizer": "the optimizer's step",
    "update": "the optimizer's kernels",
    REST: "what no scored component explains (waiting, the host, data loading)",
}
_COMPUTE = (
    "Measure the operators of a layer at these sizes (`foretoken plan` says which), check trainer,"
    " recompute and kernels against the run, or calibrate host gaps (`foretoken calibrate"
    " training`)."
)
_NETWORK = (
    "Measure collectives on this cluster (`foretoken catalog import nccl-tests`), and check the"
    " topology and which ranks share a node."
)
_ADVICE = {
    "encoder_fwd": _COMPUTE,
    "encoder_bwd": _COMPUTE,
    "stage_fwd": _COMPUTE,
    "stage_bwd": _COMPUTE,
    "mp_allreduce": _NETWORK,
    "pp_p2p": _NETWORK + " Measured transfers often contain waiting for the receiver.",
    "dp_allreduce": _NETWORK,
    "dp_allgather": _NETWORK,
    "optimizer": "Check zero_stage, the optimizer's formats and the gathering of parameters.",
    "update": "Check zero_stage and the optimizer's formats; measure the optimizer's kernels.",
    REST: "Check the schedule, the transfers (rendezvous or buffered) and the micro batches.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingValidation:
    """How a simulated step compares with measured ones.

    `step_raw` is the step without calibration; the same as `step` where there is none. `scores`
    has the errors of each component over its stages, and of `all` last; `stability` the step first.
    `proportions` splits the `measured` and the `simulated` step of the first stage in ms.
    `simulated_spread_ms` is how simulated steps differ among each other, `simulated_low_ms` and
    `simulated_high_ms` the bounds of the simulated step.
    """

    run_name: str
    source: str
    num_flagged_steps: int
    step: ComponentComparison
    step_raw: ComponentComparison
    components: tuple[ComponentComparison, ...]
    scores: tuple[ComponentScore, ...]
    contributions: tuple[Contribution, ...]
    stability: tuple[Stability, ...]
    simulated_spread_ms: Percentiles
    simulated_low_ms: float
    simulated_high_ms: float
    proportions: Mapping[str, Mapping[str, float]]
    findings: tuple[Finding, ...]


def validate_training(
    run: MeasuredTraining, report: TrainingReport, scenario: TrainingScenario
) -> TrainingValidation:
    """Compare measured steps with the report of the simulation of `scenario`.

    Raises:
        InvalidRequestError: the simulation has no step.

    """
    if report.step_time_ms <= 0:
        reason = report.feasibility.reason or "it has no step"
        raise InvalidRequestError(f"the scenario cannot be compared: {reason}")
    step, components = compare_step(run, report), compare_components(run, report)
    scores = score_components(components)
    contributions = attribute_error(step, components, report, scenario)
    stability = measure_stability(run)
    return TrainingValidation(
        run_name=run.name,
        source=run.source,
        num_flagged_steps=run.num_flagged_steps,
        step=step,
        step_raw=ComponentComparison(
            name="step",
            stage=step.stage,
            measured_ms=step.measured_ms,
            simulated_ms=report.step_time_raw_ms or report.step_time_ms,
        ),
        components=components,
        scores=scores,
        contributions=contributions,
        stability=stability,
        simulated_spread_ms=report.step_spread_ms,
        simulated_low_ms=report.step_time_low_ms,
        simulated_high_ms=report.step_time_high_ms,
        proportions=compare_proportions(run, report, scenario),
        findings=(
            *_of_step(step, stability[0], report),
            *_of_components(step, contributions, scores),
        ),
    )


def _of_step(
    step: ComponentComparison, steadiness: Stability, report: TrainingReport
) -> Iterator[Finding]:
    """Yield how far the step is off, whether that is chance, and what the estimate rests on."""
    text = (
        f"Step: {format_number(step.measured_ms)} ms measured,"
        f" {format_number(step.simulated_ms)} ms simulated ({step.error_ratio:+.1%})."
    )
    if 0 < report.step_time_raw_ms != report.step_time_ms:
        raw = report.step_time_raw_ms / step.measured_ms - 1
        text += f" Without calibration {format_number(report.step_time_raw_ms)} ms ({raw:+.1%})."
    yield Finding(component="step", text=text)
    if not report.feasibility.is_feasible:
        yield Finding(
            component="memory",
            text=f"By the simulation this run could not be: {report.feasibility.reason}.",
            advice="Check recompute, zero_stage, the micro batch and the trainer against the run.",
        )
    if steadiness.variation_ratio > _UNSTEADY_RATIO:
        yield Finding(
            component="step",
            text=f"Measured steps vary by {steadiness.variation_ratio:.0%} (standard deviation over"
            f" mean of {steadiness.num_samples}); the middle 80 % take"
            f" {format_number(steadiness.p10_ms)} to {format_number(steadiness.p90_ms)} ms.",
            advice="Set straggler_ratio and network_spread_ratio to simulate the spread, or measure"
            " with the machines to yourself.",
        )
    yield from find_estimates(
        report.step_time_ratio_by_provenance,
        "The simulated times rest on"
        f" {describe_shares(report.step_time_ratio_by_provenance)} estimates",
        report.step_time_low_ms / report.step_time_ms,
        report.step_time_high_ms / report.step_time_ms,
    )


def _of_components(
    step: ComponentComparison,
    contributions: Sequence[Contribution],
    scores: Sequence[ComponentScore],
) -> Iterator[Finding]:
    """Yield which components the step's error comes from, which are far off, which are flagged."""
    if not scores:
        yield Finding(
            component="run",
            text="The file has whole steps only, which do not tell where the error comes from.",
            advice="Add times of components: `encoder_fwd`, `stage_fwd`, `dp_allreduce`, ...",
        )
        return
    # The largest in any case.
    notable = [
        *contributions[:1],
        *(i for i in contributions[1:] if i.share_ratio >= _NOTABLE_SHARE),
    ]
    notable = notable if abs(step.error_ratio) >= NOTABLE_RATIO else []
    yield from map(_say_contribution, notable)
    said = {item.name for item in notable}
    for score in scores[:-1]:
        if score.num_scored and score.mape_ratio > _FAR_RATIO and score.name not in said:
            yield Finding(
                component=score.name,
                text=f"{score.name} is {score.mean_error_ratio:+.1%} off on average, over"
                f" {_count(score.num_scored, 'stage')}.",
                advice=_ADVICE.get(score.name, ""),
            )
    flagged = scores[-1].num_flagged
    if flagged:
        yield Finding(
            component="run", text=f"Flagged, so shown and not scored: {_count(flagged, 'row')}."
        )


def _say_contribution(item: Contribution) -> Finding:
    word = "long" if item.error_ms > 0 else "short"
    words = _WORDS.get(item.name, item.name)
    amount = f"{format_number(abs(item.error_ms))} ms of the step too {word}"
    return Finding(
        component=item.name,
        text=f"{words[0].upper()}{words[1:]}: {amount} ({item.share_ratio:.0%} of what is off).",
        advice=_ADVICE.get(item.name, ""),
    )


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("s" if number != 1 else "")
