"""What a measured serving run tells of the times of operators and of the front end.

Steps of a batch were measured and simulated; what the host takes of the simulated ones is taken as
given, and the rest is the time of the step's operators. From these a correction of the device is
learned as `foretoken calibrate` learns it. What is left before the first token is the front end's.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.lowering.graph import BatchShape, DecodeShape, PrefillShape
from foretoken.domain.lowering.lower import lower_rank
from foretoken.domain.measurements.correction import (
    Correction,
    CorrectionRequest,
    Observation,
    ObservedCall,
)
from foretoken.domain.measurements.estimate import (
    LatencyQuery,
    LatencyReply,
    OperatorCall,
    table_of_calls,
)
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.serving_run import ServingRun
from foretoken.domain.results.report import ServingReport
from foretoken.domain.units import US_PER_MS
from foretoken.simulator.cost.latency_surfaces import engine_layout, serving_options
from foretoken.simulator.rank import stage_ranks
from foretoken.simulator.validation.decode_steps import StepRange
from foretoken.simulator.validation.serving import FRONT_END, ServingValidation, validate_serving

_HOST = "host"
# With fewer observations than this factors of groups are not separable from the common one.
_MIN_FOR_GROUPS = 3
# Less of a step than this is within what a regression of measured times cannot tell from none.
_LEAST_RATIO = 0.05
# A front end below this is within what a client's clock and network can be off, in ms.
_LEAST_MS = 0.5


class CorrectionSource(Protocol):
    """What prices operators and learns corrections; any predictor does."""

    def predict(self, query: LatencyQuery) -> LatencyReply:
        """Return estimates for every row of every table."""

    def create_correction(self, request: CorrectionRequest) -> Correction:
        """Learn a correction from observations, and keep it under its name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingCalibration:
    """A scenario that answers as the measured run did, and how far it was and is off.

    `frontend_ms` is what was added to the engine's rule of that name. `calibrated` is the run that
    was learned from: another run tells what the calibration is worth.
    """

    scenario: ServingScenario
    correction: Correction
    frontend_ms: float
    raw: ServingValidation
    calibrated: ServingValidation
    report: ServingReport


def calibrate_serving(
    run: ServingRun,
    scenario: ServingScenario,
    name: str,
    simulate: Callable[[ServingScenario], ServingReport],
    predictor: CorrectionSource,
) -> ServingCalibration:
    """Learn a correction from a run, keep it under a name, and simulate with it.

    `scenario` is that of `scenario_of_run`.

    Raises:
        InvalidRequestError: the run tells nothing of steps, or a correction is in use already.

    """
    if scenario.correction:
        raise InvalidRequestError.of_field("correction", "is to be learned: leave it out")
    first = simulate(scenario)
    raw = validate_serving(run, first)
    observations = observe_steps(scenario, raw, first, predictor)
    correction = predictor.create_correction(
        CorrectionRequest(
            name=name,
            device=scenario.device,
            topology=scenario.topology,
            framework=scenario.framework,
            observations=observations,
            by_group=len(observations) >= _MIN_FOR_GROUPS,
        )
    )
    found = replace(scenario, correction=name)
    report = simulate(found)
    calibrated = validate_serving(run, report)
    missing_ms = _missing_front_end_ms(calibrated)
    if missing_ms:
        found = _with_front_end(found, missing_ms)
        report = simulate(found)
        calibrated = validate_serving(run, report)
    return ServingCalibration(
        scenario=found,
        correction=correction,
        frontend_ms=missing_ms,
        raw=raw,
        calibrated=calibrated,
        report=report,
    )


