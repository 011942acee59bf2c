"""Measured training steps against their simulation: figures, stability, shares, what to do."""

from collections.abc import Mapping
from dataclasses import dataclass

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.report import Percentiles
from foretoken.domain.results.training_report import TrainingReport
from foretoken.simulator.validation.finding import Finding
from foretoken.simulator.validation.training_attribution import Contribution, attribute_error
from foretoken.simulator.validation.training_comparison import (
    ComponentComparison,
    ComponentScore,
    Stability,
    compare_components,
    compare_step,
    measure_stability,
    score_components,
)
from foretoken.simulator.validation.training_finding import find_components, find_step
from foretoken.simulator.validation.training_proportion import compare_proportions
from foretoken.simulator.validation.training_run import MeasuredTraining


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingValidation:
    """How a simulated step compares with measured ones.

    `step_raw` is the step without calibration; the same as `step` where there is none. `scores`
    has the errors of each component over its stages, and of `all` last; `stability` the step first.
    `proportions` splits the `measured` and the `simulated` step of the first stage in ms.
    `simulated_spread_ms` is how simulated steps differ among each other, `simulated_low_ms` and
    `simulated_high_ms` the step with every operator at its bounds.
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
            *find_step(step, stability[0], report),
            *find_components(step, contributions, scores),
        ),
    )