def observe_steps(
    scenario: ServingScenario,
    validation: ServingValidation,
    report: ServingReport,
    predictor: CorrectionSource,
) -> tuple[Observation, ...]:
    """Return what operators took in measured steps, an observation for each range of batches.

    Calls are counted so that they are estimated to take what operators take in the simulated step:
    graphs, padding and drafts are in its time, not in the calls.

    Raises:
        InvalidRequestError: no answer has a second token, or the host takes all of the time.

    """
    ranges = validation.decode.ranges if validation.decode is not None else ()
    busy_s = sum(report.step_time_s_by_group.values())
    host_ratio = report.step_time_s_by_group.get(_HOST, 0.0) / busy_s if busy_s else 0.0
    found = []
    for item in ranges:
        host_ms = host_ratio * item.simulated_ms
        operators_ms = item.measured_ms - host_ms
        if item.feature == "batch" and operators_ms > _LEAST_RATIO * item.measured_ms:
            calls = _lower_step(scenario, item)
            estimated_us = _price_us(scenario, calls, predictor)
            if estimated_us > 0:
                scale = (item.simulated_ms - host_ms) * US_PER_MS / estimated_us
                found.append(_observe(item, operators_ms, calls, scale))
    if not found:
        raise InvalidRequestError.of_field(
            "--measured", "does not tell how long decode steps take: no answer has a second token"
        )
    return tuple(found)


def _observe(
    item: StepRange, operators_ms: float, calls: tuple[ObservedCall, ...], scale: float
) -> Observation:
    return Observation(
        name=f"steps of {item.batch:.3g} requests, {item.context_tokens:,.0f} tokens of context",
        observed_us=operators_ms * US_PER_MS,
        calls=tuple(replace(one, count=one.count * scale) for one in calls),
    )


def _lower_step(scenario: ServingScenario, item: StepRange) -> tuple[ObservedCall, ...]:
    """Return the calls of a step as the mean of a range is, on all stages of a pipeline."""
    batch = max(round(item.batch), 1)
    context, prompt = max(round(item.context_tokens), batch), round(item.prefill_tokens)
    longest = -(-context // batch)
    decode = DecodeShape(num_seqs=batch, kv_tokens=context, kv_tokens_max=longest)
    prefill = None
    if prompt:
        pairs = prompt * (prompt + 1) // 2
        prefill = PrefillShape(num_seqs=1, q_tokens=prompt, kv_tokens=prompt, score_pairs=pairs)
    shape = BatchShape(
        num_tokens=batch + prompt, num_output_rows=batch, prefill=prefill, decode=decode
    )
    options, layout = serving_options(scenario), engine_layout(scenario)
    ranks = stage_ranks(scenario.model, layout, scenario.device, scenario.topology)
    return tuple(
        ObservedCall(
            call=OperatorCall(
                operator=node.operator,
                dtype=node.dtype,
                phase=node.phase,
                dims={name: int(value) for name, value in node.dims.items()},
                variant=node.variant,
            ),
            count=float(node.repeat) * node.share,
        )
        for rank in ranks
        for node in lower_rank(shape, options, rank)
    )


def _price_us(
    scenario: ServingScenario, calls: tuple[ObservedCall, ...], predictor: CorrectionSource
) -> float:
    """Return what calls are estimated to take, asked as a correction is learned."""
    query = LatencyQuery(
        device=scenario.device,
        tables=tuple(table_of_calls([one.call]) for one in calls),
        topology=scenario.topology,
        framework=scenario.framework,
    )
    tables = predictor.predict(query).tables
    return sum(
        one.count * float(columns.latency_us[0]) for one, columns in zip(calls, tables, strict=True)
    )


def _missing_front_end_ms(validation: ServingValidation) -> float:
    """Return how much longer (below 0: less long) the front end took; 0 where that is not much."""
    part = next((item for item in validation.components if item.name == FRONT_END), None)
    missing_ms = part.measured_ms - part.simulated_ms if part is not None else 0.0
    return round(missing_ms, 2) if abs(missing_ms) >= _LEAST_MS else 0.0


def _with_front_end(scenario: ServingScenario, missing_ms: float) -> ServingScenario:
    frontend_ms = max(scenario.resolve_engine().frontend_ms + missing_ms, 0.0)
    rules = {**scenario.engine.rules, "frontend_ms": f"{frontend_ms:g}"}
    return replace(scenario, engine=replace(scenario.engine, rules=rules))
